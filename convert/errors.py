"""The exceptions of kvfold. The command line turns them into the end of stderr and an exit status."""

import errno
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

_SHOWN = 20
# Options with the word behind them, but not those of a whole command that a message quotes.
_OPTION = re.compile(
    r"\bkvfold [a-z]+ [^;`\n]*|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)"
    r"(?: (?P<value>[\w./'\"][^\s:,;)`]*))?"
)
_NUMBER = re.compile(r"\d+(\.\d+)?")
_VALUES = re.compile(
    r"[A-Z]{2,}|gqa|mqa|mla|principal|mean|svd|free|engine|kvfold|auto|self|similar|contiguous|cpu|cuda|b?float\d\d"
)
_FLAGS = (
    *("allow-growth", "gradient-checkpointing", "keep-quantized", "overwrite", "resume", "rotate-latent"),
    "trust-remote-code",
)
_wording = {"command": False}
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 3, 16, 8, 200, 60, 200
# What values are often called elsewhere.
_USUAL = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "gpu": "cuda"}


class KvfoldError(Exception):
    """An error that kvfold explains: what was wrong, where, what was expected, what was found and what to do.

    ``message`` is that sentence, with the options of the command line. ``str()`` has it so where a command runs, and
    elsewhere with the keywords of the functions: ``to='gqa' needs kv_heads``. ``details`` are further problems of the
    same kind, one short line each; the first 20 are shown, then a count.
    """

    exit_status = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self._in_command = _wording["command"]

    def __str__(self) -> str:
        lines = [self.message, *(f"  {detail}" for detail in self.details[:_SHOWN])]
        if len(self.details) > _SHOWN:
            lines.append(f"  ... and {len(self.details) - _SHOWN} more")
        return "\n".join(lines if self._in_command else map(in_keywords, lines))


class InputError(KvfoldError):
    """The request, or the checkpoint or text it names, is wrong: the user can fix it."""

    exit_status = 2


@contextmanager
def worded_for_commands() -> Iterator[None]:
    """Errors that begin in the block, in any thread, name options (``--kv-heads``); all others name keywords."""
    before, _wording["command"] = _wording["command"], True
    try:
        yield
    finally:
        _wording["command"] = before


def in_keywords(line: str) -> str:
    """A line of a message with keywords of the functions in the place of options: ``--to gqa`` is ``to='gqa'``."""

    def keyword(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        name, value = found["name"].replace("-", "_"), found["value"]
        if value is None:
            return f"{name}=True" if found["name"] in _FLAGS else name
        if _NUMBER.fullmatch(value):
            return f"{name}={value}"
        leads = not line[: found.start()].strip() and line[found.end() : found.end() + 2] in (": ", ", ")
        if leads or _VALUES.fullmatch(value):
            return f"{name}={value}" if value[0] in "'\"" or value.isupper() else f"{name}={value!r}"
        return f"{name}=True {value}" if found["name"] in _FLAGS else f"{name} {value}"

    return _OPTION.sub(keyword, line)


def first_line(error: BaseException) -> str:
    """The first line of a library's error, the name of its type when it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """The whole message of a library's error on one line, the name of its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def short(value: Any) -> str:
    """The ``repr`` of a value out of a file, with the middle of what is long left out."""
    return _REPR.repr(value)


_ADVICE = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or use a larger machine",
    errno.EIO: "check the disk",
}
_OUT_OF_MEMORY = re.compile(
    r"not enough memory|out of memory|can(?:'t|not) allocate memory|bad_alloc|can't start new thread", re.I
)


def system_failure(error: Exception) -> str | None:
    """What the system refused, when ``error`` of a library is such a refusal: disk, memory, files; None otherwise."""
    text, code = one_line(error), error.errno if isinstance(error, OSError) else None
    if stated := re.search(r"\(os error (\d+)\)", text):  # safetensors and tokenizers, which are written in Rust
        code = int(stated[1])
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or _OUT_OF_MEMORY.search(text):
        code = errno.ENOMEM
    if code is None and "PytorchStreamWriter failed writing" in text:  # torch.save does not say why
        return f"expected to be able to write a file, found that it failed ({text[:120]}); {_ADVICE[errno.ENOSPC]}"
    if code is None:
        return None
    where = getattr(error, "filename", None) or "the system"
    advice = _ADVICE.get(code, "check the path, its permissions and its disk")
    return f"{where}: expected to be able to read or write it, found: {os.strerror(code)}; {advice}"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` for the one of ``known`` that ``name`` resembles most; empty when none does."""
    spellings = {_plain(item): item for item in known}
    usual = _USUAL.get(_plain(name))
    if usual in spellings.values():
        return f" (did you mean {usual}?)"
    close = get_close_matches(_plain(name), spellings, 1)
    return f" (did you mean {spellings[close[0]]}?)" if close else ""


def _plain(text: Any) -> str:
    return str(text).strip().lower().replace("-", "_")
