"""Packed sequences to train on: one order for a run, whatever the number of processes that share it.

Documents are tokenised, begun as the tokenizer begins a text, ended by its EOS token, laid end to end and cut. Blocks
of text are shuffled in themselves. Every process reads the same stream and takes its own part of each global batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from kvfold.convert.errors import InputError
from kvfold.convert.text.documents import Document
from kvfold.convert.text.tokenizer import check_vocabulary, document_tokens, prefix_tokens
from kvfold.convert.text.windows import cut
from kvfold.convert.uptrain.text import TrainingText

_ASIDE = 5  # at most a fifth of the text is kept aside
_FRUITLESS = 8  # blocks without a single sequence before a dataset counts as too short


@dataclass(frozen=True)
class Place:
    """Where a stream is: ``first`` sequences were in the blocks before ``block``, ``taken`` are behind it in all."""

    block: int = 0
    first: int = 0
    taken: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Share:
    """How a global batch is divided: ``total`` sequences a step, ``micro`` of them at once in each of ``world``."""

    total: int
    micro: int
    rank: int = 0
    world: int = 1

    @property
    def accumulation(self) -> int:
        return self.total // (self.world * self.micro)


def share_of(total: int, micro: int, rank: int, world: int) -> Share:
    """The largest division of a global batch with at most ``micro`` sequences at once.

    Raises InputError when ``total`` sequences cannot be divided over ``world`` processes.
    """
    if total % world:
        raise InputError(
            f"--batch-tokens: {total} sequences a step do not divide over {world} processes; "
            f"expected a multiple of {world} x --seq-len"
        )
    each = total // world
    return Share(total, max(n for n in range(1, min(micro, each) + 1) if each % n == 0), rank, world)


class PackedText(IterableDataset[dict[str, Tensor]]):
    """Micro-batches ``{"input_ids": [micro, T]}`` of one process, without end."""

    def __init__(
        self,
        text: TrainingText,
        tokenizer: Any,
        length: int,
        seed: int,
        share: Share,
        start: Place | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._text, self._tokenizer, self._length, self._seed = text, tokenizer, length, seed
        self._prefix = prefix_tokens(tokenizer)
        self._share, self._start, self._vocabulary = share, start or Place(), vocabulary
        self._firsts = [(self._start.block, self._start.first)]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        each = self._share.total // self._share.world
        mine = range(self._share.rank * each, (self._share.rank + 1) * each)
        rows: list[Tensor] = []
        for number, row in enumerate(self.sequences()):
            if number % self._share.total in mine:
                rows.append(row)
            if len(rows) == self._share.micro:
                yield {"input_ids": torch.stack(rows)}
                rows = []

    def sequences(self) -> Iterator[Tensor]:
        """Every sequence ``[T]`` from the start on, for all processes."""
        first, skip, fruitless = self._start.first, self._start.taken - self._start.first, 0
        for block, documents in enumerate(self._text.blocks(self._start.block), start=self._start.block):
            if block != self._start.block:
                self._firsts.append((block, first))
            windows = self._windows(block, documents)
            first += len(windows)
            fruitless = 0 if len(windows) else fruitless + 1
            if fruitless >= (self._text.blocks_per_pass or _FRUITLESS):
                raise too_short(self._text.name, self._length)
            yield from windows[skip:]
            skip = 0

    def place(self, taken: int) -> Place:
        """Where to start again after ``taken`` sequences, which this stream has already passed or reached."""
        block, first = max((entry for entry in self._firsts if entry[1] <= taken), key=lambda entry: entry[0])
        return Place(block, first, taken)

    def _windows(self, block: int, documents: Sequence[Document]) -> Tensor:
        """The sequences of a block ``[n, T]`` in the order of training; what is left at its end is dropped."""
        generator = torch.Generator().manual_seed((self._seed << 32) + block)
        order = torch.randperm(len(documents), generator=generator).tolist()
        windows = packed([documents[i] for i in order], self._tokenizer, self._prefix, self._length)
        if self._vocabulary is not None:
            check_vocabulary(windows, self._vocabulary, self._text.name)
        return windows[torch.randperm(len(windows), generator=generator)]


def packed(documents: Sequence[Document], tokenizer: Any, prefix: list[int], length: int) -> Tensor:
    """Documents end to end, each with ``prefix`` before and EOS after it, cut into ``[n, length]``.

    Without an EOS token no sequence holds more than one document, and what is left of each is dropped.
    """
    eos = tokenizer.eos_token_id
    start = torch.tensor(prefix, dtype=torch.int64)
    streams = [torch.cat([start, document_tokens(tokenizer, prefix, document)]) for document in documents]
    if eos is not None:
        end = torch.tensor([eos], dtype=torch.int64)
        ended = [stream if stream[-1:].tolist() == [eos] else torch.cat([stream, end]) for stream in streams]
        streams = [torch.cat(ended)] if ended else []
    return cut(streams, length, None)


def held_out(
    text: TrainingText, tokenizer: Any, length: int, count: int, whole: bool = False
) -> tuple[Tensor, TrainingText]:
    """``count`` sequences ``[count, length]`` to evaluate on, and the text without what they are from.

    At most a fifth of a file is taken, unless all of the text (``whole``) is there to be evaluated on.
    Raises InputError when that is too little.
    """
    prefix = prefix_tokens(tokenizer)
    tried, found = 0, torch.empty(0, length, dtype=torch.int64)

    def enough(documents: list[Document]) -> bool:
        nonlocal tried, found
        size = sum(len(document.text) for document in documents)
        if size < 1.2 * tried:
            return False  # tokenising is not free: look again when there is a fifth more
        tried, found = size, packed(documents, tokenizer, prefix, length)
        return len(found) >= count

    kept, rest = text.keep_aside(enough, 1 if whole else _ASIDE)
    if len(found) < count:
        found = packed(kept, tokenizer, prefix, length)
    if len(found) >= count:
        return found[:count], rest
    if whole:
        raise too_short(text.name, length, count)
    raise InputError(
        f"{text.name}: too little text to keep {count} sequences of {length} tokens aside for the evaluation, found "
        f"{len(found)}; give another text with --eval-text, lower --eval-sequences, or use --eval-every 0"
    )


def too_short(name: str, length: int, count: int = 1) -> InputError:
    """The error of a text with fewer than ``count`` sequences."""
    wanted = f"{count} sequence{'s' * (count > 1)} of {length} tokens"
    return InputError(f"{name}: too little text: expected at least {wanted}; give more text or lower --seq-len")
