"""The supported families (one JSON file each in this folder), the multimodal wrappers around them
(``wrappers.json``), and the lookup of the family for a config.json.

In a wrapper only the language model is converted; everything else is copied.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.schema import Family, build_section, read_family_table
from kvfold.convert.families.values import TYPES


@dataclass(frozen=True)
class MultimodalWrapper:
    """A multimodal model type whose checkpoint contains a language model: its class, and the
    default type of that language model.

    ``any_text``: the class can build any language model named in ``text_config`` (``AutoModel``),
    including MLA models.
    """

    architecture: str
    text: str
    any_text: bool = False


@dataclass(frozen=True)
class WrapperPrefixes:
    """The prefixes of tensor names in a multimodal checkpoint, in place of ``model.`` and
    ``lm_head.`` of a plain language model.
    """

    tower: str
    head: str

    def to_wrapped_name(self, name: str) -> str:
        """The name in a multimodal checkpoint of the tensor that a plain language model calls
        ``name``.
        """
        for old, new in (("model.", self.tower), ("lm_head.", self.head)):
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


_FOLDER = Path(__file__).parent
_FILE = json.loads((_FOLDER / "wrappers.json").read_text(encoding="utf-8"))
WRAPPERS = {name: MultimodalWrapper(**entry) for name, entry in _FILE["wrappers"].items()}
# What models without a family have instead of a plain KV cache: keys of their configs, with the
# values that matter if not all do. The first row with such a key counts.
_REFUSED = json.loads((_FOLDER / "refused.json").read_text(encoding="utf-8"))
# A wrapper's config leaves out what is the default of the language model's class (transformers
# 5.23.0).
DEFAULT_SIZES: dict[str, dict[str, int]] = _FILE["default_sizes"]
# Language models that occur in wrappers alone: no class runs them by themselves.
INNER = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text")

_PREFIXES = (
    WrapperPrefixes("model.language_model.", "lm_head."),  # as transformers 5 writes them
    WrapperPrefixes("language_model.model.", "language_model.lm_head."),
    WrapperPrefixes("model.text_model.", "lm_head."),  # of idefics3
    WrapperPrefixes("model.", "lm_head."),
)


def find_text_type(config: Mapping[str, Any]) -> str | None:
    """The model type of the language model inside a multimodal config, or None if ``config`` is
    that of a plain language model.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return None
    return str((config.get("text_config") or {}).get("model_type") or wrapper.text)


def read_text_config(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The config of the language model in a checkpoint whose tensors are ``names``. That of a plain
    model is ``config``; in a multimodal one, missing sizes get the defaults of its class.
    """
    model_type = find_text_type(config)
    if model_type is None:
        return dict(config)
    return {
        **DEFAULT_SIZES.get(model_type, {}),
        # before transformers 5 some wrappers held it flat
        **(config.get("text_config") or config),
        "model_type": model_type,
        "architectures": None,
        # wrappers say in different ways whether the head is the embedding: the files show it
        "tie_word_embeddings": f"{find_wrapper_prefixes(names).head}weight" not in names,
    }


def find_wrapper_prefixes(names: Collection[str]) -> WrapperPrefixes:
    """The prefixes that the tensor names of a multimodal checkpoint use; without a match, those
    that transformers 5 writes.
    """
    for prefixes in _PREFIXES:
        if f"{prefixes.tower}embed_tokens.weight" in names:
            return prefixes
    return _PREFIXES[0]


@cache
def list_supported_model_types() -> tuple[str, ...]:
    """The model types that have a family file, sorted, without those that occur only inside
    multimodal models.
    """
    names = {path.stem for path in _FOLDER.glob("*.json")}
    return tuple(sorted(names - {"wrappers", "refused", *INNER}))


@cache
def load_family(name: str) -> Family:
    """The family whose file is called ``name``, a model type.

    Raises ``ValueError`` with file, place and key if the file does not match the schema.
    """
    path = _FOLDER / f"{name}.json"
    family: Family = build_section(Family, read_family_table(path), path.name)
    return family


def read_architectures(config: Mapping[str, Any]) -> list[str] | None:
    """The class names under ``architectures`` in a config.json. Raises InputError unless they are a
    list of strings.
    """
    stated: list[str] | None = config.get("architectures")
    expected_type, fits = TYPES["texts"]
    if stated is not None and not fits(stated):
        raise InputError(f"config.json: architectures must be {expected_type}, not {stated!r}")
    return stated


def _explain_refusal(config: Mapping[str, Any]) -> str:
    """Why the model of this ``config`` is not supported: a phrase to put after its model type."""
    levels = [config, config.get("text_config"), config.get("language_config")]
    levels = [level for level in levels if isinstance(level, Mapping)]
    for row in _REFUSED:
        for level, (key, values) in product(levels, row["when"].items()):
            stated = level.get(key)
            entries = stated if isinstance(stated, list) else [stated]
            if (stated and not values) or any(entry in values for entry in entries):
                return str(row["reason"])
    return (
        "is not a supported causal language model or wrapper around one; choose a model with a"
        " plain KV cache, such as Llama, Qwen or Mistral"
    )


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of the model that a config.json describes; for a multimodal model, the family of
    its language model.

    Raises ``InputError`` if the model is not supported.
    """
    model_type = str(config.get("model_type"))
    inner = find_text_type(config)
    if (inner or model_type) not in list_supported_model_types() and inner not in INNER:
        raise InputError(f"config.json: model_type {model_type!r} {_explain_refusal(config)}")
    family = load_family(inner or model_type)
    known = [family.architecture, *family.also]
    if inner is not None:
        known = [WRAPPERS[model_type].architecture]
    stated = read_architectures(config)
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
                f"config.json: {key} is {json.dumps(text[key])}, but model_type"
                f" {family.model_type!r} is supported only with {json.dumps(needed)}; use a model"
                " that was trained so"
            )
    return family
