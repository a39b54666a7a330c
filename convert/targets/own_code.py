"""Layout ``kvfold``: the source's model with other attention modules, whose code the checkpoint brings along.

For what no stock class holds. ``config.json`` is the source's under a model type of its own, with a block ``kvfold``
that says what the attention is like; the code is ``attention/checkpoints/modeling_kvfold.py``. Its attention has
queries, keys, values and output in a linear layer each, whatever the source has, and rotates half-split heads by listed
frequencies.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.json_text import with_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.families.model import Model
from kvfold.convert.families.values import evaluate
from kvfold.convert.targets.same_family import attention_label, cache_elements, stored_dtype
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.weights import AttentionWeights

CODE = "kvfold.attention.checkpoints.modeling_kvfold"
BLOCK = "kvfold"  # the key of config.json that says what the attention is like
_PREFIX = "kvfold_"  # of model types

Shape = tuple[int, ...]


def needs_own_code(model: Model) -> bool:
    """True if no stock class can hold ``model`` with fewer key/value heads."""
    return model.family.sizes.kv_heads is None


def source_type(config: Mapping[str, Any]) -> str | None:
    """The model type that a ``config.json`` of this layout was made from, None for any other config."""
    kind = str(config.get("model_type"))
    return kind.removeprefix(_PREFIX) if kind.startswith(_PREFIX) else None


def own_folded_layout(source: Model, checkpoint: Checkpoint, kv_heads: int, dtype: str | None) -> TargetLayout:
    """The checkpoint with ``kv_heads`` key/value heads in its own attention modules.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep each tensor's own. Raises InputError for
    frequencies that depend on the length of the text.
    """
    # Families of this layout rotate all their layers alike, so the first layer's frequencies describe the model.
    frequencies, amplitude = source.frequencies(0) if source.geometry.rotary_dims else ([], 1.0)
    facts: dict[str, Any] = {
        "variant": "grouped",
        "kv_heads": kv_heads,
        "qkv_bias": source.has_bias("q"),
        "o_bias": source.has_bias("o"),
        "frequencies": frequencies,
        "amplitude": amplitude,
    }
    if (clip := source.layers[0].clip) is not None:
        facts["clip"] = clip

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        return _grouped_tensors(source, layer, weights)

    size = replace(source.geometry, kv_heads=kv_heads)
    return own_layout(
        source,
        checkpoint,
        facts,
        [grouped_shapes(source, layer, kv_heads) for layer in range(size.layers)],
        dtype,
        kind=attention_label(size),
        cache_elements=cache_elements(size),
        encode=encode,
    )


def own_layout(
    source: Model,
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Shape]],
    dtype: str | None,
    *,
    kind: str,
    cache_elements: int,
    encode: Callable[[int, Any], Mapping[str, "Tensor"]],
    layer_facts: Sequence[Mapping[str, Any]] = (),
) -> TargetLayout:
    """The layout for an attention of tensors ``shapes``, by layer and name.

    In config.json ``facts`` describe it, and ``layer_facts`` what may differ from layer to layer.
    """
    return TargetLayout(
        kind=kind,
        config=own_config(source, checkpoint, facts, dtype, layer_facts),
        tensors=tuple(_output_tensors(source, checkpoint, shapes, dtype)),
        computed=tuple(tuple(layer) for layer in shapes),
        cache_elements=cache_elements,
        encode=encode,
        code=CODE,
    )


def own_config(
    source: Model,
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    dtype: str | None,
    layer_facts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The source's config as one of this layout; ``facts`` describe the attention beside what every variant has."""
    family, file = source.family, CODE.rpartition(".")[2]
    if not family.has_own_layout:
        raise ValueError(f"{family.model_type}: expected a family that has layout kvfold, found one without")
    classes = family.stock_classes[1]
    stated = [name for name in checkpoint.config.get("architectures") or () if name in classes.values()]
    changes = {
        "model_type": f"{_PREFIX}{family.model_type}",
        "architectures": [f"Kvfold{name}" for name in stated or [family.architecture]],
        "auto_map": {auto: f"{file}.Kvfold{stock}" for auto, stock in classes.items()},
        BLOCK: {**facts, **_facts(source, layer_facts)},
    }
    config = {**checkpoint.config, **changes}
    stored = dtype or TORCH_NAMES[_computed_dtype(source, checkpoint)]
    return with_dtype(config, stored)


def _facts(source: Model, layer_facts: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The part of the block ``kvfold`` that every variant has; ``layers`` holds what differs between them."""
    family, size, values = source.family, source.geometry, source.values
    common = {
        "replaces": family.stock_classes[0],
        "model_dim": size.model_dim,
        "heads": size.heads,
        "head_dim": size.head_dim,
        "attention_dropout": evaluate(family.attention.dropout, values),
        "output_dropout": evaluate(family.attention.output_dropout, values),
    }
    layers: list[dict[str, Any]] = [
        {"scale": layer.scale, "sliding_window": layer.window, "softcap": layer.softcap} for layer in source.layers
    ]
    if layer_facts:
        layers = [{**common, **more} for common, more in zip(layers, layer_facts, strict=True)]
    shared = {name: value for name, value in layers[0].items() if all(facts[name] == value for facts in layers)}
    differing = [{name: value for name, value in facts.items() if name not in shared} for facts in layers]
    given = {name: value for name, value in shared.items() if value is not None}
    return {**common, **given, **({"layers": differing} if differing[0] else {})}


def grouped_shapes(source: Model, layer: int, kv_heads: int) -> dict[str, Shape]:
    """The tensors of the attention of ``layer``, by name."""
    size = source.geometry
    queries, keys, width = size.heads * size.head_dim, kv_heads * size.head_dim, size.model_dim
    sides = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    shapes: dict[str, Shape] = {}
    for role, shape in sides.items():
        name = projection(source, layer, f"{role}_proj")
        shapes[f"{name}.weight"] = shape
        if source.has_bias("o" if role == "o" else "q"):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _grouped_tensors(source: Model, layer: int, weights: "AttentionWeights") -> dict[str, "Tensor"]:
    biases = {"q": weights.q_bias, "k": weights.k_bias, "v": weights.v_bias, "o": weights.o_bias}
    parts = {"q": weights.q.flatten(0, 1), "k": weights.k.flatten(0, 1), "v": weights.v.flatten(0, 1)}
    tensors = {}
    for role, weight in {**parts, "o": weights.o.flatten(1)}.items():
        name = projection(source, layer, f"{role}_proj")
        tensors[f"{name}.weight"] = weight.contiguous()
        if (bias := biases[role]) is not None:
            tensors[f"{name}.bias"] = bias.flatten().contiguous()
    return tensors


def projection(source: Model, layer: int, name: str) -> str:
    """The full name of ``name``, such as ``o_proj.weight``, in the attention of ``layer``."""
    return f"{source.family.attention.place(layer)}.{name}"


def _output_tensors(
    source: Model, checkpoint: Checkpoint, shapes: Sequence[Mapping[str, Shape]], dtype: str | None
) -> Iterator[OutputTensor]:
    """The source's tensors in their order, with each layer's new attention in the place of the old.

    Buffers of the old attention (causal masks, frequencies) are left out.
    """
    computed = stored_dtype(_computed_dtype(source, checkpoint), dtype)
    inner = f"{source.family.attention.module}."
    pattern = re.compile(re.escape(inner).replace(r"\{layer\}", r"(\d+)"))
    stored = {name: layer for layer in range(len(shapes)) for name in source.attention_names(layer)}
    made: set[int] = set()
    for info in checkpoint.tensors.values():
        inside = pattern.match(info.name)
        layer = stored.get(info.name) if inside is None else int(inside[1])
        if layer is None:
            yield OutputTensor(info.name, stored_dtype(info.dtype, dtype), info.shape, info.name)
        elif layer not in made:
            made.add(layer)
            yield from (OutputTensor(name, computed, shape, None) for name, shape in shapes[layer].items())


def _computed_dtype(source: Model, checkpoint: Checkpoint) -> str:
    return checkpoint.tensors[source.attention_names(0)[0]].dtype
