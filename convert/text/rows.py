"""Documents in the rows of a dataset or of a .jsonl file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.convert.checkpoint.json_text import check_unicode
from kvfold.convert.errors import first_line

Render = Callable[[list[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Document:
    """A text. ``rendered``: made by a chat template, special tokens included."""

    text: str
    rendered: bool = False


def json_row(line: str) -> Any:
    """The row in a line of a .jsonl file. Raises ValueError that says what was expected."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found invalid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("expected a JSON object, found one that is nested too deeply") from None


def document_of(row: Any, render: Render) -> Document:
    """The document in a row of a dataset. Raises ValueError that says what was expected."""
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str):
            return Document(_unicode(row["text"]))
        if isinstance(row.get("messages"), list):
            return Document(_unicode(_rendered(row["messages"], render)), rendered=True)
    actual = f"the fields {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    raise ValueError(f"expected an object with a string `text` or a list `messages`, found {actual}")


def _unicode(text: str) -> str:
    """``text``. Raises ValueError when a tokenizer could not read it."""
    try:
        check_unicode(text)
    except ValueError as error:
        raise ValueError(f"expected Unicode text, found {error}; fix the row or remove it") from None
    return text


def _rendered(messages: list[Mapping[str, Any]], render: Render) -> str:
    try:
        return render(messages)
    except Exception as error:  # templates are code of the checkpoint's author and raise anything
        reason = first_line(error)
        raise ValueError(f"the tokenizer's chat template does not take these messages: {reason}") from error
