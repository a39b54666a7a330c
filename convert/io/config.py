"""Editing ``config.json`` and reading what a model card needs. No torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DTYPE_KEYS = ("dtype", "torch_dtype")
_ONE_LINE = 92  # characters


def edit_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, every other key as it was and in its old place; new keys come last.

    Working on the JSON rather than through transformers' classes keeps older spellings that other readers need.
    """
    return {**config, **changes}


def dtype_changes(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """The dtype keys to set so that readers of either spelling find ``dtype`` (those present, else the new one)."""
    present = [key for key in _DTYPE_KEYS if key in config]
    return dict.fromkeys(present or ["dtype"], dtype)


def dump(value: Mapping[str, Any]) -> str:
    """JSON as transformers writes its configs: two spaces, a final newline; keys keep their order."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def dump_record(value: Mapping[str, Any]) -> str:
    """JSON with the innermost lists and objects on one line each: short enough to read."""
    return _lines(value, "") + "\n"


def _lines(value: Any, margin: str) -> str:
    """``value`` as JSON; what it holds is indented by one more than ``margin``."""
    line = json.dumps(value, ensure_ascii=False)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not held or (len(line) <= _ONE_LINE and not any(isinstance(item, dict | list | tuple) for item in held)):
        return line
    inner = margin + " "
    names = value if isinstance(value, dict) else ()
    keys = [f"{json.dumps(str(name), ensure_ascii=False)}: " for name in names] or [""] * len(held)
    rows = ",\n".join(f"{inner}{key}{_lines(item, inner)}" for key, item in zip(keys, held, strict=True))
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{rows}\n{margin}{last}"


def license_of(folder: Path) -> str | None:
    """The ``license:`` line of the source's model card, if its front matter has one."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.search(r"^license:[ \t]*([\w.+-]+)[ \t]*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
