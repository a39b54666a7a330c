"""Layout ``kvfold``: the source's model with other attention modules, whose code is included in the
checkpoint.

It is for models that no stock class can express. ``config.json`` is the source's, with model type
``kvfold_...`` and a block ``kvfold`` that describes the attention (`build_custom_config` builds all
of it); the code is ``attention/checkpoints/modeling_kvfold.py``. Its attention has separate linear
layers for queries, keys, values and output, even if the source fuses them, and rotates half-split
heads by frequencies listed in the config. The variants are grouped attention and latent attention,
which has norms on queries and keys if the source has them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvfold.convert.checkpoint.files import set_config_dtype
from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import ROLES
from kvfold.convert.families.values import evaluate_expression
from kvfold.convert.targets.output_checkpoint import (
    OutputCheckpoint,
    choose_computed_dtype,
    choose_output_dtype,
)
from kvfold.convert.targets.same_family import (
    FoldCheckpoint,
    format_attention_label,
)

CODE = "kvfold.attention.checkpoints.modeling_kvfold"
BLOCK = "kvfold"  # the key of config.json that says what the attention is like
_PREFIX = "kvfold_"  # of model types


def needs_custom_code(model: Model) -> bool:
    """True if the source's class cannot have fewer key/value heads than query heads, so that a
    conversion must store kvfold's own modeling code.
    """
    return model.family.sizes.kv_heads is None


def get_source_type(config: Mapping[str, Any]) -> str | None:
    """Return the source's model type if ``config`` (config.json) is that of a checkpoint in layout
    ``kvfold``, else None.
    """
    kind = str(config.get("model_type"))
    return kind.removeprefix(_PREFIX) if kind.startswith(_PREFIX) else None


def plan_custom_gqa_checkpoint(
    source: Model, checkpoint: Checkpoint, kv_heads: int, dtype: str
) -> OutputCheckpoint:
    """Plan the checkpoint of ``source`` converted to ``kv_heads`` key/value heads in layout
    ``kvfold``, stored as ``dtype``.

    Raises InputError if every length of a text has rotary frequencies of its own.
    """
    # Families of this layout rotate all their layers alike, so the first layer's frequencies
    # describe the model.
    frequencies, amplitude = source.compute_frequencies(0)
    theta = [frequencies] * len(source.layers) if source.short_context else ()
    clip = source.layers[0].clip
    facts = {
        "variant": "grouped",
        "kv_heads": kv_heads,
        "qkv_bias": "q" in source.biased,
        "o_bias": "o" in source.biased,
        "frequencies": frequencies,
        "amplitude": amplitude,
        **({} if clip is None else {"clip": clip}),
    }
    target = make_grouped_model(source, kv_heads)
    shapes = [
        {name: target.tensors[name].shape for name in target.list_attention_tensors(layer)}
        for layer in range(target.geometry.layers)
    ]
    return FoldCheckpoint(
        kind=format_attention_label(target.geometry.heads, kv_heads),
        config=build_custom_config(source, checkpoint, facts, dtype, theta),
        tensors=plan_custom_tensors(source, checkpoint, shapes, dtype),
        code=CODE,
        model=target,
        roles=ROLES,
    )


def build_custom_config(
    source: Model,
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    dtype: str,
    theta: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """Return ``config.json`` for layout ``kvfold``. ``facts`` are the entries of its key ``kvfold``
    that depend on the kind of attention, GQA or MLA.

    ``theta [layers][P/2]``: each layer's frequencies, if they may differ. Where the source has
    others for texts above a number of tokens, ``short_context``, both are in the block.
    """
    family = source.family
    size = source.geometry
    file = CODE.rpartition(".")[2]
    attention_class, classes = family.stock_classes
    block = {
        **facts,
        "replaces": attention_class,
        "model_dim": size.model_dim,
        "heads": size.heads,
        "head_dim": size.head_dim,
        "attention_dropout": evaluate_expression(family.attention.dropout, source.values),
        "output_dropout": evaluate_expression(family.attention.output_dropout, source.values),
    }
    if source.short_context:
        block["short_context"] = source.short_context
    # Facts that all layers share stand once, so that configs of uniform models stay short.
    rows: list[dict[str, Any]] = [
        {"scale": layer.scale, "sliding_window": layer.window, "softcap": layer.softcap}
        for layer in source.layers
    ]
    for layer, frequencies in enumerate(theta):  # none unless they may differ
        rows[layer]["frequencies"] = list(frequencies)
        if source.short_context:
            long, _ = source.compute_frequencies(layer, "long")
            pairs = dict(zip(source.compute_frequencies(layer)[0], long, strict=True))
            # A layer that does not rotate has slots of another one, and nothing in them.
            rows[layer]["long_frequencies"] = [pairs.get(angle, angle) for angle in frequencies]
    shared = {name for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    block |= {
        name: value for name, value in rows[0].items() if name in shared and value is not None
    }
    if len(shared) < len(rows[0]):
        block["layers"] = [
            {name: value for name, value in row.items() if name not in shared} for row in rows
        ]
    # Auto classes of the source that its config names keep their heads; most checkpoints name one.
    stated = checkpoint.config.get("architectures") or ()
    stated = [name for name in stated if name in classes.values()]
    changes = {
        "model_type": f"{_PREFIX}{family.model_type}",
        "architectures": [f"Kvfold{name}" for name in stated or [family.architecture]],
        "auto_map": {auto: f"{file}.Kvfold{stock}" for auto, stock in classes.items()},
        BLOCK: block,
    }
    stored = TORCH_NAMES[choose_computed_dtype(source, checkpoint, dtype)]
    return set_config_dtype({**checkpoint.config, **changes}, stored)


def make_grouped_model(source: Model, kv_heads: int) -> Model:
    """Return the description of ``source`` with ``kv_heads`` key/value heads and with separate
    query, key, value and output projections, as layout ``kvfold`` stores them.
    """
    family = source.family
    *qkv, o = [f"{role}_proj" for role in ROLES]
    family = replace(
        family,
        sizes=replace(family.sizes, own_kv_heads=kv_heads),
        attention=replace(family.attention, qkv=tuple(qkv), o=o, transposed=False),
        rotary=replace(family.rotary, style="half"),
    )
    return Model(family, source.config, source.tower)


def plan_custom_tensors(
    source: Model,
    checkpoint: Checkpoint,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    dtype: str,
) -> tuple[PlannedTensor, ...]:
    """Return all output tensors in the source's order. The attention tensors of each layer are
    replaced by new ones with ``shapes``.

    Buffers of the old attention (causal masks, frequencies) are dropped.
    """
    computed = choose_computed_dtype(source, checkpoint, dtype)
    # Modules are replaced whole: what the source keeps in them besides weights has no place in the
    # new ones.
    pattern = re.escape(source.family.attention.module).replace(r"\{layer\}", r"(\d+)")
    layers = dict(enumerate(shapes))
    tensors = []
    for name, info in checkpoint.tensors.items():
        if inside := re.match(rf"{pattern}\.", name):
            for new, shape in layers.pop(int(inside[1]), {}).items():
                tensors.append(PlannedTensor(new, computed, shape, None))
        else:
            stored = choose_output_dtype(info.dtype, dtype)
            tensors.append(PlannedTensor(name, stored, info.shape, name))
    return tuple(tensors)
