"""Documents of a file of text or .jsonl rows.

A file is read in cells: stretches of about equal size between two line breaks, in an order drawn from the seed. What a
run does not need of a large file is not read.

Files do not go through ``datasets`` (``load_dataset("json", data_files=..., streaming=True)``): the package is an extra
that plain installs lack, its streams shuffle a buffer of rows rather than the whole file, and its errors do not name
the line at fault.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvfold.convert.checkpoint.json_text import portable_name
from kvfold.convert.errors import InputError
from kvfold.convert.text.rows import Document, Render, document_of, json_row
from kvfold.convert.text.sources import ROWS

_CELL = 1 << 18  # bytes
_SMALLEST_CELL = 1 << 12
_CELLS = 64  # least number of cells of a file to train on, where they are no smaller than _SMALLEST_CELL
_LARGEST_WHOLE = 1 << 28  # bytes: a larger file's fingerprint is of _CELLS cells, 16 MiB


@dataclass(frozen=True)
class TextFile:
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
                    yield document_of(json_row(row), self.render)
                except ValueError as error:
                    raise InputError(f"{self.path}, line {self._line(start) + number}: {error}") from error

    def _line(self, offset: int) -> int:
        with self.path.open("rb") as file:
            return 1 + file.read(offset).count(b"\n")
