"""Where documents come from: a file (files.py), a ``datasets`` name, or the text that ships with kvfold."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kvfold.convert.errors import InputError, first_line, opt
from kvfold.convert.text.files import TextFile
from kvfold.convert.text.rows import Document, Render, document_of
from kvfold.convert.text.sources import ROWS, check_source, missing_library, wrong_source

__all__ = ["BUILT_IN", "Corpus", "Document", "Render", "Split", "open_corpus"]

BUILT_IN = "the built-in standard-library text"
_NAMES = {"calibration": BUILT_IN, "held_out": f"{BUILT_IN}, the part that no conversion reads"}
Split = Literal["calibration", "held_out"]


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


def open_corpus(
    spec: str | None, render: Render, seed: int, split: Split = "calibration", option: str = "calibration"
) -> Corpus:
    """The corpus that ``option`` names; None is that split of the built-in text. Raises InputError for a bad name."""
    if spec is None:
        from kvfold.convert.data import read_documents

        return _Memory(_NAMES[split], [Document(text) for text in read_documents(split)])
    path = Path(spec)
    if path.is_file() or (path.suffix in (".txt", ROWS) and not path.is_dir()):
        check_source(spec, option)
        return TextFile(path, render, seed)
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
                yield document_of(row, self.render)
            except ValueError as error:
                raise InputError(f"{opt(self.option, self.spec)}, row {number}: {error}") from error

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
