"""Check the config of checkpoints with MLA or of layout ``kvfold``, and derive the model that it
describes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, shorten
from kvfold.convert.families.family import load_family
from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import ROLES
from kvfold.convert.families.values import TYPES
from kvfold.convert.targets.engines import ServedModel, describe_fold, describe_mla
from kvfold.convert.targets.mla.spec import MlaSpec
from kvfold.convert.targets.own_code import (
    BLOCK,
    LATENT,
    NORMED,
    grouped_model,
    latent_shapes,
    source_type,
)

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


def check_mla_config(
    config: Mapping[str, Any], checkpoint: Checkpoint, in_files: Callable[[str], str]
) -> None:
    """Raise InputError for invalid values in an MLA model's ``config``, or for sizes that the
    stored tensors contradict.

    ``in_files`` converts a tensor name of the language model to its name in the files, which
    differs in wrappers.
    """
    problems = []
    for key, kind in {**_KEYS, **_OPTIONAL}.items():
        rule, fits = TYPES[kind]
        value = config.get(key)
        if not fits(value) and not (value is None and key in _OPTIONAL):
            problems.append(f"config.json: {key} must be {rule}, not {shorten(value)}")
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key) or {}
        if not isinstance(table, dict) or not isinstance(table.get("rope_type", ""), str):
            rule = "must be an object whose rope_type is a string"
            problems.append(f"config.json: {key} {rule}, not {shorten(table)}")
    # A hostile number of layers must not make as many lines.
    if not problems and config["num_hidden_layers"] > len(checkpoint.tensors):
        problems.append(
            f"config.json: num_hidden_layers is {config['num_hidden_layers']}, but the files"
            f" contain only {len(checkpoint.tensors)} tensors"
        )
    if problems:
        raise InputError(f"{checkpoint.origin}: {problems[0]}", problems[1:])
    shape = (config["kv_lora_rank"] + config["qk_rope_head_dim"], config["hidden_size"])
    names = (_LATENT.format(layer=layer) for layer in range(config["num_hidden_layers"]))
    _check_shapes(checkpoint, {in_files(name): shape for name in names})


def converted_model(checkpoint: Checkpoint) -> tuple[Model, ServedModel]:
    """The source model and the conversion result, derived from the config.json of a checkpoint of
    layout ``kvfold``.

    Raises InputError if kvfold does not write such a config, or if the tensors do not match it.
    """
    config = checkpoint.config
    kind = source_type(config)
    block = config.get(BLOCK)
    if kind not in SOURCES or not isinstance(block, Mapping):
        rule = f"is unknown to kvfold, or the object {BLOCK!r} is missing; convert the source again"
        raise InputError(f"config.json: model_type {config.get('model_type')!r} {rule}")
    source = Model(load_family(str(kind)), {**config, "model_type": kind}).as_stored(
        checkpoint.tensors
    )
    shapes = {
        name: tensor.shape
        for name, tensor in source.tensors.items()
        if not {*tensor.roles} & {*ROLES}
    }
    layers = range(source.geometry.layers)
    if block.get("variant") in (LATENT, NORMED):
        rank = _number(block, "kv_rank", "size")
        spec = MlaSpec(rank, _number(block, "rope_dim", "count"), layout="kvfold")
        for layer in layers:
            shapes |= latent_shapes(source, layer, spec)
        _check_shapes(checkpoint, shapes)
        return source, describe_mla(source, spec)
    kv_heads = _number(block, "kv_heads", "size")
    if source.geometry.heads % kv_heads:
        raise InputError(
            f"config.json: kv_heads = {kv_heads} in {BLOCK!r} must divide the"
            f" {source.geometry.heads} query heads"
        )
    target = grouped_model(source, kv_heads)
    for layer in layers:
        shapes |= {name: target.tensors[name].shape for name in target.attention_names(layer)}
    _check_shapes(checkpoint, shapes)
    return source, describe_fold(source, kv_heads)


def _check_shapes(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InputError for stored tensors that do not have these shapes."""
    problems = []
    for name, shape in shapes.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            problems.append(f"missing: {name} {list(shape)}")
        elif info.shape != shape:
            problems.append(
                f"wrong shape: {name} is {list(info.shape)}, but config.json says {list(shape)}"
            )
    if problems:
        raise InputError(f"{checkpoint.origin}: its tensors do not match its config.json", problems)


def _number(block: Mapping[str, Any], key: str, kind: str) -> int:
    rule, fits = TYPES[kind]
    if not fits(block.get(key)):
        raise InputError(
            f"config.json: {key} in {BLOCK!r} must be {rule}, not {shorten(block.get(key))}"
        )
    return int(block[key])
