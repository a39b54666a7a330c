"""``kvfold inspect``: facts about a checkpoint from its config and headers. Imports neither torch nor transformers."""

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvfold.convert.checkpoint.dequantized import can_keep_quantized
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES
from kvfold.convert.checkpoint.opening import Checkpoint, open_headers
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.tensors import ROLES
from kvfold.convert.measure.latent_config import latent_faults
from kvfold.convert.measure.norms import Range, norm_ranges
from kvfold.convert.measure.own_model import own_model
from kvfold.convert.measure.target_sizes import CacheSize, TargetSize, cache_size, target_sizes
from kvfold.convert.targets.engines import Verdict, verdicts
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.mla.problems import model_problems
from kvfold.convert.targets.own_code import needs_own_code, source_type
from kvfold.convert.targets.results import folded_result, latent_result
from kvfold.convert.targets.same_family import attention_kind, cache_elements

_LATENT_ONLY = ("value_dim", "kv_rank", "q_rank")


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
    models alone, whose ``targets`` are empty and whose ``latent`` is None; ``engines``: what each makes of one.
    ``windows``: the different window sizes. ``head_norms``: of a result of
    kvfold, what its record says of norms on queries and keys (`norm_ranges`).
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
    engines: list[Verdict]
    targets: list[TargetSize]
    latent: LatentLimits | None
    head_norms: dict[str, Range] | None = None

    def __repr__(self) -> str:
        elements = f"{self.cache.numbers_per_token_and_layer} KV-cache elements per token per layer"
        return f"Inspection({self.model!r}: {self.family}, {self.attention}, {self.layers} layers, {elements})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``kvfold inspect --json`` prints them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.attention != "MLA":
            values = {name: value for name, value in values.items() if name not in _LATENT_ONLY}
        if self.head_norms is None:
            del values["head_norms"]
        return values | {
            "cache": asdict(self.cache),
            "targets": [{"options": target.options, **asdict(target)} for target in self.targets],
            "latent": None if self.latent is None else self.latent.to_dict(),
        }


def inspect_checkpoint(model: str | os.PathLike[str]) -> Inspection:
    """Facts about ``model`` (a folder or hub id; only headers are read). Cache sizes are those of one sequence.

    >>> facts = inspect_checkpoint(demo_folder())
    >>> facts
    Inspection('demo': llama, MHA, 4 layers, 512 KV-cache elements per token per layer)
    >>> [target.options for target in facts.targets][:2]
    ['--to gqa --kv-heads 4', '--to gqa --kv-heads 2']


    Raises InputError when there is no such checkpoint, its files are damaged, or its family is not supported.
    """
    checkpoint = open_headers(model)
    try:
        if is_latent(checkpoint.config):
            facts = _inspect_latent(checkpoint)
        else:
            facts = _inspect(checkpoint) if source_type(checkpoint.config) is None else _inspect_own(checkpoint)
        return replace(facts, head_norms=norm_ranges(checkpoint.folder))
    finally:
        checkpoint.close()


def _inspect_own(checkpoint: Checkpoint) -> Inspection:
    """A model with its own modeling code (layout ``kvfold``). It has no targets."""
    own = own_model(checkpoint)
    facts, heads = _facts(own.source, checkpoint), own.source.geometry.heads
    facts["family"] = checkpoint.config["model_type"]
    facts["architecture"] = (checkpoint.config.get("architectures") or ["unknown"])[0]
    if own.split is not None:
        facts |= {"attention": "MLA", "kv_rank": own.split[0], "rotary_dims": own.split[1]}
        facts |= {"value_dim": facts["head_dim"], "head_dim": facts["head_dim"] + own.split[1]}
    elif own.kv_heads is not None:
        facts |= {"attention": attention_kind(heads, own.kv_heads), "kv_heads": own.kv_heads}
    return Inspection(
        **facts,
        cache=cache_size(own.result, [None] * own.source.geometry.layers, facts["dtype"]),
        engines=verdicts(replace(own.result, kept=can_keep_quantized(checkpoint.reader))),
        targets=[],
        latent=None,
    )


def _inspect(checkpoint: Checkpoint) -> Inspection:
    model = model_of(checkpoint.config, checkpoint.tensors)
    problems = model.tensor_problems(checkpoint.tensors)
    if problems:
        raise InputError(f"{checkpoint.origin}: its tensors are not those of its config.json", problems)
    facts, windows = _facts(model, checkpoint), [layer.window for layer in model.layers]
    return Inspection(
        **facts,
        cache=cache_size(folded_result(model), windows, facts["dtype"]),
        engines=[],
        targets=target_sizes(model, windows, facts["dtype"]),
        latent=_latent_limits(model),
    )


def _facts(model: Model, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of an ``Inspection`` that family and config answer for."""
    family, geometry, layers = model.family, model.geometry, model.layers
    return {
        "model": checkpoint.origin,
        "family": family.model_type,
        "architecture": next(iter(checkpoint.config.get("architectures") or ()), family.architecture),
        "attention": attention_kind(geometry.heads, geometry.kv_heads),
        "layers": geometry.layers,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "model_dim": geometry.model_dim,
        "biases": [role for role in ROLES if model.has_bias(role)],
        "qk_norm": model.qk_norm.kind if model.qk_norm else None,
        "rotary_dims": geometry.rotary_dims,
        "rotary_layers": sum(layer.rotates for layer in layers),
        "rope": model.rope_table(layers[0].type)["rope_type"] if geometry.rotary_dims else "none",
        "windows": sorted({layer.window for layer in layers if layer.window is not None}),
        "max_context": geometry.positions,
        **_weights(checkpoint, _dtype(checkpoint)),
    }


def _inspect_latent(checkpoint: Checkpoint) -> Inspection:
    """A model whose attention is latent already. It has no targets."""
    config, dtype = checkpoint.config, _dtype(checkpoint)
    if problems := latent_faults(config, checkpoint.tensors):
        raise InputError(f"{checkpoint.origin}: {problems[0]}", problems[1:])
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
        cache=cache_size(latent_result(config), [None] * layers, dtype),
        engines=_engines(checkpoint),
        targets=[],
        latent=None,
    )


def _engines(checkpoint: Checkpoint) -> list[Verdict]:
    """What engines make of a latent model as kvfold writes it; none for other models of these classes."""
    config = checkpoint.config
    kind, dense = config["model_type"], config.get("first_k_dense_replace") == config["num_hidden_layers"]
    unscaled = (config.get("rope_parameters") or {}).get("llama_4_scaling_beta") == 0
    written = {"youtu": config.get("attention_bias"), "deepseek_v3": dense, "mistral4": unscaled}.get(kind)
    result = replace(latent_result(config), kept=can_keep_quantized(checkpoint.reader))
    return verdicts(result) if written else []


def _weights(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "parameters": sum(math.prod(info.shape) for info in checkpoint.tensors.values()),
        "weight_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "files": len({info.file for info in checkpoint.tensors.values()}),
    }


def _latent_limits(model: Model) -> LatentLimits:
    geometry, problems = model.geometry, [] if needs_own_code(model) else model_problems(model)
    if problems:
        return LatentLimits(tuple(problems))
    return LatentLimits((), cache_elements(geometry), geometry.rotary_dims * geometry.kv_heads)


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most of the weights are stored in; the cache is counted in it."""
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max((dtype for dtype in sizes if dtype in FLOAT_DTYPES), key=lambda dtype: sizes[dtype], default="F32")
