"""JSON whose strings are text: JSON can spell half of a surrogate pair, which can be neither printed nor written."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # how JSON spells half of a pair, or both halves
_DTYPE_KEYS = ("dtype", "torch_dtype")


def load_json(data: bytes, **options: Any) -> Any:
    """A JSON value out of a file's bytes: UTF-8 text in which every string is Unicode text too.

    Raises ValueError or RecursionError saying why it is none. Half of a surrogate pair, which JSON can spell and
    Python reads, could be neither printed nor written to a file later.
    """
    value = json.loads(data.decode("utf-8"), **options)
    if _SURROGATE.search(data):
        check_unicode(json.dumps(value, ensure_ascii=False))
    return value


def check_unicode(text: str) -> None:
    """ValueError when a string holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"half of a surrogate pair, \\u{half:04x}, which is no character") from None


def portable_name(path: Path) -> str:
    """The last part of a path for records: a name whose bytes are not UTF-8 has a replacement character for each."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def edit_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, every other key as it was and in its old place; new keys come last.

    Working on the JSON rather than through transformers' classes keeps older spellings that other readers need.
    """
    return {**config, **changes}


def dtype_changes(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The dtype keys to set so that readers of either spelling find ``dtype`` (those present, else the new one).

    Configs within the config that state one are set too.
    """
    present = [key for key in _DTYPE_KEYS if key in config]
    inner = {
        name: {**value, **dtype_changes(value, dtype)}
        for name, value in config.items()
        if isinstance(value, Mapping) and any(key in value for key in _DTYPE_KEYS)
    }
    return {**inner, **dict.fromkeys(present or ["dtype"], dtype)}


def dump(value: Mapping[str, Any]) -> str:
    """JSON in the format of transformers' configs: two spaces, a final newline; keys keep their order."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
