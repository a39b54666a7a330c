"""Documents to draw text from: a file, a dataset of the hub or in a folder, or the text that ships with kvfold.

A file is read in cells: stretches of about equal size between two line breaks, in an order drawn from the seed. The
cells of a large file that a run does not need are not read.

Files do not go through ``datasets`` (``load_dataset("json", data_files=..., streaming=True)``): the package is an extra
that plain installs lack, its streams shuffle a buffer of rows rather than the whole file, and its errors do not name
the line at fault.
"""
# No torch at the top: commands check the names of texts before they load anything heavy.

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.checkpoint.files import check_unicode, portable_name
from kvfold.convert.errors import InputError, first_line, opt, short

if TYPE_CHECKING:
    from torch import Tensor

BUILT_IN = "the built-in standard-library text"
_ROWS = ".jsonl"  # a file of rows; every other file is one document of plain text
_ROW = "an object with a string `text` or a list `messages`"
_KINDS = "a text file (UTF-8), a .jsonl file or the name of a dataset"
_SNIFFED = 1 << 16  # bytes of a file that must look like text
_CELL = 1 << 18  # bytes
_SMALLEST_CELL = 1 << 12
_CELLS = 64  # least number of cells of a file to train on, where they are no smaller than _SMALLEST_CELL
_LARGEST_WHOLE = 1 << 28  # bytes: of a larger file _CELLS cells are hashed, 16 MiB

Split = Literal["calibration", "held_out"]
Render = Callable[[list[Mapping[str, Any]]], str]  # messages of a chat to text


@dataclass(frozen=True)
class Document:
    """A text. ``rendered``: made by a chat template, special tokens included."""

    text: str
    rendered: bool = False


@dataclass(frozen=True)
class Texts:
    """Documents one after another: the built-in text, or a dataset.

    ``name`` is for users and records, without the paths of this machine. ``size`` (bytes) and ``count`` of a dataset
    are None: they are unknown before its end. ``hashed`` stands for the text: a dataset's name.
    """

    name: str
    hashed: str
    each: Callable[[], Iterable[Document]]
    size: int | None = None
    count: int | None = None

    def digest(self, sampled: bool = False) -> str:
        """SHA-256 of the text (of the name, for a dataset)."""
        return hashlib.sha256(self.hashed.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents of about ``limit`` bytes or more, and True if these are all."""
        documents: list[Document] = []
        size = 0
        for document in self.each():
            if size >= limit:
                return documents, False
            documents.append(document)
            size += len(document.text)
        return documents, True

    def parts(self) -> tuple[int | None, Iterator[list[Document]]]:
        """All documents in parts that share no text, in an order drawn from the seed, and the number of parts."""
        return self.count, ([document] for document in self.each())


@dataclass(frozen=True)
class TextFile:
    """A .txt, as every other plain text, is one document, or one per cell; every line of a .jsonl is one."""

    name: str
    path: Path
    render: Render
    seed: int

    @property
    def size(self) -> int:
        # Asked each time: an edit of the file while it is read must show in what its tokens were made from.
        return self.path.stat().st_size

    def digest(self, sampled: bool = False) -> str:
        """SHA-256 of the text; ``sampled``: where it is large, of cells from its first to its last byte."""
        with self.path.open("rb") as file:
            if not sampled or self.size <= _LARGEST_WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            hashed = hashlib.sha256()
            for cell in range(_CELLS):
                file.seek((self.size - _CELL) * cell // (_CELLS - 1))
                hashed.update(file.read(_CELL))
            return hashed.hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """As `Texts.documents`; of a larger file the complete lines inside cells from all over it."""
        if self.size <= limit:
            return list(self._parse(0, self.path.read_bytes())), True
        documents: list[Document] = []
        drawn = permutation(-(-self.size // _CELL), self.seed)[: max(1, limit // _CELL)]
        with self.path.open("rb") as file:
            for cell in sorted(drawn.tolist()):
                file.seek(cell * _CELL)
                raw = file.read(_CELL)
                # The first and the last line may be cut: they belong to lines that begin or end elsewhere.
                first, last = 0 if cell == 0 else raw.find(b"\n") + 1, raw.rfind(b"\n") + 1
                if first < last:
                    documents += self._parse(cell * _CELL + first, raw[first:last])
        return documents, False

    def parts(self) -> tuple[int, Iterator[list[Document]]]:
        """As `Texts.parts`: the documents that begin in each cell, lines of a .jsonl or a stretch of a .txt."""
        # Enough cells that a shuffle of them mixes the file, and few enough that each has some documents.
        size = max(_SMALLEST_CELL, min(_CELL, self.size // _CELLS))
        order = permutation(-(-self.size // size), self.seed).tolist()

        def documents(cell: int) -> list[Document]:
            # Every byte is in one cell: a cell ends where the next one begins.
            start, stop = (self._boundary(number * size, size) for number in (cell, cell + 1))
            with self.path.open("rb") as file:
                file.seek(start)
                raw = file.read(stop - start)
            return list(self._parse(start, raw)) if raw else []

        return len(order), map(documents, order)

    def _boundary(self, offset: int, size: int) -> int:
        """The beginning of the first line at or after ``offset``."""
        if offset == 0:
            return 0
        with self.path.open("rb") as file:
            file.seek(offset - 1)
            if self.path.suffix == _ROWS:
                file.readline()
                return file.tell()
            raw = file.read(size)
        skipped = raw.find(b"\n") + 1
        # A line of a .txt that is longer than a cell is cut between two characters.
        if not skipped:
            skipped = 1
            while skipped < len(raw) and raw[skipped] & 0xC0 == 0x80:
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
                f"{self.path}, line {line_at(start + error.start)}: byte 0x{raw[error.start]:02x} is not UTF-8; "
                "convert the file to UTF-8"
            ) from None
        if self.path.suffix != _ROWS:
            yield Document(text)
            return
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                try:
                    yield _document_of(line, self.render)
                except ValueError as error:
                    place = f"{self.path}, line {line_at(start) + number}"
                    raise InputError(f"{place}: {error}; each line must be {_ROW}") from error


Corpus = Texts | TextFile


def check_sources(specs: Iterable[str], option: str = "calibration") -> None:
    """Raises InputError when a file or dataset that ``option`` names does not exist, or cannot be read as text."""
    for spec in specs:
        path = Path(spec)
        if not path.is_file():
            if path.suffix in (".txt", _ROWS) and not path.is_dir():
                raise InputError(f"{opt(option)}: no file {spec}")
            if find_spec("datasets") is None:
                actual = "a folder" if path.is_dir() else "no file"
                raise InputError(
                    f"{opt(option, spec)}: {actual}, and datasets, by name or in a folder, need the datasets package: "
                    f"pip install 'kvfold[data]'; give {_KINDS}"
                )
            continue
        try:
            with path.open("rb") as file:
                beginning = file.read(_SNIFFED)
        except OSError as error:
            raise InputError(f"{opt(option, path)}: cannot be read ({error.strerror}): check its permissions") from None
        if not beginning:
            raise InputError(f"{opt(option, path)}: the file is empty; give one with text in it")
        # Plain text may have any suffix. Faults within a .txt or .jsonl are told with their line when it is read.
        if path.suffix in (".txt", _ROWS):
            continue
        if path.suffix == ".json":
            raise InputError(f"{opt(option, path)}: a .json file; write {_ROW} on each line and name it .jsonl")
        try:
            # A character may be cut at the end.
            codecs.getincrementaldecoder("utf-8")().decode(beginning)
            is_text = b"\0" not in beginning
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise InputError(f"{opt(option, path)}: no UTF-8 text; give {_KINDS}")


def open_corpus(
    spec: str | None, render: Render, seed: int, split: Split = "calibration", option: str = "calibration"
) -> Corpus:
    """The corpus that ``option`` names; None is that split of the built-in text. Raises InputError for a bad name."""
    if spec is None:
        from kvfold.convert.data import read_documents

        name = BUILT_IN if split == "calibration" else f"{BUILT_IN}, the part that no conversion reads"
        texts = read_documents(split)
        size = sum(len(text.encode()) for text in texts)
        return Texts(name, "\f".join(texts), lambda: map(Document, texts), size, len(texts))
    check_sources([spec], option)
    path = Path(spec)
    if path.is_file():
        return TextFile(portable_name(path), path, render, seed)
    name = path.name if path.exists() else spec
    return Texts(f"dataset {name}", spec, partial(_dataset_documents, spec, render, seed, option))


def _dataset_documents(spec: str, render: Render, seed: int, option: str) -> Iterator[Document]:
    """The train split of a dataset on the hub or in a folder: ``NAME`` or ``NAME:CONFIG``."""
    import datasets

    name, _, config = spec.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
    except Exception as error:  # datasets raises many kinds, all about the request
        reason = f"no file, and no dataset that loads ({first_line(error)})"
        raise InputError(f"{opt(option, spec)}: {reason}; give {_KINDS}") from error
    for number, row in enumerate(rows.shuffle(seed=seed, buffer_size=1000)):
        try:
            yield _document_of(row, render)
        except ValueError as error:
            raise InputError(f"{opt(option, spec)}, row {number}: {error}; each row must be {_ROW}") from error


def _document_of(row: Any, render: Render) -> Document:
    """The document in a row of a dataset, or in a line of JSON. Raises ValueError that says what is wrong with it."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    fields = row if isinstance(row, Mapping) else {}
    if isinstance(text := fields.get("text"), str):
        document = Document(text)
    elif isinstance(messages := fields.get("messages"), list):
        try:
            document = Document(render(messages), rendered=True)
        except Exception as error:  # templates are code of the checkpoint's author and raise anything
            reason = first_line(error)
            raise ValueError(f"the tokenizer's chat template does not take these messages ({reason})") from error
    else:
        keys = ", ".join(key if key.isprintable() else short(key) for key in map(str, fields))
        named = f"the fields {keys}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"no text in {named}")
    # No tokenizer could read half of a surrogate pair.
    check_unicode(document.text)
    return document


def permutation(count: int, seed: int) -> "Tensor":
    """The numbers below ``count`` in the order that the seed draws, ``[count]``."""
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
