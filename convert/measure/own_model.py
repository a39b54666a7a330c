"""A checkpoint of layout ``kvfold`` as a model: its source's, and the attention that its config describes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, short
from kvfold.convert.families.family import load_family, supported
from kvfold.convert.families.model import Model
from kvfold.convert.families.tensors import ROLES
from kvfold.convert.families.values import TYPES
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.own_code import BLOCK, Shape, grouped_shapes, source_type
from kvfold.convert.targets.own_latent import LATENT, NORMED, latent_shapes
from kvfold.convert.targets.results import Result, folded_result, latent_result_of


@dataclass(frozen=True)
class OwnModel:
    """``source`` is the source's model by its config, as far as that does not say what its attention became.

    That is either ``kv_heads`` grouped heads, or a latent of ``split`` channels and rotary dims.
    """

    source: Model
    kv_heads: int | None = None
    split: tuple[int, int] | None = None

    @property
    def result(self) -> Result:
        """What engines look at."""
        if self.split is None:
            return folded_result(self.source, self.kv_heads)
        return latent_result_of(self.source, LatentTarget(*self.split, layout="kvfold"))

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint."""
        tensors = self.source.tensors.items()
        shapes = {name: tensor.shape for name, tensor in tensors if not {*tensor.roles} & {*ROLES}}
        for layer in range(self.source.geometry.layers):
            grouped = self.split is None and self.kv_heads is not None
            shapes |= (
                grouped_shapes(self.source, layer, self.kv_heads or 1)
                if grouped
                else latent_shapes(self.source, layer, *(self.split or (0, 0)))
            )
        return shapes


def own_model(checkpoint: Checkpoint) -> OwnModel:
    """Raises InputError for a config that kvfold did not write, or tensors that are not those of the config."""
    config = checkpoint.config
    kind, block = source_type(config), config.get(BLOCK)
    if kind not in supported() or load_family(str(kind)).own_code is None or not isinstance(block, Mapping):
        raise InputError(f"config.json: model_type {config.get('model_type')!r} is not one that kvfold writes")
    source = Model(load_family(str(kind)), {**config, "model_type": kind}).as_stored(checkpoint.tensors)
    made = _described(block, source)
    stored = {name: info.shape for name, info in checkpoint.tensors.items()}
    if problems := [
        f"{name}: expected {list(shape)}, found {list(stored[name]) if name in stored else 'none'}"
        for name, shape in made.shapes().items()
        if stored.get(name) != shape
    ]:
        raise InputError(f"{checkpoint.origin}: its tensors are not those of its config.json", problems)
    return made


def _described(block: Mapping[str, Any], source: Model) -> OwnModel:
    """The attention that a block ``kvfold`` describes."""
    if block.get("variant") in (LATENT, NORMED):
        split = _number(block, "kv_rank", "size"), _number(block, "rope_dim", "count")
        return OwnModel(source, split=split)
    stated, heads = _number(block, "kv_heads", "size"), source.geometry.heads
    if heads % stated:
        raise InputError(f"config.json: kv_heads of {BLOCK} must divide the {heads} query heads, found {stated}")
    return OwnModel(source, kv_heads=stated)


def _number(block: Mapping[str, Any], key: str, kind: str) -> int:
    expected, fits = TYPES[kind]
    if not fits(block.get(key)):
        raise InputError(f"config.json: {key} of {BLOCK} must be {expected}, found {short(block.get(key))}")
    return int(block[key])
