"""JSON of configs, indices and records. No torch."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair as JSON spells it
_DTYPE_KEYS = ("dtype", "torch_dtype")


def load_json(data: bytes, **options: Any) -> Any:
    """The JSON value in a file's bytes: UTF-8 in which every string is Unicode text too.

    Raises ValueError or RecursionError with the reason.
    """
    value = json.loads(data.decode("utf-8"), **options)
    # JSON can spell half of a surrogate pair, and Python reads it, but it can be neither printed nor written later
    if _SURROGATE.search(data):
        check_unicode(json.dumps(value, ensure_ascii=False))
    return value


def check_unicode(text: str) -> None:
    """Raises ValueError if a string holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"half of a surrogate pair, \\u{half:04x}, which is no character") from None


def portable_name(path: Path) -> str:
    """The last part of a path for records, with a replacement character for each byte that is not UTF-8."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config`` with ``dtype`` under the keys that it has for that.

    Configs within the config that state a dtype are changed too. Every other key stays as it was, in its old place.
    """
    changed = {
        name: with_dtype(value, dtype)
        for name, value in config.items()
        if isinstance(value, Mapping) and any(key in value for key in _DTYPE_KEYS)
    }
    # older and newer readers know one key each: both stay where both are
    present = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    return {**config, **changed, **dict.fromkeys(present, dtype)}


def dump(value: Mapping[str, Any]) -> str:
    """JSON in the format of transformers' configs: two spaces, a final newline; keys keep their order."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
