"""The plan of a conversion, from headers alone: an impossible request fails here, before any weight is read."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvfold.convert import processes
from kvfold.convert.checkpoint.folder import CONFIG, SINGLE, WEIGHT_SUFFIXES, read_config
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.json_text import portable_name
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.reader import Reader
from kvfold.convert.checkpoint.shards import OutputTensor, Shard, assign_shards
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.schema import Role
from kvfold.convert.methods.registry import quick_method
from kvfold.convert.request import ConvertRequest
from kvfold.convert.targets.engines import (
    Result,
    Verdict,
    alternatives,
    folded_result,
    latent_result,
    latent_result_of,
    verdicts,
)
from kvfold.convert.targets.mla.config import LatentTarget, cached_divisors, query_rank
from kvfold.convert.targets.mla.layout import latent_layout, latent_reads, padding
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.own_code import needs_own_code, own_folded_layout, own_latent_layout
from kvfold.convert.targets.same_family import (
    ABSORBED,
    POOLED,
    attention_label,
    cache_elements,
    folded_layout,
)
from kvfold.convert.targets.target import TargetLayout, keepable, kept_config, kept_tensors, stored_dtype

_SLACK = 1 << 20  # config, index, card and file system blocks


@dataclass(frozen=True)
class Plan:
    """All decisions made before weights are read.

    ``cache_elements`` are the source's KV-cache elements per token per layer.
    """

    request: ConvertRequest
    checkpoint: Checkpoint
    model: Model
    layout: TargetLayout
    shards: tuple[Shard, ...] = ()
    latent: LatentTarget | None = None  # the split of an MLA target

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """All tensors as the files hold them: those of ``layout``, but for weights that stay quantized."""
        if not self.request.keep_quantized:
            return self.layout.tensors
        return kept_tensors(self.layout.tensors, self.checkpoint, self._attention)

    @property
    def config(self) -> dict[str, Any]:
        """``config.json`` of the output."""
        if not self.request.keep_quantized:
            return self.layout.config
        return kept_config(self.layout.config, self.tensors, self.checkpoint)

    @property
    def keepable(self) -> int:
        """Quantized weights of the source that ``--keep-quantized`` leaves as they are, given or not."""
        return len(keepable(self.layout.tensors, self.checkpoint, self._attention))

    @property
    def made_of(self) -> tuple[str, ...]:
        """What the source was made of, and what of it stays."""
        kept = (f"{self.keepable} of these weights kept as they are stored",) if self.request.keep_quantized else ()
        return (*self.checkpoint.made_of, *kept)

    @property
    def source_name(self) -> str:
        return self.checkpoint.origin

    @property
    def geometry(self) -> Geometry:
        return self.model.geometry

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a GQA or MQA target."""
        return 1 if self.request.kv_heads is None else self.request.kv_heads

    @property
    def grouping(self) -> str:
        """The request's grouping; by default ``similar`` for MHA sources (heads that share already were trained to)."""
        shares = self.geometry.kv_heads < self.geometry.heads
        return self.request.group or ("contiguous" if shares else "similar")

    @property
    def source_kind(self) -> str:
        return attention_label(self.geometry.heads, self.geometry.kv_heads)

    @property
    def cache_elements(self) -> int:
        return cache_elements(self.geometry)

    @property
    def own_shards(self) -> tuple[Shard, ...]:
        """The shards that this process writes: all of them, or its share where several convert together."""
        return tuple(self.shards[number] for number in processes.part(len(self.shards)))

    @property
    def _attention(self) -> frozenset[str]:
        layers = range(self.geometry.layers)
        return frozenset(name for layer in layers for name in self.model.attention_names(layer))

    def latent_target(self) -> LatentTarget:
        """``latent``. Raises ValueError when the target is not MLA."""
        if self.latent is None:
            raise ValueError("plan: expected an MLA target, found another")
        return self.latent

    def query_rank(self) -> int | None:
        """Channels of the query latent in the files, None without one."""
        return query_rank(self.model, self.latent_target())

    @property
    def padding(self) -> int:
        """Parameters that are zero because heads are padded to the sizes of engines' kernels."""
        return 0 if self.latent is None or self.layout.code is not None else padding(self.model, self.latent)

    @property
    def result(self) -> Result:
        """What engines make of the output depends on."""
        if self.latent is not None and self.layout.code is not None:
            made = latent_result_of(self.model, self.latent)
        elif self.latent is not None:
            made = latent_result(self.layout.config)
        else:
            made = folded_result(self.model, self.kv_heads)
        return replace(made, kept=self.request.keep_quantized)

    @property
    def engines(self) -> list[Verdict]:
        """What each engine makes of the output."""
        return verdicts(self.result, alternatives(self.model, self.latent))

    def read_names(self, layer: int) -> tuple[str, ...]:
        """The source tensors that the transform of ``layer`` reads."""
        if self.request.to == "mla":
            own = self.layout.code is not None
            return self.model.attention_names(layer) if own else latent_reads(self.model, layer)
        return self.model.attention_names(layer, self.roles)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The projections that the method changes: pooling leaves queries and the output alone in a stock class."""
        return _roles(self.request, self.model)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the output will take, headers and side files included."""
        extra = sum(path.stat().st_size for path in self.checkpoint.extra_files())
        names = sum(len(tensor.name) + 120 for tensor in self.tensors)
        return sum(tensor.nbytes for tensor in self.tensors) + 3 * names + extra + _SLACK

    @property
    def free_bytes(self) -> int:
        """Free bytes on the disk of OUT."""
        folder = Path(self.request.out).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        return shutil.disk_usage(existing).free

    def origins(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """For every output tensor how it came about, and the source tensors that it is made from.

        ``copied``, ``cast``, ``dequantized`` and so on, or the method.
        """
        names: dict[str, tuple[str, tuple[str, ...]]] = {}
        for tensor in self.tensors:
            if not tensor.computed:
                infos = [tensor.kept or self.checkpoint.tensors[name] for name in tensor.sources]
                changed = any(tensor.dtype != info.dtype for info in infos)
                kind = next((info.made for info in infos if info.made), "cast" if changed else "copied")
                names[tensor.name] = (kind if infos else "zeros", tensor.sources)
        for layer, computed in enumerate(self.layout.computed):
            names.update({name: (self.request.resolved_method, self.read_names(layer)) for name in computed})
        return {tensor.name: names[tensor.name] for tensor in self.tensors}


def dense_dtype(request: ConvertRequest) -> str:
    """The safetensors dtype that quantized weights of the source are dequantized to: the one they are stored in."""
    return stored_dtype("BF16", _stored_dtype(request))


def described(request: ConvertRequest) -> Checkpoint | None:
    """The model that config.json describes, in a folder without weights; None for any other source.

    Names and shapes are the family's, in the dtype that the config names (bfloat16 without one). Enough for a dry run.
    """
    folder = Path(request.model)
    if not (folder / CONFIG).is_file() or any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()):
        return None
    config, digest = read_config(folder)
    config.pop("quantization_config", None)
    names = {name: dtype for dtype, name in TORCH_NAMES.items()}
    dtype = names.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    infos, end = {}, 0
    for tensor in model_of(config).tensors.values():
        start, end = end, end + tensor_bytes(dtype, tensor.shape)
        infos[tensor.name] = TensorInfo(tensor.name, dtype, tensor.shape, SINGLE, start, end)
    return Checkpoint(folder, config, infos, portable_name(folder), {CONFIG: digest}, Reader(), {})


def make_plan(request: ConvertRequest, checkpoint: Checkpoint) -> Plan:
    """Raises InputError when the checkpoint is not one of its family, or cannot be converted to the target."""
    model = model_of(checkpoint.config, checkpoint.tensors)
    problems = model.tensor_problems(checkpoint.tensors) or dtype_problems(model, checkpoint)
    if problems:
        raise InputError(
            f"{checkpoint.origin}: its tensors are not those of a {model.family.model_type} model with this "
            "config.json; check that files and config belong together",
            problems,
        )
    model.check_values()
    if request.to == "mla":
        target = latent_targets(request, model)[-1]  # of a budget the largest: calibration resolves it later
        return _latent_plan(
            request, checkpoint, model, target, [[1.0] * (target.rope_dim // 2)] * model.geometry.layers
        )
    return _fold_plan(request, checkpoint, model)


def check_processes(plan: Plan) -> None:
    """Raise InputError when several processes run and the request is one for a single process."""
    count, request = processes.count(), plan.request
    if count == 1:
        return
    if request.polish:
        raise InputError(
            f"{opt('polish')}: trains the whole model in one process, found {count}; run it without torchrun, or leave "
            f"{opt('polish')} out: {opt('refine')} is shared out"
        )
    if request.calibrated and request.samples < count:
        raise InputError(
            f"{opt('samples')}: expected at least {count}, a sequence for each process, found {request.samples}; "
            "raise it, or "
            "lower --nproc-per-node"
        )


def resolved(plan: Plan, target: LatentTarget, theta: Sequence[Sequence[float]]) -> Plan:
    """``plan`` with the split ``target`` and the rotary frequencies ``theta [layers][P/2]``."""
    return _latent_plan(plan.request, plan.checkpoint, plan.model, target, theta)


def _latent_plan(
    request: ConvertRequest,
    checkpoint: Checkpoint,
    model: Model,
    target: LatentTarget,
    theta: Sequence[Sequence[float]],
) -> Plan:
    dtype = _stored_dtype(request)
    if target.layout == "kvfold":
        layout = own_latent_layout(model, checkpoint, target, theta, dtype)
    else:  # a stock class has one set of frequencies
        layout = latent_layout(model, checkpoint, target, theta[0], dtype)
    return _sharded(Plan(request, checkpoint, model, layout, latent=target))


def _fold_plan(request: ConvertRequest, checkpoint: Checkpoint, model: Model) -> Plan:
    if model.qk_norm is not None and model.qk_norm.after_rotary and request.chosen_method.needs_linear_keys:
        raise InputError(
            f"{opt('method', request.resolved_method)} does not support {model.family.model_type}, which normalizes "
            f"queries and keys after their rotary embedding; use {opt('method', quick_method(request.to))} with "
            f"{opt('refine', 'auto')}"
        )
    kv_heads = 1 if request.kv_heads is None else request.kv_heads
    check_kv_heads(kv_heads, model.geometry, request.allow_growth)
    dtype = _stored_dtype(request)
    if needs_own_code(model):
        layout = own_folded_layout(model, checkpoint, kv_heads, dtype)
    elif request.layout is not None:
        raise InputError(
            f"{opt('layout', request.layout)}: the stock class of {model.family.model_type} holds "
            f"{opt('to', request.to)}; leave "
            f"{opt('layout')} out"
        )
    else:
        layout = folded_layout(model, checkpoint, kv_heads, roles=_roles(request, model), dtype=dtype)
    return _sharded(Plan(request, checkpoint, model, layout))


def _sharded(plan: Plan) -> Plan:
    """``plan`` with its tensors shared out to files. Raises InputError when nothing can stay quantized as asked."""
    if plan.request.keep_quantized and not plan.keepable:
        stored = "; ".join(plan.checkpoint.made_of) or "none that are quantized"
        raise InputError(
            f"{opt('keep_quantized', True)}: expected weights outside the attention in FP8 with a scale per whole "
            "block, or MXFP4 "
            f"experts, which the class of the result stores alike, found {stored}; leave it out"
        )
    return replace(plan, shards=tuple(assign_shards(plan.tensors, plan.request.shard_bytes)))


def _stored_dtype(request: ConvertRequest) -> str | None:
    """The dtype of the output's tensors, None for that of each source tensor."""
    return None if request.dtype == "auto" else request.dtype


def _roles(request: ConvertRequest, model: Model) -> tuple[Role, ...]:
    stays = request.chosen_method.pools and not request.calibrated
    return POOLED if stays and not needs_own_code(model) else ABSORBED


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
    present = cache_elements(model.geometry)
    if not possible and (request.budget or 0) >= present and not request.allow_growth:
        # However it is split: a split's own problems would not say so.
        raise InputError(
            f"{opt('budget', request.budget)}: expected fewer KV-cache elements per token per layer than the source's "
            f"{present} ({opt('allow_growth', True)} converts anyway)"
        )
    if not possible:
        raise InputError(problems[0][0], problems[0][1:])
    return possible


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
