"""The texts that an option names, checked before anything else is loaded: this module imports nothing heavy."""

import codecs
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from kvfold.convert.errors import InputError, opt

ROWS = ".jsonl"  # a file of rows; every other file is one document of plain text
_SNIFFED = 1 << 16  # bytes


def check_sources(specs: Iterable[str], option: str = "calibration") -> None:
    """Raises InputError when a file or dataset that ``option`` names cannot be what it has to be."""
    for spec in specs:
        check_source(spec, option)


def check_source(spec: str, option: str) -> None:
    """Raises InputError: no such file, one that cannot be read or is no text, a dataset without its library."""
    path = Path(spec)
    if path.is_file():
        _check_text(path, option)
    elif path.suffix in (".txt", ROWS) and not path.is_dir():
        raise InputError(f"{opt(option)}: no file {spec}")
    elif find_spec("datasets") is None:
        raise missing_library(spec, option)


def missing_library(spec: str, option: str) -> InputError:
    """The error for a dataset where ``datasets`` is not installed."""
    return InputError(
        f"{wrong_source(spec, option)}, and datasets, by name or in a folder, need the datasets package: "
        "pip install 'kvfold[data]'"
    )


def wrong_source(spec: str, option: str) -> str:
    """The beginning of an error about a ``spec`` that is no file."""
    actual = "a folder" if Path(spec).is_dir() else "no such file"
    return f"{opt(option, spec)}: expected a text file (UTF-8), a .jsonl file or the name of a dataset, found {actual}"


def _check_text(path: Path, option: str) -> None:
    """Plain text may have any suffix. What calls itself .txt or .jsonl is told the line at fault when it is read."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_SNIFFED)
    except OSError as error:
        raise InputError(f"{opt(option, path)}: cannot be read ({error.strerror}): check its permissions") from None
    if not beginning:
        raise InputError(f"{opt(option, path)}: expected text, found an empty file")
    if path.suffix in (".txt", ROWS):
        return
    expected = f"{opt(option, path)}: expected a text file (UTF-8), a .jsonl file or the name of a dataset"
    if path.suffix == ".json":
        raise InputError(f"{expected}, found a .json file; write an object with `text` on each line and name it .jsonl")
    if b"\0" in beginning or not _is_utf8(beginning):
        raise InputError(f"{expected}, found a file that is no UTF-8 text")


def _is_utf8(beginning: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return True
