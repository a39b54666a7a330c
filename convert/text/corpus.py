"""Documents to draw text from: a file, a dataset of the hub or in a folder, or the text that ships with kvfold.

A file is read in cells: stretches of about equal size between two line breaks, in an order drawn from the seed. The
cells of a large file that a run does not need are not read.

Files do not go through ``datasets`` (``load_dataset("json", data_files=..., streaming=True)``): the package is an extra
that plain installs lack, its streams shuffle a buffer of rows rather than the whole file, and its errors do not name
the line at fault.

This module imports nothing heavy: commands check the names of texts (``check_sources``) before they load anything.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

from kvfold.convert.checkpoint.files import check_unicode, portable_name
from kvfold.convert.errors import InputError, first_line, opt

BUILT_IN = "the built-in standard-library text"
_ROWS = ".jsonl"  # a file of rows; every other file is one document of plain text
_SNIFFED = 1 << 16  # bytes of a file that must look like text
_CELL = 1 << 18  # bytes
_SMALLEST_CELL = 1 << 12
_CELLS = 64  # least number of cells of a file to train on, where they are no smaller than _SMALLEST_CELL
_LARGEST_WHOLE = 1 << 28  # bytes: a larger file's fingerprint is of _CELLS cells, 16 MiB

Split = Literal["calibration", "held_out"]
Render = Callable[[list[Mapping[str, Any]]], str]  # messages of a chat to text


@dataclass(frozen=True)
class Document:
    """A text. ``rendered``: made by a chat template, special tokens included."""

    text: str
    rendered: bool = False


@dataclass(frozen=True)
class Corpus:
    """Documents to draw from. ``name`` is for users and records, without the paths of this machine."""

    name: str

    @property
    def size(self) -> int | None:
        """Bytes of the text; None for a dataset."""
        return None

    def digest(self) -> str:
        """SHA-256 of the text (of the name, for a dataset)."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """As ``digest``, but of a large file's cells spread from its first to its last byte only."""
        return self.digest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents of about ``limit`` bytes or more, and True if these are all."""
        raise NotImplementedError

    def parts(self) -> tuple[int | None, Iterator[list[Document]]]:
        """All documents in parts that share no text, in an order drawn from the seed, and the number of parts.

        The number of parts of a dataset is None: it is unknown before the end.
        """
        raise NotImplementedError


def check_sources(specs: Iterable[str], option: str = "calibration") -> None:
    """Raises InputError when a file or dataset that ``option`` names does not exist, or cannot be read as text."""
    for spec in specs:
        path = Path(spec)
        if path.is_file():
            _check_text(path, option)
        elif path.suffix in (".txt", _ROWS) and not path.is_dir():
            raise InputError(f"{opt(option)}: no file {spec}")
        elif find_spec("datasets") is None:
            raise _missing_library(spec, option)


def _check_text(path: Path, option: str) -> None:
    """Plain text may have any suffix. Faults within a .txt or .jsonl are told with their line when it is read."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_SNIFFED)
    except OSError as error:
        raise InputError(f"{opt(option, path)}: cannot be read ({error.strerror}): check its permissions") from None
    if not beginning:
        raise InputError(f"{opt(option, path)}: expected text, found an empty file")
    if path.suffix in (".txt", _ROWS):
        return
    expected = f"{opt(option, path)}: expected a text file (UTF-8), a .jsonl file or the name of a dataset"
    if path.suffix == ".json":
        raise InputError(f"{expected}, found a .json file; write an object with `text` on each line and name it .jsonl")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)  # a character may be cut at the end
        is_text = b"\0" not in beginning
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise InputError(f"{expected}, found a file that is no UTF-8 text")


def _missing_library(spec: str, option: str) -> InputError:
    return InputError(
        f"{_wrong_source(spec, option)}, and datasets, by name or in a folder, need the datasets package: "
        "pip install 'kvfold[data]'"
    )


def _wrong_source(spec: str, option: str) -> str:
    """The beginning of an error about a ``spec`` that is no file."""
    actual = "a folder" if Path(spec).is_dir() else "no such file"
    return f"{opt(option, spec)}: expected a text file (UTF-8), a .jsonl file or the name of a dataset, found {actual}"


def open_corpus(
    spec: str | None, render: Render, seed: int, split: Split = "calibration", option: str = "calibration"
) -> Corpus:
    """The corpus that ``option`` names; None is that split of the built-in text. Raises InputError for a bad name."""
    if spec is None:
        from kvfold.convert.data import read_documents

        name = BUILT_IN if split == "calibration" else f"{BUILT_IN}, the part that no conversion reads"
        texts = [Document(text) for text in read_documents(split)]
        return _BuiltIn(name, texts)
    path = Path(spec)
    if path.is_file() or (path.suffix in (".txt", _ROWS) and not path.is_dir()):
        check_sources([spec], option)
        return TextFile(portable_name(path), path, render, seed)
    name = path.name if path.exists() else spec
    return _Dataset(f"dataset {name}", spec, render, seed, option)


@dataclass(frozen=True)
class _BuiltIn(Corpus):
    texts: list[Document]

    @property
    def size(self) -> int:
        return sum(len(document.text.encode()) for document in self.texts)

    def digest(self) -> str:
        joined = "\f".join(document.text for document in self.texts)
        return hashlib.sha256(joined.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        return self.texts, True

    def parts(self) -> tuple[int, Iterator[list[Document]]]:
        return len(self.texts), ([document] for document in self.texts)


@dataclass(frozen=True)
class _Dataset(Corpus):
    """The train split of a dataset on the hub or in a folder: ``NAME`` or ``NAME:CONFIG``."""

    spec: str
    render: Render
    seed: int
    option: str

    def digest(self) -> str:
        return hashlib.sha256(self.spec.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        documents: list[Document] = []
        size = 0
        for document in self._documents():
            documents.append(document)
            size += len(document.text)
            if size >= limit:
                return documents, False
        return documents, True

    def parts(self) -> tuple[None, Iterator[list[Document]]]:
        return None, ([document] for document in self._documents())

    def _documents(self) -> Iterator[Document]:
        try:
            import datasets
        except ImportError:
            raise _missing_library(self.spec, self.option) from None
        name, _, config = self.spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about the request
            problem = _wrong_source(self.spec, self.option)
            raise InputError(f"{problem}, and no dataset: {first_line(error)}") from error
        for number, row in enumerate(rows.shuffle(seed=self.seed, buffer_size=1000)):
            try:
                yield _document_of(row, self.render)
            except ValueError as error:
                raise InputError(f"{opt(self.option, self.spec)}, row {number}: {error}") from error


@dataclass(frozen=True)
class TextFile(Corpus):
    """A .txt, as every other plain text, is one document, or one per cell; every line of a .jsonl is one."""

    path: Path
    render: Render
    seed: int

    @property
    def size(self) -> int:
        # Asked each time: an edit of the file while it is read must show in its fingerprint.
        return self.path.stat().st_size

    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def fingerprint(self) -> str:
        if self.size <= _LARGEST_WHOLE:
            return self.digest()
        hashed = hashlib.sha256()
        with self.path.open("rb") as file:
            for cell in range(_CELLS):
                file.seek((self.size - _CELL) * cell // (_CELLS - 1))
                hashed.update(file.read(_CELL))
        return hashed.hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        if self.size <= limit:
            return list(self._parse(0, self.path.read_bytes())), True
        drawn = self._order(_CELL)[: max(1, limit // _CELL)]
        return [document for cell in sorted(drawn) for document in self._inside(cell)], False

    def parts(self) -> tuple[int, Iterator[list[Document]]]:
        # Enough cells that a shuffle of them mixes the file, and few enough that each has some documents.
        size = max(_SMALLEST_CELL, min(_CELL, self.size // _CELLS))
        order = self._order(size)
        return len(order), (self._cell(cell, size) for cell in order)

    def _order(self, size: int) -> list[int]:
        """The numbers of the file's cells of ``size`` bytes, as the seed draws them."""
        import torch

        cells = -(-self.size // size)
        order: list[int] = torch.randperm(cells, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return order

    def _inside(self, number: int) -> Iterator[Document]:
        """The complete lines inside a cell: a sample of the file needs no others."""
        with self.path.open("rb") as file:
            file.seek(number * _CELL)
            raw = file.read(_CELL)
        # The first and the last line of a cell may be cut: they belong to lines that begin or end elsewhere.
        first, last = 0 if number == 0 else raw.find(b"\n") + 1, raw.rfind(b"\n") + 1
        if first < last:
            yield from self._parse(number * _CELL + first, raw[first:last])

    def _cell(self, number: int, size: int) -> list[Document]:
        """The documents that begin in a cell, lines of a .jsonl or a stretch of a .txt: every byte is in one cell."""
        with self.path.open("rb") as file:
            start, stop = (self._boundary(file, cell * size, size) for cell in (number, number + 1))
            file.seek(start)
            raw = file.read(stop - start)
        return list(self._parse(start, raw)) if raw else []

    def _boundary(self, file: BinaryIO, offset: int, size: int) -> int:
        """The beginning of the first line at or after ``offset``.

        A line of a .txt that is longer than a cell of ``size`` bytes is cut between two characters.
        """
        if offset == 0:
            return 0
        file.seek(offset - 1)
        if self.path.suffix == _ROWS:
            file.readline()
            return file.tell()
        raw = file.read(size)
        skipped = raw.find(b"\n") + 1
        if not skipped:
            skipped = 1
            while skipped < len(raw) and raw[skipped] & 0xC0 == 0x80:  # inside a UTF-8 character
                skipped += 1
        return offset - 1 + skipped

    def _parse(self, start: int, raw: bytes) -> Iterator[Document]:
        """The documents in ``raw``, which begins at byte ``start`` of the file."""

        def line_at(offset: int) -> int:
            with self.path.open("rb") as file:
                return 1 + file.read(offset).count(b"\n")

        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}, line {line_at(start + error.start)}: expected UTF-8 text, found byte "
                f"0x{raw[error.start]:02x}; convert the file to UTF-8"
            ) from None
        if self.path.suffix != _ROWS:
            yield Document(text)
            return
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                try:
                    yield _document_of(_json_row(line), self.render)
                except ValueError as error:
                    raise InputError(f"{self.path}, line {line_at(start) + number}: {error}") from error


def _json_row(line: str) -> Any:
    """The row in a line of a .jsonl file. Raises ValueError that says what was expected."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found invalid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("expected a JSON object, found one that is nested too deeply") from None


def _document_of(row: Any, render: Render) -> Document:
    """The document in a row of a dataset. Raises ValueError that says what was expected."""
    fields = row if isinstance(row, Mapping) else {}
    if isinstance(text := fields.get("text"), str):
        document = Document(text)
    elif isinstance(messages := fields.get("messages"), list):
        try:
            document = Document(render(messages), rendered=True)
        except Exception as error:  # templates are code of the checkpoint's author and raise anything
            reason = first_line(error)
            raise ValueError(f"the tokenizer's chat template does not take these messages: {reason}") from error
    else:
        actual = f"the fields {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"expected an object with a string `text` or a list `messages`, found {actual}")
    try:
        check_unicode(document.text)
    except ValueError as error:  # no tokenizer could read it
        raise ValueError(f"expected Unicode text, found {error}; fix the row or remove it") from None
    return document
