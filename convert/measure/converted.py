"""Checkpoints whose attention is latent or of layout ``kvfold``: is their config sound, and what does it describe?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, short
from kvfold.convert.families.family import load_family
from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import ROLES
from kvfold.convert.families.values import TYPES
from kvfold.convert.targets.engines import Result, folded_result, latent_result_of
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.own_code import BLOCK, LATENT, NORMED, grouped_shapes, latent_shapes, source_type
from kvfold.convert.targets.target import Shape

_KEYS = {
    "num_hidden_layers": "size",
    "num_attention_heads": "size",
    "kv_lora_rank": "size",
    "qk_rope_head_dim": "count",
    "qk_nope_head_dim": "count",
    "v_head_dim": "size",
    "hidden_size": "size",
}
_OPTIONAL = {
    "q_lora_rank": "size",
    "max_position_embeddings": "size",
    "vocab_size": "size",
    "architectures": "texts",
    "attention_bias": "flag",
}
_LATENT = "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"


def latent_faults(config: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> list[str]:
    """Problems of a latent (MLA) model's config, one line each: its values, or the shapes that they give the cache."""
    return list(_value_faults(config)) or list(_shape_faults(config, stored))


def _value_faults(config: Mapping[str, Any]) -> Iterator[str]:
    for key, kind in {**_KEYS, **_OPTIONAL}.items():
        expected, fits = TYPES[kind]
        value = config.get(key)
        if not fits(value) and not (value is None and key in _OPTIONAL):
            yield f"config.json: {key} must be {expected}, found {short(value)}"
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if table is not None and not (isinstance(table, dict) and isinstance(table.get("rope_type", ""), str)):
            yield f"config.json: {key} must be an object whose rope_type is a string, found {short(table)}"


def _shape_faults(config: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> Iterator[str]:
    layers = config["num_hidden_layers"]
    shape = config["kv_lora_rank"] + config["qk_rope_head_dim"], config["hidden_size"]
    if layers > len(stored):
        yield f"config.json: num_hidden_layers is {layers}, but the files hold {len(stored)} tensors in all"
        return
    for layer in range(layers):
        info = stored.get(name := _LATENT.replace("{layer}", str(layer)))
        if info is None:
            yield f"missing: {name} {list(shape)}"
        elif info.shape != shape:
            yield f"wrong shape: {name} is {list(info.shape)}, expected {list(shape)}"


@dataclass(frozen=True)
class ConvertedModel:
    """A checkpoint of layout ``kvfold``: the ``source`` that its config describes, and what its attention became.

    That is either ``kv_heads`` grouped heads, or a latent of ``split`` channels and rotary dims.
    """

    source: Model
    kv_heads: int | None = None
    split: tuple[int, int] | None = None

    @property
    def result(self) -> Result:
        """The result as engines see it."""
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


def converted_model(checkpoint: Checkpoint) -> ConvertedModel:
    """The model that config.json describes. Raises InputError if kvfold did not write it, or its tensors differ."""
    config = checkpoint.config
    kind, block = source_type(config), config.get(BLOCK)
    if kind not in SOURCES or not isinstance(block, Mapping):
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


def _described(block: Mapping[str, Any], source: Model) -> ConvertedModel:
    """The attention that a block ``kvfold`` describes."""
    if block.get("variant") in (LATENT, NORMED):
        split = _number(block, "kv_rank", "size"), _number(block, "rope_dim", "count")
        return ConvertedModel(source, split=split)
    stated, heads = _number(block, "kv_heads", "size"), source.geometry.heads
    if heads % stated:
        raise InputError(f"config.json: kv_heads of {BLOCK} must divide the {heads} query heads, found {stated}")
    return ConvertedModel(source, kv_heads=stated)


def _number(block: Mapping[str, Any], key: str, kind: str) -> int:
    expected, fits = TYPES[kind]
    if not fits(block.get(key)):
        raise InputError(f"config.json: {key} of {BLOCK} must be {expected}, found {short(block.get(key))}")
    return int(block[key])
