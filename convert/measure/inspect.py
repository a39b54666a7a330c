"""``kvfold inspect``: describe a checkpoint from its config and headers, without importing torch or
transformers.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfold.attention.checkpoints import SOURCES
from kvfold.attention.rounding_schemes import CACHE_BITS, find_rounding_problem
from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.checkpoint.headers import DTYPES
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint_headers
from kvfold.convert.conversion.plan import (
    checkpoint_from_config,
    list_possible_kv_heads,
    match_model,
    read_config_dtype,
)
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import load_family, read_architectures, read_text_config
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import read_config_object, read_rope_parameters
from kvfold.convert.targets.custom_code import (
    BLOCK,
    get_source_type,
    make_grouped_model,
)
from kvfold.convert.targets.engines import (
    EngineSupport,
    ServedModel,
    describe_folded_model,
    describe_mla_config,
    describe_mla_model,
    list_engine_support,
    propose_mla_sizes_by_saving,
    propose_mla_sizes_with_kernels,
)
from kvfold.convert.targets.mla.spec import (
    MlaSpec,
    choose_mla_layout,
    is_mla_config,
    list_stock_limits,
    list_stock_problems,
)
from kvfold.convert.targets.same_family import count_cache_elements, format_attention_label

CONTEXTS = {"8k": 8192, "128k": 131072}
ROUNDED = {"16 bits": "", "FP8": "fp8", "INT4": "int4"}
_LATENT_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "hidden_size",
)


@dataclass(frozen=True)
class CacheSize:
    """The size of the KV cache for one sequence; a sliding-window layer caches at most its window.

    cache_elements: elements per token per layer.
    rounded: bytes per token per layer in 16 bits and as engines round a cache; None where groups of
        32 channels do not divide those of a token.
    bytes_per_token: bytes per token of all layers.
    bytes: bytes by context.
    """

    cache_elements: int
    rounded: Mapping[str, int | None]
    bytes_per_token: int
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class TargetCache(CacheSize):
    """The cache of one target to which a model can be converted, and the engines that serve the
    result.

    options: the options of ``kvfold convert``.
    saves: the share of the source's cache that is saved.
    engines: which engines serve the result.
    """

    options: str
    saves: float
    engines: list[EngineSupport]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's attention, weights and cache, and the targets to which it can be converted.

    model: the folder's name or the hub id.
    family: the ``model_type``.
    architecture: the class that config.json names.
    attention: ``MHA``, ``GQA``, ``MQA`` or ``MLA``.
    layers, heads, kv_heads, head_dim, model_dim: sizes.
    kv_rank: the latent's size of MLA models, else 0.
    biases: the projections with biases.
    qk_norm: the kind of norm on queries and keys.
    rotary_dims, rotary_layers, rope: the rotated dims and layers, and the type of scaling.
    windows: the distinct sizes of sliding windows.
    max_context: the supported positions.
    dtype: the most common dtype, which cache sizes assume too.
    parameters, weight_bytes: the size of the weights.
    cache: the size of the cache.
    engines: which engines serve a converted model.
    targets: the targets of a source; empty for MLA and layout ``kvfold``.
    not_mla: the reasons why a source cannot become MLA.
    not_stock: the reasons why its MLA needs layout ``kvfold``.
    notes: what a conversion leaves out.
    """

    model: str
    family: str
    architecture: str
    attention: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    kv_rank: int = 0
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
    cache: CacheSize
    engines: list[EngineSupport] = field(default_factory=list)
    targets: list[TargetCache] = field(default_factory=list)
    not_mla: list[str] = field(default_factory=list)
    not_stock: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``kvfold inspect --json`` prints them."""
        return asdict(self)


def inspect_checkpoint(model: str | os.PathLike[str]) -> Inspection:
    """Describe ``model``, a folder or hub id, from its config and headers; a folder without weights
    from its config alone. Cache sizes are for one sequence.

    >>> facts = inspect_checkpoint(demo_folder())
    >>> facts.family, facts.attention, facts.layers, facts.cache.cache_elements
    ('llama', 'MHA', 4, 512)
    >>> [target.options for target in facts.targets][:2]
    ['--to gqa --kv-heads 4', '--to gqa --kv-heads 2']

    Raises InputError if the checkpoint does not exist, its files are damaged or contradict its
    config, or its family is not supported.
    """
    checkpoint = checkpoint_from_config(model) or open_checkpoint_headers(model)
    try:
        return _inspect_opened(checkpoint)
    except InputError as error:
        raise error.with_prefix(checkpoint.origin) from error


def _inspect_opened(checkpoint: Checkpoint) -> Inspection:
    """The inspection of an opened checkpoint, of whatever kind it is."""
    config = checkpoint.config
    # A wrapper's language model may be latent.
    language = read_text_config(config, checkpoint.tensors)
    if is_mla_config(language):
        return _inspect_stock_mla(checkpoint, language)
    if get_source_type(config) is not None:
        return _inspect_kvfold_result(checkpoint)
    source, checkpoint = match_model(checkpoint)
    facts = _describe_model(checkpoint, source, describe_folded_model(source))
    targets = propose_targets(source, facts["dtype"])
    if choose_mla_layout(source) == "kvfold":
        return Inspection(**facts, targets=targets, not_stock=list_stock_limits(source))
    return Inspection(**facts, targets=targets, not_mla=list_stock_problems(source))


def _inspect_kvfold_result(checkpoint: Checkpoint) -> Inspection:
    """The inspection of a converted checkpoint in layout ``kvfold`` (its own model class)."""
    config = checkpoint.config
    kind = get_source_type(config)
    block = config.get(BLOCK)
    if kind not in SOURCES or not isinstance(block, Mapping):
        raise InputError(
            f"config.json: model_type {config['model_type']!r} is unknown to kvfold, or the object"
            f" {BLOCK!r} is missing; convert the source again"
        )
    source = Model(load_family(kind), {**config, "model_type": kind})
    if "kv_rank" in block:
        rank, rope_dim = _read_whole_numbers(block, ("kv_rank", "rope_dim"))
        size = source.geometry
        width = rank + rope_dim
        _check_latent_shapes(
            checkpoint, "kv_down_proj.weight", (width, size.model_dim), size.layers
        )
        result = describe_mla_model(source, MlaSpec(rank, rope_dim, layout="kvfold"))
        facts = _describe_model(checkpoint, source, result)
        facts |= {"attention": "MLA", "kv_rank": rank, "rotary_dims": rope_dim}
        facts["head_dim"] += rope_dim
    else:
        (kv_heads,) = _read_whole_numbers(block, ("kv_heads",))
        grouped = make_grouped_model(source, kv_heads)
        if checkpoint.tensors:
            _, checkpoint = match_model(checkpoint, grouped)
        result = describe_folded_model(grouped)
        facts = _describe_model(checkpoint, grouped, result)
    facts["family"] = config["model_type"]
    return Inspection(**facts, engines=list_engine_support(result))


def _inspect_stock_mla(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Inspection:
    """The inspection of a checkpoint of a stock MLA class, which has no sliding windows. ``config``
    is that of the language model, which may be inside a multimodal wrapper.
    """
    layers, heads, rank, rope_dim, nope, _, model_dim = _read_whole_numbers(config, _LATENT_SIZES)
    _check_latent_shapes(
        checkpoint, "kv_a_proj_with_mqa.weight", (rank + rope_dim, model_dim), layers
    )
    rope = read_config_object(config, "rope_parameters") or read_config_object(
        config, "rope_scaling"
    )
    result = describe_mla_config(checkpoint.config)
    # Engines were tried on what kvfold writes; these classes can hold other models too.
    written = (checkpoint.folder / RECORD).exists()
    return Inspection(
        family=checkpoint.config["model_type"],
        attention="MLA",
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope_dim,
        model_dim=model_dim,
        kv_rank=rank,
        biases=["kv_a", "o"] if config.get("attention_bias") else [],
        rotary_dims=rope_dim,
        rotary_layers=layers,
        rope=str(rope.get("rope_type") or "default"),
        windows=[],
        max_context=config.get("max_position_embeddings"),
        engines=list_engine_support(result) if written else [],
        **_describe_files(checkpoint, result, [None] * layers),
    )


def _read_whole_numbers(config: Mapping[str, Any], keys: Sequence[str]) -> list[int]:
    """The values of ``keys`` in ``config``, in this order. Raises InputError unless they are whole
    numbers.
    """
    wrong = [key for key in keys if type(config.get(key)) is not int or config[key] < 0]
    if wrong:
        values = ", ".join(repr(config.get(key)) for key in wrong)
        raise InputError(
            f"config.json: {', '.join(wrong)} must be a whole number of at least 0, not {values};"
            " use the config.json that came with the weights"
        )
    return [config[key] for key in keys]


def _check_latent_shapes(
    checkpoint: Checkpoint, ending: str, shape: tuple[int, ...], layers: int
) -> None:
    """Raise InputError unless each layer has a tensor of ``shape`` whose name ends in ``ending``;
    ``layers`` is the number of layers.
    """
    shapes = [info.shape for name, info in checkpoint.tensors.items() if name.endswith(ending)]
    if checkpoint.tensors and shapes != [shape] * layers:
        actual = sorted(map(list, set(shapes)))
        raise InputError(
            "the tensors of the checkpoint do not match its config.json; check that both are from"
            " the same model",
            [f"{ending} must be {list(shape)} in {layers} layers, not {actual} in {len(shapes)}"],
        )


def _describe_model(checkpoint: Checkpoint, model: Model, result: ServedModel) -> dict[str, Any]:
    """The fields of an `Inspection` that follow from the family, the config and the tensors, as
    keyword arguments; ``result`` determines the cache size.
    """
    geometry = model.geometry
    layers = model.layers
    windows = [layer.window for layer in layers]
    rope = "none"
    if geometry.rotary_dims:
        rope = read_rope_parameters(model.values, layers[0].type)["rope_type"]
    facts = {
        "family": model.family.model_type,
        "attention": format_attention_label(geometry.heads, geometry.kv_heads)[:3],
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
        "windows": sorted({window for window in windows if window}),
        "max_context": geometry.positions,
    }
    return facts | _describe_files(checkpoint, result, windows)


def _describe_files(
    checkpoint: Checkpoint, result: ServedModel, windows: list[int | None]
) -> dict[str, Any]:
    """The fields of an `Inspection` that need no family: architecture, dtype, parameters and cache
    size. ``windows`` has an entry per layer, None for full attention.
    """
    sizes = checkpoint.count_float_bytes()
    dtype = max(sizes, key=sizes.__getitem__, default=read_config_dtype(checkpoint.config))
    return {
        "model": checkpoint.origin,
        "notes": list(checkpoint.notes),
        "architecture": (read_architectures(checkpoint.config) or ["unknown"])[0],
        "dtype": dtype,
        "parameters": checkpoint.count_elements(),
        "weight_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "cache": compute_cache_size(result, windows, dtype),
    }


def compute_cache_size(result: ServedModel, windows: list[int | None], dtype: str) -> CacheSize:
    """The KV-cache size of the model ``result``. ``windows`` has an entry per layer, None for full
    attention.
    """
    elements = result.count_cache_elements()
    layer_bytes = elements * DTYPES[dtype]["bits"] // 8
    by_context = {}
    for name, context in CONTEXTS.items():
        slots = sum(min(context, window or context) for window in windows)
        by_context[name] = layer_bytes * slots
    sizes = {name: _count_rounded_bytes(result, rounding) for name, rounding in ROUNDED.items()}
    return CacheSize(elements, sizes, len(windows) * layer_bytes, by_context)


def _count_rounded_bytes(result: ServedModel, rounding: str) -> int | None:
    """The bytes per token per layer of a cache under ``rounding``, in 16 bits if that is empty;
    None if the cache cannot be rounded so. Divisors of norms take 16 bits.
    """
    elements = result.count_cache_elements() - result.divisors
    channels = result.kv_rank or elements // 2
    if rounding and find_rounding_problem(rounding, channels):
        return None
    bits = CACHE_BITS.get(rounding, 16)
    return elements * bits // 8 + 2 * result.divisors


def propose_targets(model: Model, dtype: str) -> list[TargetCache]:
    """The targets to which ``model`` can be converted, with their cache sizes: GQA, MQA, and MLA
    sizes that kernels support or that cache a small part.
    """
    targets: dict[str, ServedModel] = {}
    for kv_heads in list_possible_kv_heads(model.geometry):
        options = "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}"
        targets[options] = describe_folded_model(model, kv_heads)
    splits: dict[int, MlaSpec] = {}
    for spec in propose_mla_sizes_with_kernels(model):
        splits.setdefault(spec.kv_rank, spec)  # the first layout: most engines serve it
    for spec in splits.values():
        options = f"--kv-rank {spec.kv_rank} --rope-dim {spec.rope_dim} --layout {spec.layout}"
        targets[f"--to mla {options}"] = describe_mla_model(model, spec)
    for spec in propose_mla_sizes_by_saving(model):
        # Engines look at the sum of a split, so the shares within a budget do not matter here.
        result = describe_mla_model(model, spec)
        targets[f"--to mla --budget {result.count_cache_elements()}"] = result
    source_elements = count_cache_elements(model.geometry)
    windows = [layer.window for layer in model.layers]
    return [
        TargetCache(
            **vars(compute_cache_size(result, windows, dtype)),
            options=options,
            saves=1 - result.count_cache_elements() / source_elements,
            engines=list_engine_support(result),
        )
        for options, result in targets.items()
    ]
