"""The exceptions of kvfold. The command line turns them into the end of stderr and an exit status."""

import errno
import os
import re
import reprlib
import signal
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, job schedulers, a closed terminal
_SHOWN = 20
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 3, 16, 8, 200, 60, 200
# What values are often called elsewhere.
_USUAL = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "gpu": "cuda"}


class KvfoldError(Exception):
    """An error that kvfold explains: what was wrong, where, what was expected, what was found and what to do.

    ``message`` is that sentence. Where it names options of the command line, a note of the exception, which a traceback
    shows, names them as keywords. ``details`` are further problems of the same kind, one short line each; the first 20
    are shown, then a count.
    """

    exit_status = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        options = dict.fromkeys(_OPTION.findall(" ".join([message, *self.details])))
        if options:
            keywords = ", ".join(f"--{name} is {name.replace('-', '_')}=" for name in options)
            self.add_note(f"from Python: {keywords}")

    def __str__(self) -> str:
        lines = [self.message, *(f"  {detail}" for detail in self.details[:_SHOWN])]
        if len(self.details) > _SHOWN:
            lines.append(f"  ... and {len(self.details) - _SHOWN} more")
        return "\n".join(lines)


class InputError(KvfoldError):
    """The request, or the checkpoint or text it names, is wrong: the user can fix it."""

    exit_status = 2


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
