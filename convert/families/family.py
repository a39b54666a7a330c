"""The supported families (one JSON file each in this folder), and the lookup of the family for a
config.json.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.schema import Family, parse_family, read_table
from kvfold.convert.families.values import TYPES
from kvfold.convert.families.wrappers import INNER, WRAPPERS, text_type

_FAMILY_FOLDER = Path(__file__).parent
_ONLY = "kvfold converts only causal language models, which docs/families.md lists"
_LISTED = "docs/families.md lists the supported models, CONTRIBUTING.md explains how to add one"
_CAUSAL = re.compile("CausalLM$|LMHead")
# The keys of nested configs in wrappers, by which a wrapper that is not supported is told from a
# plain model.
_TOWERS = re.compile(
    r"(text|vision|audio|speech|image|video|decoder|encoder|thinker|talker|llm)_config$"
)


@lru_cache
def supported() -> tuple[str, ...]:
    """The model types with a family file, sorted, without those that occur only inside wrappers."""
    return tuple(sorted({path.stem for path in _FAMILY_FOLDER.glob("*.json")} - {*INNER}))


@lru_cache
def load_family(name: str) -> Family:
    """Load the family ``name``, one of ``supported()`` or ``INNER``.

    Raises ``ValueError`` with file, place and key if the file does not match the schema.
    """
    path = _FAMILY_FOLDER / f"{name}.json"
    return parse_family(read_table(path), path.name)


def stated_classes(config: Mapping[str, Any]) -> list[str] | None:
    """The names in ``architectures`` of a decoded config.json. Raises InputError unless they are a
    list of strings.
    """
    stated: list[str] | None = config.get("architectures")
    if stated is not None and not TYPES["texts"][1](stated):
        raise InputError(f"config.json: architectures must be {TYPES['texts'][0]}, not {stated!r}")
    return stated


def family_of(config: Mapping[str, Any]) -> Family:
    """The family for the ``model_type`` of a decoded config.json; for a wrapper, the family of its
    language model.

    Raises ``InputError`` if the model is not supported.
    """
    model_type = config.get("model_type")
    inner = text_type(config)
    if inner is None and model_type not in supported():
        raise InputError(f"config.json: model_type {model_type!r} is {_unsupported(config)}")
    if inner is not None and inner not in (*supported(), *INNER):
        raise InputError(
            f"config.json: model_type {model_type!r} wraps a language model of model_type"
            f" {inner!r}, which is not supported; {_LISTED}"
        )
    family = load_family(inner or str(model_type))
    stated = stated_classes(config)
    known = (
        (family.architecture, *family.also)
        if inner is None
        else (WRAPPERS[str(model_type)].architecture,)
    )
    # Published files spell the names of classes with other capitals at times.
    if stated and not {name.casefold() for name in known} & {name.casefold() for name in stated}:
        raise InputError(
            f"config.json: architectures is {stated!r}, but model_type {model_type!r} is supported"
            f" only as {known[0]}; use a checkpoint with a language-modeling head"
        )
    text = config if inner is None else config.get("text_config") or config
    for key, needed in family.requires.items():
        if text.get(key) not in (None, needed):
            raise InputError(
                f"config.json: {key} is {text[key]!r}, but model_type {family.model_type!r} is"
                f" supported only with {needed!r}"
            )
    return family


def _unsupported(config: Mapping[str, Any]) -> str:
    """The reason why the model type of ``config`` is not supported, and the way out."""
    heads = config.get("architectures")
    if str(config.get("model_type")).startswith("kvfold_"):
        return (
            "output of kvfold in layout kvfold, which cannot be converted again; convert its source"
            " instead"
        )
    if config.get("kv_lora_rank"):
        return (
            "an MLA model already, which cannot be converted again; convert the model that it was"
            " made from instead"
        )
    if config.get("is_encoder_decoder") is True:
        return f"not a causal language model (is_encoder_decoder is true); {_ONLY}"
    if towers := sorted(key for key in config if _TOWERS.search(key) and config[key] is not None):
        return (
            f"not a supported multimodal wrapper (the config has {', '.join(towers)}); supported"
            f" wrappers are {', '.join(WRAPPERS)}; {_LISTED}"
        )
    if TYPES["texts"][1](heads) and heads and not any(_CAUSAL.search(head) for head in heads):
        return f"not a causal language model (architectures is {heads}); {_ONLY}"
    return f"not supported; {_LISTED}"
