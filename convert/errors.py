"""kvfold's exceptions: the command line prints them at the end of stderr and sets the status."""

import errno
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Self

_SHOWN = 20
# A value from a hostile config.json may be a megabyte of brackets: errors show only its beginning
# and end.
_REPR = reprlib.Repr()
_REPR.maxstring = 200
_REPR.maxother = 200
_LONG_WORD = re.compile(r"\S{1000,}")  # longer than paths are
# Of a longer message, such as one with a value of many words, only the beginning and the end, which
# has the way out, are shown. Chosen: more than any message has that shows no such value.
_SHOWN_BEGINNING = 1200
_SHOWN_END = 400
_OPTIONS = {"contexts": "context", "batches": "batch"}  # fields whose options have a different name


def format_option(field: str, value: Any = True) -> str:
    """A field as the command line spells it: ``--kv-heads 5``; ``--fresh`` for a true flag,
    ``--no-retrieval`` for a false one.
    """
    name = _OPTIONS.get(field, field).replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


class KvfoldError(Exception):
    """An error with a message for the user: what is wrong and where, what was expected, and what to
    do.

    Attributes:
        message: One sentence, which spells options as the command line does.
        details: Further problems of the same kind, one short line each; ``str()`` shows the first
            20 and counts the rest.
        field: The keyword at fault, such as "kv_heads"; None if it is none, as for a damaged file.
    """

    exit_status = 1

    def __init__(
        self, message: str, details: Sequence[str] = (), *, field: str | None = None
    ) -> None:
        # Values and names from files may contain line ends and codes that a terminal obeys.
        self.message = escape_text(message)
        self.details = tuple(map(escape_text, details))
        self.field = field
        super().__init__(self.message)

    def __str__(self) -> str:
        """The message and the notes of the exception, followed by the details, one to a line."""
        lines = ["; ".join([self.message, *getattr(self, "__notes__", ())])]
        lines += [f"  {detail}" for detail in self.details[:_SHOWN]]
        if len(self.details) > _SHOWN:
            lines.append(f"  ... and {len(self.details) - _SHOWN} more")
        return "\n".join(lines)

    def with_prefix(self, prefix: str) -> Self:
        """The same error, with ``prefix`` and a colon in front of its message if it has none."""
        if self.message.startswith(f"{prefix}: "):
            return self
        return type(self)(f"{prefix}: {self.message}", self.details, field=self.field)


class InputError(KvfoldError):
    """An invalid request, checkpoint or text, which the user can correct."""

    exit_status = 2


def option_error(field: str, value: Any, rule: str) -> InputError:
    """An InputError about one option: its spelling with ``value``, followed by ``rule``, which says
    what is wrong or expected.
    """
    space = "" if rule.startswith(":") else " "
    return InputError(f"{format_option(field, value)}{space}{rule}", field=field)


def summarize_error(error: BaseException) -> str:
    """A library's error message in one line of at most 300 characters, or the exception's type if
    the message is empty.
    """
    return " ".join(str(error).split())[:300] or type(error).__name__


def escape_text(text: str) -> str:
    """``text`` in one line for messages: unprintable characters as Python escapes, and long words
    and texts shortened.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-20:]}", text)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) > _SHOWN_BEGINNING + _SHOWN_END:
        text = f"{text[:_SHOWN_BEGINNING]} ... {text[-_SHOWN_END:]}"
    return text


def shorten_repr(value: Any) -> str:
    """The ``repr`` of a value from a file; the middle is left out if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to print so many digits
        return "a number of more than 4300 digits"


def list_some(names: Sequence[str]) -> str:
    """The first three of ``names``, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


ADVICE = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or use a larger machine",
    errno.EIO: "check the disk",
}
_OUT_OF_MEMORY = re.compile(
    r"not enough memory|out of memory|can(?:'t|not) allocate memory|bad_alloc|can't start new"
    r" thread",
    re.I,
)


def explain_system_error(error: Exception) -> str | None:
    """A sentence about the failed disk, memory or file access that caused ``error``; None if there
    was none.
    """
    text = summarize_error(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return f"no memory left ({text}); {ADVICE[errno.ENOMEM]}"
    # torch.save reports no cause; nearly always the disk is full.
    if re.search("PytorchStreamWriter failed writing|inline_container.*unexpected pos", str(error)):
        return f"a file cannot be written ({text}); {ADVICE[errno.ENOSPC]}"
    # Errors from safetensors and tokenizers, which are written in Rust, contain the code as text.
    code = re.search(r"\(os error (\d+)\)", str(error))
    number = int(code[1]) if code else getattr(error, "errno", None)
    if not isinstance(number, int):
        return None
    file = getattr(error, "filename", None) or "a file"
    advice = ADVICE.get(number, "check the path, its permissions and its disk")
    return f"{file}: cannot be read or written ({os.strerror(number)}); {advice}"


def suggest_name(name: Any, known: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` with the name in ``known`` most similar to ``name``; empty if none
    is similar.
    """
    names = {text.lower(): text for text in known}
    close = get_close_matches(str(name).strip().lower(), names, 1)
    return f" (did you mean {names[close[0]]}?)" if close else ""
