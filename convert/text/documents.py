"""Where calibration text comes from: a .txt or .jsonl file, a ``datasets`` name, or the text that ships with kvfold.

Files larger than what a run can use are not read whole: stretches are taken from all over them, chosen by the seed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from kvfold.convert.errors import InputError

_CELL = 1 << 18
BUILT_IN = "the built-in standard-library text"


@dataclass(frozen=True)
class Document:
    """A text to calibrate on. ``rendered`` says that a chat template made it, special tokens included."""

    text: str
    rendered: bool = False


class Corpus(Protocol):
    """Documents to draw from."""

    @property
    def name(self) -> str:
        """Where they are from, for a person to read, without a machine's paths."""
        ...

    def digest(self) -> str:
        """SHA-256 that tells this text from others."""
        ...

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents of about ``limit`` bytes or more, and whether these are all."""
        ...


Render = Callable[[list[Mapping[str, Any]]], str]
Split = Literal["calibration", "heldout"]


def open_corpus(
    spec: str | None, render: Render, seed: int, split: Split = "calibration", option: str = "--calibration"
) -> Corpus:
    """The corpus that ``option`` names; None is that split of the built-in text."""
    if spec is None:
        from kvfold.convert.data import read_documents

        return _Memory(BUILT_IN, [Document(text) for text in read_documents(split)])
    path = Path(spec)
    if path.suffix in (".txt", ".jsonl") and not path.is_dir():
        if not path.is_file():
            raise InputError(f"{option}: no file {spec}")
        return _File(path, render, seed)
    if path.is_file():
        raise InputError(f"{option} {spec}: expected a .txt or .jsonl file or the name of a dataset")
    return _Dataset(spec, render, seed, option)


def parse_stretch(path: Path, render: Render, start: int, raw: bytes) -> Iterator[Document]:
    """The documents in ``raw``, whole lines that begin at byte ``start`` of a .txt or .jsonl file."""
    return _File(path, render, 0)._parse(start, raw)


def dataset_documents(spec: str, render: Render, seed: int, option: str) -> Iterator[Document]:
    """Every document of a dataset in an order that ``seed`` draws; errors name ``option``."""
    return (document for document, _ in _Dataset(spec, render, seed, option).stream())


@dataclass(frozen=True)
class _Memory:
    name: str
    texts: list[Document]

    def digest(self) -> str:
        joined = "\f".join(document.text for document in self.texts)
        return hashlib.sha256(joined.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        return self.texts, True


@dataclass(frozen=True)
class _File:
    """A .txt is one document; every line of a .jsonl is one."""

    path: Path
    render: Render
    seed: int

    @property
    def name(self) -> str:
        return self.path.name

    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        size = self.path.stat().st_size
        whole = size <= limit
        documents: list[Document] = []
        for start, raw in _stretches(self.path, size, limit, self.seed):
            documents += self._parse(start, raw)
        return documents, whole

    def _parse(self, start: int, raw: bytes) -> Iterator[Document]:
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            line = self._line(start + error.start)
            raise InputError(
                f"{self.path}, line {line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}; "
                "convert the file to UTF-8"
            ) from None
        if self.path.suffix == ".txt":
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
    option: str = "--calibration"

    @property
    def name(self) -> str:
        return f"dataset {Path(self.spec).name if Path(self.spec).exists() else self.spec}"

    def digest(self) -> str:
        return hashlib.sha256(self.spec.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        documents: list[Document] = []
        for document, size in self.stream():
            documents.append(document)
            if size >= limit:
                return documents, False
        return documents, True

    def stream(self) -> Iterator[tuple[Document, int]]:
        """Each document, and how many characters there were up to its end."""
        size = 0
        for number, row in enumerate(self._rows()):
            try:
                document = _document(row, self.render)
            except ValueError as error:
                raise InputError(f"{self.option} {self.spec}, row {number}: {error}") from error
            size += len(document.text)
            yield document, size

    def _rows(self) -> Iterable[Any]:
        try:
            import datasets
        except ImportError:
            raise InputError(
                f"{self._found()}, and datasets, by name or in a folder, need the datasets package: "
                "pip install 'kvfold[data]'"
            ) from None
        name, _, config = self.spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about what was asked for
            reason = str(error).strip().split("\n")[0]
            raise InputError(f"{self._found()}, and no dataset: {reason}") from error
        shuffled: Iterable[Any] = rows.shuffle(seed=self.seed, buffer_size=1000)
        return shuffled

    def _found(self) -> str:
        found = f"{self.option} {self.spec}: expected a .txt or .jsonl file or the name of a dataset, found"
        return f"{found} a folder" if Path(self.spec).is_dir() else f"{found} no such file"


def _stretches(path: Path, size: int, limit: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """The file, or whole lines of ``limit`` bytes of it from places that the seed chooses, each with its offset."""
    with path.open("rb") as file:
        if size <= limit:
            yield 0, file.read()
            return
        cells = -(-size // _CELL)
        order = torch.randperm(cells, generator=torch.Generator().manual_seed(seed))
        for cell in sorted(order[: max(1, limit // _CELL)].tolist()):
            file.seek(cell * _CELL)
            raw = file.read(_CELL)
            first = 0 if cell == 0 else raw.find(b"\n") + 1
            last = raw.rfind(b"\n") + 1
            if first < last:
                yield cell * _CELL + first, raw[first:last]


def _json(row: str) -> Any:
    try:
        return json.loads(row)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found invalid JSON: {error.msg}") from None


def _document(row: Any, render: Render) -> Document:
    """What a row of a data set holds. Raises ValueError that says what was expected."""
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str):
            return Document(row["text"])
        if isinstance(row.get("messages"), list):
            return Document(_rendered(row["messages"], render), rendered=True)
    found = f"the fields {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    raise ValueError(f"expected an object with a string `text` or a list `messages`, found {found}")


def _rendered(messages: list[Mapping[str, Any]], render: Render) -> str:
    try:
        return render(messages)
    except Exception as error:  # templates are code of the checkpoint's author and raise what they like
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"the tokenizer's chat template does not take these messages: {reason}") from error
