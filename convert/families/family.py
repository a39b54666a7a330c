"""The families that are supported, one JSON file each beside this module, and which of them a config.json is of."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.reading import parse_family, read_table
from kvfold.convert.families.refusals import HOW_TO_ADD, REASONS, advice
from kvfold.convert.families.schema import Family
from kvfold.convert.families.values import TYPES
from kvfold.convert.families.wrappers import INNER, WRAPPERS, text_type

_FOLDER = Path(__file__).parent
_ENCODERS = _FOLDER / "encoders"
_SEQ2SEQ = _FOLDER / "seq2seq"
_INSTEAD = {  # of commands that are for decoders
    "kvfold sweep": "run kvfold convert for each target, then kvfold drift on each result",
    "kvfold uptrain": "train it with transformers' Seq2SeqTrainer, which runs results of kvfold convert too",
    "kvfold eval": "kvfold drift compares both models, on denoising tasks",
    "kvfold bench": "time generate() of transformers; kvfold inspect tells the sizes of its caches",
}
_TOWERS = re.compile(r"(text|vision|audio|speech|image|video|decoder|encoder|thinker|talker|llm)_config$")


@lru_cache
def supported() -> tuple[str, ...]:
    """The model types of plain decoders that have a family file, sorted."""
    return tuple(sorted({path.stem for path in _FOLDER.glob("*.json")} - {*INNER}))


@lru_cache
def encoders() -> tuple[str, ...]:
    """The model types of encoders that have a family file, sorted."""
    return tuple(sorted(path.stem for path in _ENCODERS.glob("*.json")))


@lru_cache
def seq2seq() -> tuple[str, ...]:
    """The model types of encoder-decoders that have a family file, sorted."""
    return tuple(sorted(path.stem for path in _SEQ2SEQ.glob("*.json")))


@lru_cache
def load_family(name: str) -> Family:
    """The family called ``name``, one of ``supported()``, ``encoders()``, ``seq2seq()`` or ``INNER``.

    Raises ``ValueError`` naming file, place and key when its file does not fit the schema.
    """
    folder = _ENCODERS if name in encoders() else _SEQ2SEQ if name in seq2seq() else _FOLDER
    path = folder / f"{name}.json"
    return parse_family(read_table(path), path.name)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a decoded config.json, by its ``model_type``; of a wrapper that of its language model.

    Raises ``InputError`` when it is not supported.
    """
    model_type = config.get("model_type")
    if (inner := text_type(config)) is not None:
        return _wrapped_family(str(model_type), inner, config)
    known = ", ".join(supported())
    if towers := sorted(key for key in config if _TOWERS.search(key) and config[key] is not None):
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported: it wraps a language model "
            f"({', '.join(towers)}){_inner_reason(config)}, and this wrapper is not written yet; expected a plain "
            f"decoder of one of: {known}; or a wrapper: {', '.join(WRAPPERS)}; to add one see CONTRIBUTING.md: a row "
            "of WRAPPERS, and a tiny model for its tests"
        )
    if str(model_type).startswith("kvfold_"):
        raise InputError(
            f"config.json: model_type {model_type!r} is what kvfold wrote in layout kvfold, which is not read again; "
            "convert its source"
        )
    if reason := REASONS.get(str(model_type)):
        raise InputError(f"config.json: model_type {model_type!r} is not supported: {reason}{advice(reason)}")
    if model_type not in (*supported(), *encoders(), *seq2seq()):
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; expected one of: {known}; or an encoder: "
            f"{', '.join(encoders())}; or an encoder-decoder: {', '.join(seq2seq())}{HOW_TO_ADD}"
        )
    family = load_family(model_type)
    _check_architecture(family, config.get("architectures"))
    _check_required(family, config)
    return family


def check_decodes(config: Mapping[str, Any], origin: str, command: str) -> None:
    """Raises InputError for the ``config`` of an encoder or encoder-decoder: ``command`` cannot run it."""
    kind = str(config.get("model_type")).removeprefix("kvfold_")
    if kind in seq2seq():
        raise InputError(
            f"{origin}: {command} runs models that go on with one text, found an encoder-decoder ({kind}), which reads "
            f"one and writes another; {_INSTEAD.get(command, 'kvfold convert and kvfold drift work with it')}"
        )
    if kind in encoders():
        raise InputError(
            f"{origin}: {command} needs a model that writes text and keeps a cache, found an encoder ({kind}); "
            "kvfold convert and kvfold drift work with encoders"
        )


def _inner_reason(config: Mapping[str, Any]) -> str:
    """Why the language model in a wrapper would be refused by itself too; empty where it would not."""
    text = config.get("text_config")
    reason = REASONS.get(str(text.get("model_type"))) if isinstance(text, dict) else None
    return "" if reason is None else f" whose language model is not supported either: {reason}"


def _check_required(family: Family, config: Mapping[str, Any]) -> None:
    for key, expected in family.requires.items():
        if config.get(key, expected) != expected:
            raise InputError(
                f"config.json: {key} is {config[key]!r}; for model_type {family.model_type!r} {expected!r} was "
                "expected: other models of this class are not supported"
            )


def _wrapped_family(model_type: str, inner: str, config: Mapping[str, Any]) -> Family:
    if inner not in (*supported(), *INNER):
        reason = REASONS.get(inner, f"expected one of: {', '.join(supported())}")
        raise InputError(
            f"config.json: model_type {model_type!r} wraps a language model of model_type {inner!r}, which is not "
            f"supported: {reason}"
        )
    family = load_family(inner)
    architecture = WRAPPERS[model_type].architecture
    _check_architecture(replace(family, model_type=model_type, architecture=architecture), config.get("architectures"))
    return family


def _check_architecture(family: Family, architectures: Any) -> None:
    if architectures is not None and not TYPES["texts"][1](architectures):
        raise InputError(f"config.json: architectures must be {TYPES['texts'][0]}, found {architectures!r}")
    known = {name.casefold() for name in (family.architecture, *family.also)}
    if architectures and not known & {item.casefold() for item in architectures}:
        raise InputError(
            f"config.json: architectures is {architectures!r}; for model_type {family.model_type!r} "
            f"{family.architecture} was expected: other heads are not supported"
        )
