"""``kvfold inspect``: facts about a checkpoint from its config and headers. Imports neither torch nor transformers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.tensors import ROLES
from kvfold.convert.io.checkpoint import Checkpoint, open_headers
from kvfold.convert.io.headers import DTYPE_BITS, FLOAT_DTYPES
from kvfold.convert.sizes import bytes_text
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.mla.problems import model_problems
from kvfold.convert.targets.same_family import attention_kind, cache_elements

CONTEXTS = {"8k": 8192, "128k": 131072}
_PARTS = (4, 8)  # divisors of the present cache that are offered as MLA budgets
_LATENT_ONLY = ("value_dim", "kv_rank", "q_rank")
_LATENT_KEYS = (
    *("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
    *("hidden_size", "v_head_dim"),
)


@dataclass(frozen=True)
class CacheSize:
    """The KV cache of one sequence: elements per token per layer, bytes per token, bytes at each of ``CONTEXTS``.

    A layer with a window never holds more than its window.
    """

    numbers_per_token_and_layer: int
    bytes_per_token: int
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class TargetSize(CacheSize):
    """The cache of a target, the ``options`` of ``kvfold convert`` that make it, and the part of the cache it saves."""

    options: str
    saves: float


@dataclass(frozen=True)
class LatentLimits:
    """Whether MLA is possible: within these limits, or not for these reasons."""

    because: tuple[str, ...] = ()
    numbers_below: int | None = None
    rope_dim_up_to: int | None = None

    @property
    def possible(self) -> bool:
        return not self.because

    def to_dict(self) -> dict[str, Any]:
        if self.because:
            return {"possible": False, "because": list(self.because)}
        return {"possible": True, "numbers_below": self.numbers_below, "rope_dim_up_to": self.rope_dim_up_to}


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's attention, weights and cache, and the targets it can be converted to.

    ``head_dim``, ``model_dim``, ``rotary_dims``: dims. ``value_dim``, ``kv_rank`` and ``q_rank`` are of latent (MLA)
    models alone, whose ``targets`` are empty and whose ``latent`` is None. ``windows``: the different window sizes.
    """

    model: str
    family: str
    architecture: str
    attention: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    model_dim: int
    kv_rank: int | None = None
    q_rank: int | None = None
    biases: list[str]
    qk_norm: str | None
    rotary_dims: int
    rotary_layers: int
    rope: str
    windows: list[int]
    max_context: int | None
    dtype: str
    parameters: int
    weight_bytes: int
    files: int
    cache: CacheSize
    targets: list[TargetSize]
    latent: LatentLimits | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``kvfold inspect --json`` prints them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.attention != "MLA":
            values = {name: value for name, value in values.items() if name not in _LATENT_ONLY}
        return values | {
            "cache": asdict(self.cache),
            "targets": [{"options": target.options, **asdict(target)} for target in self.targets],
            "latent": None if self.latent is None else self.latent.to_dict(),
        }


def inspect_checkpoint(model: str) -> Inspection:
    """Facts about ``model`` (a folder or hub id; only headers are read). Cache sizes are those of one sequence.

    Raises InputError when there is no such checkpoint, its files are damaged, or its family is not supported.
    """
    checkpoint = open_headers(model)
    try:
        return _inspect_latent(checkpoint) if is_latent(checkpoint.config) else _inspect(checkpoint)
    finally:
        checkpoint.close()


def _inspect(checkpoint: Checkpoint) -> Inspection:
    model = model_of(checkpoint.config)
    problems = model.tensor_problems(checkpoint.tensors)
    if problems:
        raise InputError(f"{checkpoint.origin}: its tensors are not those of its config.json", problems)
    family, geometry, layers = model.family, model.geometry, model.layers
    dtype = _dtype(checkpoint)
    windows = [layer.window for layer in layers]
    return Inspection(
        model=checkpoint.origin,
        family=family.model_type,
        architecture=family.architecture,
        attention=attention_kind(geometry.heads, geometry.kv_heads),
        layers=geometry.layers,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        model_dim=geometry.model_dim,
        biases=[role for role in ROLES if model.has_bias(role)],
        qk_norm=model.qk_norm.kind if model.qk_norm else None,
        rotary_dims=geometry.rotary_dims,
        rotary_layers=sum(layer.rotates for layer in layers),
        rope=model.rope_table(layers[0].type)["rope_type"],
        windows=sorted({window for window in windows if window is not None}),
        max_context=geometry.positions,
        **_weights(checkpoint, dtype),
        cache=_cache(cache_elements(geometry), windows, dtype),
        targets=_targets(model, windows, dtype),
        latent=_latent_limits(model),
    )


def _inspect_latent(checkpoint: Checkpoint) -> Inspection:
    """A model whose attention is latent already. It has no targets."""
    config, dtype = checkpoint.config, _dtype(checkpoint)
    if missing := [key for key in _LATENT_KEYS if not isinstance(config.get(key), int)]:
        raise InputError(f"{checkpoint.origin}: config.json: {', '.join(missing)} must be whole numbers")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Inspection(
        model=checkpoint.origin,
        family=config["model_type"],
        architecture=(config.get("architectures") or ["unknown"])[0],
        attention="MLA",
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=config["qk_nope_head_dim"] + rope,
        value_dim=config["v_head_dim"],
        model_dim=config["hidden_size"],
        kv_rank=rank,
        q_rank=config.get("q_lora_rank"),
        biases=["kv_a", "o"] if config.get("attention_bias") else [],
        qk_norm=None,
        rotary_dims=rope,
        rotary_layers=layers,
        rope=rotary.get("rope_type") or rotary.get("type") or "default",
        windows=[],
        max_context=config.get("max_position_embeddings"),
        **_weights(checkpoint, dtype),
        cache=_cache(rank + rope, [None] * layers, dtype),
        targets=[],
        latent=None,
    )


def _weights(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "parameters": sum(math.prod(info.shape) for info in checkpoint.tensors.values()),
        "weight_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "files": len({info.file for info in checkpoint.tensors.values()}),
    }


def _latent_limits(model: Model) -> LatentLimits:
    geometry, problems = model.geometry, model_problems(model)
    if problems:
        return LatentLimits(tuple(problems))
    return LatentLimits((), cache_elements(geometry), geometry.rotary_dims * geometry.kv_heads)


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most of the weights are stored in; the cache is counted in it."""
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max((dtype for dtype in sizes if dtype in FLOAT_DTYPES), key=lambda dtype: sizes[dtype], default="F32")


def _cache(elements: int, windows: list[int | None], dtype: str) -> CacheSize:
    """The cache at ``elements`` per token per layer; ``windows``: of each layer."""
    width = DTYPE_BITS[dtype] // 8

    def held(context: int) -> int:
        return sum(min(context, window or context) for window in windows) * elements * width

    contexts = {name: held(context) for name, context in CONTEXTS.items()}
    return CacheSize(elements, len(windows) * elements * width, contexts)


def _targets(model: Model, windows: list[int | None], dtype: str) -> list[TargetSize]:
    geometry, present = model.geometry, cache_elements(model.geometry)
    sizes = {
        "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}": present * kv_heads // geometry.kv_heads
        for kv_heads in possible_kv_heads(geometry)
    }
    if not model_problems(model):
        sizes |= {f"--to mla --budget {present // part}": present // part for part in _PARTS if present // part >= 4}
    return [
        TargetSize(**vars(_cache(elements, windows, dtype)), options=options, saves=1 - elements / present)
        for options, elements in sizes.items()
    ]


def summary(facts: Inspection) -> str:
    """The facts as lines for the terminal."""
    heads = f"{facts.heads} query heads, {facts.kv_heads} key/value heads, head dim {facts.head_dim}"
    if facts.attention == "MLA":
        heads = f"{facts.heads} heads over a latent of {facts.kv_rank} and a rotary key of {facts.rotary_dims}"
    extras = [f"biases on {', '.join(facts.biases)}"] if facts.biases else ["no biases"]
    extras += [f"{facts.qk_norm} norm on queries and keys"] if facts.qk_norm else []
    rotary = f"{facts.rotary_dims} of {facts.head_dim} dims, {facts.rope}"
    if facts.rotary_layers < facts.layers:
        rotary += f", in {facts.rotary_layers} of {facts.layers} layers"
    rows = {
        "family": f"{facts.family} ({facts.architecture})",
        "attention": f"{facts.attention}: {heads}",
        "layers": f"{facts.layers}, model dim {facts.model_dim}, {', '.join(extras)}",
        "rotary": rotary,
        **({"windows": ", ".join(map(str, facts.windows))} if facts.windows else {}),
        "weights": f"{_count(facts.parameters)} parameters, {bytes_text(facts.weight_bytes)} "
        f"of {facts.dtype} in {facts.files} file{'s' if facts.files > 1 else ''}",
        "KV cache": _cache_text(facts.cache),
    }
    width = max(map(len, rows))
    lines = [facts.model, *(f"  {name:{width}}  {text}" for name, text in rows.items())]
    return "\n".join([*lines, "", *_target_lines(facts)])


def _target_lines(facts: Inspection) -> list[str]:
    if not facts.targets:
        return ["can become: nothing smaller"]
    heading = f"  {'can become':24}  {'saves':>7}  {'per token':>10}" + "".join(f"  {'at ' + c:>10}" for c in CONTEXTS)
    rows = [
        f"  {target.options:24}  {100 * target.saves:5.1f} %  {bytes_text(target.bytes_per_token):>10}"
        + "".join(f"  {bytes_text(size):>10}" for size in target.bytes.values())
        for target in facts.targets
    ]
    reasons = facts.latent.because if facts.latent else ()
    return [heading, *rows, *(f"  not MLA: {reason}" for reason in reasons)]


def _cache_text(cache: CacheSize) -> str:
    sizes = ", ".join(f"{bytes_text(size)} at {context}" for context, size in cache.bytes.items())
    elements = f"{cache.numbers_per_token_and_layer} elements per token per layer"
    return f"{elements}, {bytes_text(cache.bytes_per_token)} per token ({sizes})"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**9 else f"{parameters / 1e6:.1f} M"
