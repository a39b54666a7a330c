"""Sources of documents: a text file, a dataset from the hub or in a folder, or the text that ships
with kvfold.

A file is read in cells, which are chunks of about equal size that begin and end at line breaks, in
a random order determined by the seed. For a large file, a run reads only the cells it needs.

Files are not read with ``datasets`` (``load_dataset("json", data_files=..., streaming=True)``):
that package is an optional dependency, its streams shuffle a buffer of rows rather than the whole
file, and its errors do not report the line at fault.
"""

# No torch at the top: commands check the names of texts before they load anything heavy.

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.checkpoint.files import check_unicode, portable_name
from kvfold.convert.errors import InputError, first_line, format_option, option_error, short
from kvfold.convert.request import SELF

if TYPE_CHECKING:
    from torch import Tensor

BUILT_IN = "the built-in standard-library text"
_ROWS_SUFFIX = ".jsonl"  # a file of rows; every other file is one document of plain text
_ROW = "an object with a string `text` or a list `messages`"
_KINDS = "a text file (UTF-8), a .jsonl file or the name of a dataset"
# What a chat model writes, in relation to the other texts: a third of all. Chosen, not tuned.
_WRITTEN = 0.5
# Chosen, not tuned: limits on time.
_SNIFFED = 1 << 16  # bytes of a file that must look like text
_CELL = 1 << 18  # bytes
_SMALLEST_CELL = 1 << 12
_CELLS = (
    64  # least number of cells of a file to train on, where they are no smaller than _SMALLEST_CELL
)
_LARGEST_WHOLE = 1 << 28  # bytes: of a larger file _CELLS cells are hashed, 16 MiB

TextSplit = Literal["calibration", "held_out"]
Render = Callable[[list[Mapping[str, Any]]], str]  # messages of a chat to text


@dataclass(frozen=True)
class Document:
    """A text. ``rendered`` is True if a chat template produced it, including the special tokens."""

    text: str
    rendered: bool = False


@dataclass(frozen=True)
class Texts:
    """The documents of the built-in text or of a dataset.

    ``name`` appears in messages and records and contains no local paths; ``each`` returns the
    documents. ``size`` (in bytes) and ``count`` are None for a dataset, because they are unknown
    until all of it is read. ``hashed`` is the string to hash: the built-in text, or the name of a
    dataset.
    """

    name: str
    hashed: str
    each: Callable[[], Iterable[Document]]
    size: int | None = None
    count: int | None = None

    def digest(self, sampled: bool = False) -> str:
        """The SHA-256 of the text, or of the name for a dataset. ``sampled`` is ignored."""
        return hashlib.sha256(self.hashed.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents with at least ``limit`` characters in total if possible, and True if these are
        all documents.
        """
        documents: list[Document] = []
        size = 0
        for document in self.each():
            if size >= limit:
                return documents, False
            documents.append(document)
            size += len(document.text)
        return documents, True

    def parts(self) -> tuple[int | None, Iterator[list[Document]]]:
        """The number of documents (None if unknown), and an iterator that yields each as a list of
        one document.
        """
        return self.count, ([document] for document in self.each())


@dataclass(frozen=True)
class TextFile:
    """A text file. Each line of a .jsonl file is a document; any other file is one document, or one
    per cell.
    """

    name: str
    path: Path
    render: Render
    seed: int

    @property
    def size(self) -> int:
        # Asked each time: an edit of the file while it is read must show in what its tokens were
        # made from.
        return self.path.stat().st_size

    def digest(self, sampled: bool = False) -> str:
        """The SHA-256 of the file; if ``sampled`` and the file is large, that of evenly spaced
        cells only.
        """
        with self.path.open("rb") as file:
            if not sampled or self.size <= _LARGEST_WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            hashed = hashlib.sha256()
            for cell in range(_CELLS):
                file.seek((self.size - _CELL) * cell // (_CELLS - 1))
                hashed.update(file.read(_CELL))
            return hashed.hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Like `Texts.documents`, but in bytes; a larger file yields the complete lines in randomly
        drawn cells.
        """
        if self.size <= limit:
            return list(self._parse(0, self.path.read_bytes())), True
        documents: list[Document] = []
        drawn = permutation(-(-self.size // _CELL), self.seed)[: max(1, limit // _CELL)]
        with self.path.open("rb") as file:
            for cell in sorted(drawn.tolist()):
                file.seek(cell * _CELL)
                raw = file.read(_CELL)
                # The first and the last line may be cut: they belong to lines that begin or end
                # elsewhere.
                first = 0 if cell == 0 else raw.find(b"\n") + 1
                last = raw.rfind(b"\n") + 1
                if first < last:
                    documents += self._parse(cell * _CELL + first, raw[first:last])
        return documents, False

    def parts(self) -> tuple[int, Iterator[list[Document]]]:
        """The number of cells, and an iterator over the lists of documents that begin in each cell,
        in random order.
        """
        # Enough cells that a shuffle of them mixes the file, and few enough that each has some
        # documents.
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
        """The start of a line at or after ``offset``, or of a character in a .txt line longer than
        ``size`` bytes.
        """
        if offset == 0:
            return 0
        with self.path.open("rb") as file:
            file.seek(offset - 1)
            if self.path.suffix == _ROWS_SUFFIX:
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
        """Parse the documents in ``raw``, the bytes of the file from offset ``start``."""

        def line_at(offset: int) -> int:
            with self.path.open("rb") as file:
                return 1 + file.read(offset).count(b"\n")

        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}, line {line_at(start + error.start)}: byte 0x{raw[error.start]:02x}"
                " is not UTF-8; convert the file to UTF-8"
            ) from None
        if self.path.suffix != _ROWS_SUFFIX:
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


def with_share(spec: str) -> tuple[str, float]:
    """The name and the share of a calibration text ``NAME:SHARE``; without a share it is 1. May
    raise InputError.

    Only the share of ``self`` may be 0.
    """
    name, _, share = spec.rpartition(":")
    number = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", share, re.ASCII)
    if (
        not name
        or Path(spec).exists()
        or (number is None and name != SELF and not Path(name).is_file())
    ):
        return spec, 1.0
    if number is None or not (float(share) or name == SELF):
        rule = (
            ": the share after the colon must be a decimal number above 0, such as 3 or 0.5, not"
            f" {share!r}"
        )
        raise option_error("calibration", spec, rule)
    return name, float(share)


def calibration_texts(given: Sequence[str], chats: bool) -> list[str | None]:
    """The calibration texts with their shares: those ``given``, or None for the text that ships.

    A model that ``chats`` also writes ``self:SHARE``, a third of the tokens, unless ``given`` names
    `SELF`.
    """
    shares = [with_share(text) for text in given]
    written = [share for name, share in shares if name == SELF]
    if any(written) and len(written) == len(given):
        return [SELF]
    others = [share for name, share in shares if name != SELF] or [1.0]
    share = sum(written) if written else chats * sum(others) * _WRITTEN
    texts: list[str | None] = [
        text for text, (name, _) in zip(given, shares, strict=True) if name != SELF
    ]
    return [*(texts or [None]), *([f"{SELF}:{share:g}"] if share else [])]


def check_sources(names: Iterable[str], option: str = "calibration") -> None:
    """Raise InputError if a file or dataset given with ``option`` does not exist or cannot be read
    as text.

    Of a .jsonl file the first line is parsed too, so that a file of another form is refused before
    models are read.
    """
    for name in names:
        if option == "calibration":
            name, _ = with_share(name)
            if name == SELF:
                continue
        if fault := _source_fault(Path(name)):
            raise option_error(option, name, fault)
        path = Path(name)
        if path.suffix == _ROWS_SUFFIX and path.is_file():
            with path.open("rb") as file:
                first = file.readline(_SNIFFED)
            if len(first) < _SNIFFED:
                list(TextFile(name, path, lambda messages: "", 0)._parse(0, first))


def _source_fault(path: Path) -> str | None:
    try:
        is_file = path.is_file()
    except OSError as error:  # too long a name
        return f": cannot be read ({error.strerror}); check the path"
    if not is_file:
        if path.suffix.partition(":")[0] in (".txt", _ROWS_SUFFIX) and not path.is_dir():
            return ": no such file; check the path"
        if find_spec("datasets") is not None:
            return None
        actual = "is a folder" if path.is_dir() else "is not a file"
        install = "install the datasets package: pip install 'kvfold[data]'"
        return (
            f"{actual}; to read a dataset by name or from a folder, {install}; otherwise give"
            f" {_KINDS}"
        )
    try:
        with path.open("rb") as file:
            beginning = file.read(_SNIFFED)
        # A character may be cut at the end.
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
        is_text = b"\0" not in beginning
    except OSError as error:
        return f": cannot be read ({error.strerror}); check its permissions"
    except UnicodeDecodeError:
        is_text = False
    if not beginning:
        return ": the file is empty; give a file that contains text"
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 4 * beginning.count(
        0
    ) > len(beginning):
        return (
            f": the file is not UTF-8 text (perhaps UTF-16); convert it to UTF-8, or give {_KINDS}"
        )
    if path.suffix == ".json":
        return f": .json is not supported; write {_ROW} on each line of a .jsonl file"
    # Plain text may have any suffix. Faults within a .txt or .jsonl are told with their line when
    # it is read.
    return (
        None
        if is_text or path.suffix in (".txt", _ROWS_SUFFIX)
        else f": the file is not UTF-8 text; give {_KINDS}"
    )


def check_seq_len(seq_len: int, positions: int | None, model: str) -> None:
    """Raise InputError if ``seq_len`` exceeds the ``positions`` supported by ``model``; None means
    any number.
    """
    if positions and seq_len > positions:
        exceeded = f"exceeds the {positions} positions supported by the model {model}"
        raise option_error("seq_len", seq_len, f"{exceeded}; use at most --seq-len {positions}")


def open_corpus(
    spec: str | None,
    render: Render,
    seed: int,
    split: TextSplit = "calibration",
    option: str = "calibration",
) -> Corpus:
    """Open the text ``spec`` given with ``option``; None means ``split`` of the built-in text. May
    raise InputError.
    """
    if spec is None:
        from kvfold.convert.data import read_documents

        name = (
            BUILT_IN if split == "calibration" else f"{BUILT_IN}, the part that no conversion reads"
        )
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
    """Read the train split of a dataset on the hub or in a folder; ``spec`` is ``NAME`` or
    ``NAME:CONFIG``.
    """
    import datasets

    name, _, config = spec.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
    except Exception as error:  # datasets raises many kinds, all about the request
        reason = f"not a file, and loading it as a dataset failed ({first_line(error)})"
        raise option_error(option, spec, f": {reason}; give {_KINDS}") from error
    for number, row in enumerate(rows.shuffle(seed=seed, buffer_size=1000)):
        try:
            yield _document_of(row, render)
        except ValueError as error:
            raise InputError(
                f"{format_option(option, spec)}, row {number}: {error}; each row must be {_ROW}"
            ) from error


def _document_of(row: Any, render: Render) -> Document:
    """The document in a dataset row or a line of JSON. Raises ValueError with the reason if there
    is none.
    """
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
        except InputError:
            raise
        except (
            Exception
        ) as error:  # templates are code of the checkpoint's author and raise anything
            reason = first_line(error)
            raise ValueError(f"the tokenizer cannot render the chat messages ({reason})") from error
    else:
        keys = ", ".join(short(str(key)) for key in fields) or "none"
        kind = f"a value of type {type(row).__name__}"
        raise ValueError(
            f"found {f'an object with these keys: {keys}' if isinstance(row, Mapping) else kind}"
        )
    # No tokenizer could read half of a surrogate pair.
    check_unicode(document.text)
    return document


def permutation(count: int, seed: int) -> "Tensor":
    """The integers below ``count`` in a random order determined by ``seed``, ``[count]``."""
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
