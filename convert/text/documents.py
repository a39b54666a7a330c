"""Documents of a file of text or .jsonl rows, of a ``datasets`` name, or of the text that ships with kvfold.

A file is read in cells: stretches of about equal size between two line breaks, in an order drawn from the seed. What a
run does not need of a large file is not read.

Files do not go through ``datasets`` (``load_dataset("json", data_files=..., streaming=True)``): the package is an extra
that plain installs lack, its streams shuffle a buffer of rows rather than the whole file, and its errors do not name
the line at fault.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from kvfold.convert.errors import InputError, first_line
from kvfold.convert.io.json_text import check_unicode, portable_name
from kvfold.convert.text.sources import ROWS, check_source, missing_library, wrong_source

BUILT_IN = "the built-in standard-library text"
_CELL = 1 << 18  # bytes
_SMALLEST_CELL = 1 << 12
_CELLS = 64  # least number of cells of a file to train on, where they are no smaller than _SMALLEST_CELL
_LARGEST_WHOLE = 1 << 28  # bytes: a larger file's fingerprint is of _CELLS cells, 16 MiB


@dataclass(frozen=True)
class Document:
    """A text. ``rendered``: made by a chat template, special tokens included."""

    text: str
    rendered: bool = False


class Corpus(Protocol):
    """Documents to draw from."""

    @property
    def name(self) -> str:
        """The name for users and records: without the paths of this machine."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes of the text; None for a dataset."""
        ...

    def digest(self) -> str:
        """SHA-256 of the text (of the name, for a dataset)."""
        ...

    def fingerprint(self) -> str:
        """As ``digest``, but of a large file's cells spread from its first to its last byte only."""
        ...

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents of about ``limit`` bytes or more, and whether these are all."""
        ...

    def parts(self) -> tuple[int | None, Iterator[list[Document]]]:
        """All documents in parts that share no text, in an order drawn from the seed, and the number of parts.

        The number of parts of a dataset is None: it is unknown before the end.
        """
        ...


Render = Callable[[list[Mapping[str, Any]]], str]
Split = Literal["calibration", "held_out"]


def open_corpus(
    spec: str | None, render: Render, seed: int, split: Split = "calibration", option: str = "--calibration"
) -> Corpus:
    """The corpus that ``option`` names; None is that split of the built-in text. Raises InputError for a bad name."""
    if spec is None:
        from kvfold.convert.data import read_documents

        return _Memory(BUILT_IN, [Document(text) for text in read_documents(split)])
    path = Path(spec)
    if path.is_file() or (path.suffix in (".txt", ROWS) and not path.is_dir()):
        check_source(spec, option)
        return _File(path, render, seed)
    return _Dataset(spec, render, seed, option)


@dataclass(frozen=True)
class _Memory:
    name: str
    texts: list[Document]

    @property
    def size(self) -> int:
        return sum(len(document.text.encode()) for document in self.texts)

    def digest(self) -> str:
        joined = "\f".join(document.text for document in self.texts)
        return hashlib.sha256(joined.encode()).hexdigest()

    def fingerprint(self) -> str:
        return self.digest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        return self.texts, True

    def parts(self) -> tuple[int, Iterator[list[Document]]]:
        return len(self.texts), ([document] for document in self.texts)


@dataclass(frozen=True)
class _File:
    """A .txt, as every other plain text, is one document, or one per cell; every line of a .jsonl is one."""

    path: Path
    render: Render
    seed: int

    @property
    def name(self) -> str:
        return portable_name(self.path)

    @property
    def size(self) -> int:
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
        if self.path.suffix == ROWS:
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
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            line = self._line(start + error.start)
            raise InputError(
                f"{self.path}, line {line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}; "
                "convert the file to UTF-8"
            ) from None
        if self.path.suffix != ROWS:
            yield Document(text)
            return
        for number, row in enumerate(text.split("\n")):
            if row.strip():
                try:
                    yield _document(_json(row), self.render)
                except ValueError as error:
                    raise InputError(f"{self.path}, line {self._line(start) + number}: {error}") from error

    def _line(self, offset: int) -> int:
        with self.path.open("rb") as file:
            return 1 + file.read(offset).count(b"\n")


@dataclass(frozen=True)
class _Dataset:
    """The train split of a dataset on the hub or in a folder: ``NAME`` or ``NAME:CONFIG``."""

    spec: str
    render: Render
    seed: int
    option: str

    @property
    def name(self) -> str:
        return f"dataset {Path(self.spec).name if Path(self.spec).exists() else self.spec}"

    @property
    def size(self) -> None:
        return None

    def digest(self) -> str:
        return hashlib.sha256(self.spec.encode()).hexdigest()

    def fingerprint(self) -> str:
        return self.digest()

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
        for number, row in enumerate(self._rows()):
            try:
                yield _document(row, self.render)
            except ValueError as error:
                raise InputError(f"{self.option} {self.spec}, row {number}: {error}") from error

    def _rows(self) -> Iterable[Any]:
        try:
            import datasets
        except ImportError:
            raise missing_library(self.spec, self.option) from None
        name, _, config = self.spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about the request
            problem = wrong_source(self.spec, self.option)
            raise InputError(f"{problem}, and no dataset: {first_line(error)}") from error
        shuffled: Iterable[Any] = rows.shuffle(seed=self.seed, buffer_size=1000)
        return shuffled


def _json(row: str) -> Any:
    try:
        return json.loads(row)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found invalid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("expected a JSON object, found one that is nested too deeply") from None


def _document(row: Any, render: Render) -> Document:
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
