"""``kvfold inspect``: describe a checkpoint from its config and headers, without importing torch or
transformers.
"""

import math
import os
import statistics
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.headers import DTYPE_BITS
from kvfold.convert.checkpoint.members import RECORD, json_beside
from kvfold.convert.checkpoint.opening import Checkpoint, open_headers
from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import (
    names_in_files,
    read_architectures,
    text_config,
    text_type,
)
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.rotary import rope_parameters
from kvfold.convert.measure.converted import check_mla_config, converted_model
from kvfold.convert.targets.engines import (
    ServedModel,
    Support,
    describe_fold,
    describe_latent_config,
    describe_mla,
    format_mla_options,
    propose_budgets,
    propose_kernel_splits,
    support_for,
)
from kvfold.convert.targets.mla.problems import model_problems
from kvfold.convert.targets.mla.spec import is_latent
from kvfold.convert.targets.own_code import needs_own_code, source_type
from kvfold.convert.targets.same_family import attention_label, cache_elements

CONTEXTS = {"8k": 8192, "128k": 131072}
# The least, mean and greatest of the layers.
Range = tuple[float, float, float]

_NORM_FACTS = ("query_spread", "key_spread", "query_missed", "key_missed")


@dataclass(frozen=True)
class CacheSize:
    """The KV-cache size for one sequence; a sliding-window layer caches at most its window.

    cache_elements: elements per token per layer.
    bytes_per_token: bytes per token of all layers.
    bytes: bytes by context.
    per_rank: elements per token per layer on each rank, by the number of tensor-parallel ranks.
    """

    cache_elements: int
    bytes_per_token: int
    bytes: Mapping[str, int]
    per_rank: Mapping[str, int]


@dataclass(frozen=True)
class TargetSize(CacheSize):
    """The cache of a target.

    options: the options of ``kvfold convert``.
    saves: the share of the source's cache that is saved.
    engines: which engines serve the result.
    """

    options: str
    saves: float
    engines: list[Support]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's attention, weights and cache, and the targets to which it can be converted.

    model: the folder's name or the hub id.
    family: the ``model_type``.
    architecture: the class that config.json names.
    attention: ``MHA``, ``GQA``, ``MQA`` or ``MLA``.
    layers, heads, kv_heads, head_dim, model_dim: sizes.
    value_dim, kv_rank, q_rank: sizes of MLA models, else None.
    biases: the projections with biases.
    qk_norm: the kind of norm on queries and keys.
    rotary_dims, rotary_layers, rope: the rotated dims and layers, and the type of scaling.
    windows: the distinct sizes of sliding windows.
    max_context: the supported positions.
    dtype: the most common dtype, which cache sizes assume too.
    parameters, weight_bytes, files: the size of the weights.
    cache: the size of the cache.
    engines: which engines serve a converted model.
    targets: the targets of a source; empty for MLA and layout ``kvfold``.
    latent: of a source, whether a conversion to MLA is ``possible``, with the limits or, in
        ``because``, the reasons why not.
    head_norms: from ``kvfold.json``, how much the divisors of norms on queries and keys vary, and
        the share of energy lost by replacing them with linear maps; None without such norms.
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
    qk_norm: str | None = None
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
    engines: list[Support] = field(default_factory=list)
    targets: list[TargetSize] = field(default_factory=list)
    latent: dict[str, Any] | None = None
    head_norms: dict[str, Range] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``kvfold inspect --json`` prints them."""
        values = asdict(self)
        if self.attention != "MLA":
            del values["value_dim"], values["kv_rank"], values["q_rank"]
        if self.head_norms is None:
            del values["head_norms"]
        return values


def inspect_checkpoint(model: str | os.PathLike[str]) -> Inspection:
    """Describe ``model``, a folder or hub id, from its config and headers. Cache sizes are for one
    sequence.

    >>> facts = inspect_checkpoint(demo_folder())
    >>> facts.family, facts.attention, facts.layers, facts.cache.cache_elements
    ('llama', 'MHA', 4, 512)
    >>> [target.options for target in facts.targets][:2]
    ['--to gqa --kv-heads 4', '--to gqa --kv-heads 2']

    Raises InputError if the checkpoint does not exist, its files are damaged, or its family is not
    supported.
    """
    with closing(open_headers(model)) as checkpoint:
        config = checkpoint.config
        # A wrapper's language model may be latent.
        language = config if text_type(config) is None else text_config(config, checkpoint.tensors)
        if is_latent(language):
            return _inspect_latent(checkpoint, language)
        if source_type(config) is not None:
            return _inspect_converted(checkpoint)
        return _inspect_source(checkpoint)


def _inspect_source(checkpoint: Checkpoint) -> Inspection:
    model = model_of(checkpoint.config, checkpoint.tensors)
    if problems := model.tensor_problems(checkpoint.tensors):
        raise InputError(f"{checkpoint.origin}: its tensors do not match its config.json", problems)
    geometry = model.geometry
    latent: dict[str, Any] = {
        "possible": True,
        "numbers_below": cache_elements(geometry),
        "rope_dim_up_to": geometry.rotary_dims * geometry.kv_heads,
    }
    if not needs_own_code(model) and (refusals := model_problems(model)):
        latent = {"possible": False, "because": list(refusals)}
    facts = _model_facts(model, describe_fold(model), checkpoint)
    return Inspection(**facts, targets=list_targets(model, facts["dtype"]), latent=latent)


def _inspect_converted(checkpoint: Checkpoint) -> Inspection:
    """The facts of a result in layout ``kvfold``."""
    source, result = converted_model(checkpoint)
    facts = _model_facts(source, result, checkpoint)
    facts["family"] = checkpoint.config["model_type"]
    if rank := result.kv_rank:
        rope = result.rope_dim
        facts |= {"attention": "MLA", "kv_rank": rank, "rotary_dims": rope}
        facts |= {"value_dim": facts["head_dim"], "head_dim": facts["head_dim"] + rope}
    else:
        label = attention_label(source.geometry.heads, result.kv_heads)
        facts |= {"attention": label[:3], "kv_heads": result.kv_heads}
    return Inspection(**facts, engines=support_for(result))


def _inspect_latent(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Inspection:
    """The facts of a model in a stock MLA class, which has no windows.

    ``config`` is that of the language model, which may be inside a wrapper.
    """
    wrapped = names_in_files(checkpoint.tensors).wrapped if config is not checkpoint.config else str
    check_mla_config(config, checkpoint, wrapped)
    layers = config["num_hidden_layers"]
    biased = bool(config.get("attention_bias"))
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = table.get("rope_type") or table.get("type") or "default"
    # Engines were tried on latent models as kvfold writes them, which these classes can also hold
    # otherwise: they drop the biases and the scaled RoPE of a DeepSeek model silently.
    scaled = table.get("factor", 1.0) != 1.0 or rope not in ("default", "yarn")
    dense = config.get("first_k_dense_replace") == layers
    tried = {
        "youtu": biased,
        "deepseek_v3": dense and not scaled and not biased,
        "mistral4": table.get("llama_4_scaling_beta") == 0,
    }
    result = describe_latent_config(checkpoint.config)
    return Inspection(
        family=checkpoint.config["model_type"],
        attention="MLA",
        layers=layers,
        heads=config["num_attention_heads"],
        kv_heads=config["num_attention_heads"],
        head_dim=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        model_dim=config["hidden_size"],
        kv_rank=config["kv_lora_rank"],
        q_rank=config.get("q_lora_rank"),
        biases=["kv_a", "o"] if biased else [],
        rotary_dims=config["qk_rope_head_dim"],
        rotary_layers=layers,
        rope=rope,
        windows=[],
        max_context=config.get("max_position_embeddings"),
        engines=support_for(result) if tried.get(config["model_type"]) else [],
        **_file_facts(checkpoint, result, [None] * layers),
    )


def _model_facts(model: Model, result: ServedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of an ``Inspection`` that follow from family, config and tensors; those of the
    cache are of ``result``.
    """
    geometry = model.geometry
    layers = model.layers
    windows = [layer.window for layer in layers]
    rope = "none"
    if geometry.rotary_dims:
        rope = rope_parameters(model.values, layers[0].type)["rope_type"]
    return {
        "family": model.family.model_type,
        "attention": attention_label(geometry.heads, geometry.kv_heads)[:3],
        "layers": geometry.layers,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "model_dim": geometry.model_dim,
        "biases": list(model.biased),
        "qk_norm": model.qk_norm.kind if model.qk_norm else None,
        "rotary_dims": geometry.rotary_dims,
        "rotary_layers": sum(layer.rotates for layer in layers),
        "rope": rope,
        "windows": sorted(set(windows) - {None}),
        "max_context": geometry.positions,
        **_file_facts(checkpoint, result, windows, model.family.architecture),
    }


def _file_facts(
    checkpoint: Checkpoint,
    result: ServedModel,
    windows: list[int | None],
    architecture: str = "unknown",
) -> dict[str, Any]:
    """The fields that need no family; ``windows`` has an entry per layer, None for full
    attention.
    """
    infos = checkpoint.tensors.values()
    sizes = checkpoint.float_bytes()
    dtype = max(sizes, key=sizes.__getitem__, default="F32")
    return {
        "model": checkpoint.origin,
        "architecture": (read_architectures(checkpoint.config) or [architecture])[0],
        "dtype": dtype,
        "parameters": sum(math.prod(info.shape) for info in infos),
        "weight_bytes": sum(info.nbytes for info in infos),
        "files": len({info.file for info in infos}),
        "cache": compute_cache_size(result, windows, dtype),
        "head_norms": read_norm_ranges(checkpoint.folder),
    }


def read_norm_ranges(folder: Path) -> dict[str, Range] | None:
    """The range over layers of each ``head_norms`` value in ``kvfold.json``; None if the file has
    no such values.
    """
    layers: Any = json_beside(folder, RECORD).get("head_norms")
    ranges = {}
    try:
        for name in _NORM_FACTS:
            values = [float(layer[name]) for layer in layers]
            ranges[name] = (min(values), statistics.fmean(values), max(values))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None  # inspecting a checkpoint must not fail because of a damaged record
    return ranges


def compute_cache_size(result: ServedModel, windows: list[int | None], dtype: str) -> CacheSize:
    """The cache size of ``result``; ``windows`` has an entry per layer, None for full attention."""
    elements = result.cache_elements()
    layer_bytes = elements * DTYPE_BITS[dtype] // 8
    by_context = {}
    for name, context in CONTEXTS.items():
        slots = sum(min(context, window or context) for window in windows)
        by_context[name] = layer_bytes * slots
    return CacheSize(elements, len(windows) * layer_bytes, by_context, result.per_rank())


def list_targets(model: Model, dtype: str) -> list[TargetSize]:
    """All proposed targets: GQA, MQA, MLA splits supported by kernels, and `propose_budgets`."""
    targets: dict[str, ServedModel] = {}
    for kv_heads in possible_kv_heads(model.geometry):
        options = "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}"
        targets[options] = describe_fold(model, kv_heads)
    ranks = set()
    for spec in propose_kernel_splits(model):
        # Of the layouts of a split the first: most engines serve it.
        if spec.kv_rank not in ranks:
            ranks.add(spec.kv_rank)
            targets[format_mla_options(spec)] = describe_mla(model, spec)
    for spec in propose_budgets(model):
        # Engines look at the sum of a split, so the shares within a budget do not matter here.
        options = f"--to mla --budget {spec.kv_rank + spec.rope_dim}"
        targets[options] = describe_mla(model, spec)
    source_elements = cache_elements(model.geometry)
    windows = [layer.window for layer in model.layers]
    sizes = []
    for options, result in targets.items():
        sizes.append(
            TargetSize(
                **vars(compute_cache_size(result, windows, dtype)),
                options=options,
                saves=1 - result.cache_elements() / source_elements,
                engines=support_for(result),
            )
        )
    return sizes
