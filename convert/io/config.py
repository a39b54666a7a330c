"""Editing ``config.json``. No torch."""

import json
from collections.abc import Mapping
from typing import Any

_DTYPE_KEYS = ("dtype", "torch_dtype")


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
