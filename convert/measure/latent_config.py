"""Whether the config of a latent (MLA) model can be believed: its values, and the shapes that they give the cache."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import short
from kvfold.convert.families.values import TYPES

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
    """What is wrong with the config of a latent model, or contradicts its tensors; one line each."""
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
    layers, shape = config["num_hidden_layers"], _latent_shape(config)
    if layers > len(stored):
        yield f"config.json: num_hidden_layers is {layers}, but the files hold {len(stored)} tensors in all"
        return
    for layer in range(layers):
        info = stored.get(name := _LATENT.replace("{layer}", str(layer)))
        if info is None:
            yield f"missing: {name} {list(shape)}"
        elif info.shape != shape:
            yield f"wrong shape: {name} is {list(info.shape)}, expected {list(shape)}"


def _latent_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    return config["kv_lora_rank"] + config["qk_rope_head_dim"], config["hidden_size"]
