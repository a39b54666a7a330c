"""What a request may ask of a model: numbers of key/value heads, splits of a latent."""

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model
from kvfold.convert.request import ConvertRequest
from kvfold.convert.targets.mla.config import LatentTarget, cached_divisors
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.own_code import needs_own_code
from kvfold.convert.targets.same_family import cache_elements


def dtype_problems(model: Model, checkpoint: Checkpoint) -> list[str]:
    """Weights and biases that hold whole numbers; buffers beside them may."""
    stored = {name: checkpoint.tensors[name].dtype for name in model.tensors}
    expected = ", ".join(sorted(FLOAT_DTYPES))
    return [
        f"wrong dtype: {name} is {dtype}, expected one of {expected}"
        for name, dtype in stored.items()
        if dtype not in FLOAT_DTYPES
    ]


def latent_targets(request: ConvertRequest, model: Model) -> list[LatentTarget]:
    """The splits that an MLA request allows, the one with most rotary dims last; a single one unless it is a budget.

    For a budget of N elements P is a multiple of the largest power of two up to N/8: among these are the splits that
    kernels are written for. Raises InputError when none is possible.
    """
    if request.budget is None:
        splits = [(request.kv_rank or 0, request.rope_dim or 0)]
    elif not model.geometry.rotary_dims:
        splits = [(request.budget, 0)]
    else:
        step = max(2, 1 << (request.budget // 8).bit_length() >> 1)
        splits = [(request.budget - rope, rope) for rope in range(step, request.budget, step)]
    layout = "kvfold" if request.layout is None and needs_own_code(model) else request.resolved_layout
    options = request.q_rank, layout, request.rotate_latent
    if request.budget is not None:  # of which norms that are kept take a part
        divisors = cached_divisors(model, LatentTarget(request.budget, 0, *options))
        splits = [(rank - divisors, rope) for rank, rope in splits]
    targets = [LatentTarget(rank, rope, *options) for rank, rope in splits]
    problems = [latent_problems(model, target, allow_growth=request.allow_growth) for target in targets]
    possible = [target for target, found in zip(targets, problems, strict=True) if not found]
    if not possible and request.budget is not None and not request.allow_growth:
        _check_budget(request.budget, cache_elements(model.geometry))
    if not possible:
        raise InputError(problems[0][0], problems[0][1:])
    return possible


def _check_budget(budget: int, present: int) -> None:
    """Raises InputError for a budget that is too large however it is split; a split's own problems would not say so."""
    if budget >= present:
        raise InputError(
            f"{opt('budget', budget)}: expected fewer KV-cache elements per token per layer than the source's "
            f"{present} "
            f"({opt('allow_growth', True)} converts anyway)"
        )


def possible_kv_heads(geometry: Geometry) -> list[int]:
    """Numbers of key/value heads that a fold can reach: the proper divisors of the present number, largest first."""
    return [g for g in range(geometry.kv_heads - 1, 0, -1) if geometry.kv_heads % g == 0]


def check_kv_heads(kv_heads: int, geometry: Geometry, allow_growth: bool) -> None:
    """Raises InputError unless ``kv_heads`` groups can be made of the present heads."""
    present = geometry.kv_heads
    choices = ", ".join(map(str, possible_kv_heads(geometry))) or "none: there is one head already"
    if kv_heads > geometry.heads:
        raise InputError(
            f"{opt('kv_heads', kv_heads)}: more than the {geometry.heads} query heads; possible here: {choices}"
        )
    if present == 1 and not allow_growth:
        raise InputError(
            "the model is MQA already, with one key/value head, so nothing would shrink; `kvfold inspect` lists what "
            f"it can become ({opt('allow_growth', True)} converts all the same)"
        )
    if kv_heads == present and not allow_growth:
        raise InputError(
            f"{opt('kv_heads', kv_heads)}: the model has {present} key/value heads already, so nothing would shrink; "
            f"possible here: {choices} ({opt('allow_growth', True)} converts all the same)"
        )
    if kv_heads > present:
        raise InputError(
            f"{opt('kv_heads', kv_heads)}: the model has only {present} key/value heads; possible here: {choices}"
        )
    if present % kv_heads:
        raise InputError(
            f"{opt('kv_heads', kv_heads)}: does not divide the {present} key/value heads; possible here: {choices}"
        )
