"""A checkpoint of layout ``kvfold`` as a model: its source's, and the attention that its config describes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.convert.errors import InputError, short
from kvfold.convert.families.family import load_family, supported
from kvfold.convert.families.model import Model
from kvfold.convert.families.values import TYPES
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.targets.own_code import BLOCK, own_shapes, source_type


@dataclass(frozen=True)
class OwnModel:
    """``source`` is the source's model by its config, as far as that does not say what its attention became."""

    source: Model
    kv_heads: int


def own_model(checkpoint: Checkpoint) -> OwnModel:
    """Raises InputError for a config that kvfold did not write, or tensors that are not those of the config."""
    config = checkpoint.config
    kind, block = source_type(config), config.get(BLOCK)
    if kind not in supported() or load_family(kind).own_code is None:
        raise InputError(f"config.json: model_type {config.get('model_type')!r} is not one that kvfold writes")
    source = Model(load_family(kind), {**config, "model_type": kind}).as_stored(checkpoint.tensors)
    made = OwnModel(source, _kv_heads(block, source))
    shapes = own_shapes(source, made.kv_heads)
    stored = {name: info.shape for name, info in checkpoint.tensors.items()}
    if problems := [
        f"{name}: expected {list(shape)}, found {list(stored[name]) if name in stored else 'none'}"
        for name, shape in shapes.items()
        if stored.get(name) != shape
    ]:
        raise InputError(f"{checkpoint.origin}: its tensors are not those of its config.json", problems)
    return made


def _kv_heads(block: Any, source: Model) -> int:
    """The key/value heads of a block ``kvfold``."""
    stated = block.get("kv_heads") if isinstance(block, Mapping) else None
    heads = source.geometry.heads
    if not TYPES["size"][1](stated) or heads % int(str(stated)):
        raise InputError(f"config.json: kv_heads of {BLOCK} must divide the {heads} query heads, found {short(stated)}")
    return int(str(stated))
