"""Training text in numbered blocks, read as they are needed: no file is held in memory.

A file is cut into cells at line breaks. Some cells, drawn by the seed, are kept aside to evaluate on; the rest are read
in an order that is drawn anew for every pass, a few megabytes at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from kvfold.convert.errors import InputError
from kvfold.convert.text.documents import Document, Render, dataset_documents, parse_stretch

BLOCK = 4 << 20  # bytes; what is shuffled at once, so a batch is from many places of the text
_CELL = 1 << 18
_SMALLEST_CELL = 1 << 12
_CELLS = 64  # at least so many in a file that is large enough

Enough = Callable[[list[Document]], bool]


class TrainingText(Protocol):
    """Documents in blocks ``0, 1, ...`` without end, the same whoever asks for them and in whatever order."""

    @property
    def name(self) -> str:
        """Where they are from, for a person to read, without a machine's paths."""
        ...

    @property
    def blocks_per_pass(self) -> int | None:
        """After so many blocks the text begins anew; None where that is not known beforehand."""
        ...

    def blocks(self, start: int) -> Iterator[list[Document]]: ...

    def keep_aside(self, enough: Enough, share: int) -> tuple[list[Document], "TrainingText"]:
        """Documents until there are enough, at most one part in ``share`` of a file, and the text without those."""
        ...


def open_text(spec: str, render: Render, seed: int, option: str = "--text") -> TrainingText:
    """A .txt file (one document), a .jsonl file (``text`` or ``messages`` per line) or the name of a dataset.

    Raises InputError that names ``option`` when there is no such file.
    """
    path = Path(spec)
    if path.suffix in (".txt", ".jsonl"):
        if not path.is_file():
            raise InputError(f"{option}: no file {spec}")
        size = path.stat().st_size
        cell = max(_SMALLEST_CELL, min(_CELL, size // _CELLS))
        order = torch.randperm(-(-size // cell), generator=torch.Generator().manual_seed(seed)).tolist()
        return FileText(path, render, seed, cell, tuple(order))
    if path.is_file():
        raise InputError(f"{option} {spec}: expected a .txt or .jsonl file or the name of a dataset")
    return DatasetText(spec, render, seed, option)


@dataclass(frozen=True)
class FileText:
    """``cells`` are the numbers of those that may be read, each a stretch of about ``cell`` bytes."""

    path: Path
    render: Render
    seed: int
    cell: int
    cells: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def blocks_per_pass(self) -> int:
        return max(1, round(len(self.cells) * self.cell / BLOCK))

    def blocks(self, start: int) -> Iterator[list[Document]]:
        number = start
        while True:
            turn, part = divmod(number, self.blocks_per_pass)
            generator = torch.Generator().manual_seed(self.seed + turn)
            order = torch.randperm(len(self.cells), generator=generator).tolist()
            bounds = [len(order) * i // self.blocks_per_pass for i in (part, part + 1)]
            yield [document for i in order[slice(*bounds)] for document in self.documents(self.cells[i])]
            number += 1

    def keep_aside(self, enough: Enough, share: int) -> tuple[list[Document], TrainingText]:
        kept: list[Document] = []
        count = 0
        for cell in self.cells[: len(self.cells) // share]:
            kept += self.documents(cell)
            count += 1
            if enough(kept):
                break
        return kept, replace(self, cells=self.cells[count:])

    def documents(self, cell: int) -> list[Document]:
        """What begins in a cell: lines, or the stretch of a .txt."""
        with self.path.open("rb") as file:
            start, stop = (self._boundary(file, number) for number in (cell, cell + 1))
            file.seek(start)
            raw = file.read(stop - start)
        return list(parse_stretch(self.path, self.render, start, raw)) if raw else []

    def _boundary(self, file: "_Bytes", cell: int) -> int:
        """Where the first line of ``cell`` begins. A line of a .txt that fills a cell is cut between two characters."""
        if cell == 0:
            return 0
        file.seek(cell * self.cell - 1)
        if self.path.suffix == ".jsonl":
            file.readline()
            return file.tell()
        raw = file.read(self.cell)
        found = raw.find(b"\n") + 1
        if not found:
            found = 1
            while found < len(raw) and raw[found] & 0xC0 == 0x80:
                found += 1
        return cell * self.cell - 1 + found


class _Bytes(Protocol):
    def seek(self, offset: int) -> int: ...
    def tell(self) -> int: ...
    def read(self, size: int) -> bytes: ...
    def readline(self) -> bytes: ...


@dataclass(frozen=True)
class DatasetText:
    """Rows of a dataset as they stream in, the same order in every pass; the first ``skipped`` are kept aside."""

    spec: str
    render: Render
    seed: int
    option: str
    skipped: int = 0

    @property
    def name(self) -> str:
        return f"dataset {Path(self.spec).name if Path(self.spec).exists() else self.spec}"

    @property
    def blocks_per_pass(self) -> None:
        return None

    def blocks(self, start: int) -> Iterator[list[Document]]:
        return islice(self._all_blocks(), start, None)

    def keep_aside(self, enough: Enough, share: int) -> tuple[list[Document], TrainingText]:
        kept: list[Document] = []
        for document in self._documents():
            kept.append(document)
            if enough(kept):
                break
        return kept, replace(self, skipped=self.skipped + len(kept))

    def _documents(self) -> Iterator[Document]:
        return islice(dataset_documents(self.spec, self.render, self.seed, self.option), self.skipped, None)

    def _all_blocks(self) -> Iterator[list[Document]]:
        while True:
            block: list[Document] = []
            size = 0
            for document in self._documents():
                block.append(document)
                size += len(document.text)
                if size >= BLOCK:
                    yield block
                    block, size = [], 0
            yield block
