"""The sequences of a run as one file of tokens, made once and read through a memory map.

A run knows how many tokens it needs. Documents, in an order drawn from the seed, are tokenized, begun by the
tokenizer's prefix, ended by its EOS token, laid end to end and cut into sequences. The first ``M`` sequences are held
out, the next ``n`` are trained on; no document is in both parts. Sequence ``i`` of the run is number ``p_e(i - e n)``
of the ``n``, where ``p_e`` is the permutation of epoch ``e = i // n``: the order depends neither on the number of
processes nor on interruptions.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kvfold.convert.errors import InputError, opt
from kvfold.convert.text.corpus import Corpus
from kvfold.convert.text.tokenizer import check_vocabulary, prefix_tokens, tokenize
from kvfold.convert.text.windows import cut

_TOKENS, _RECORD = "tokens.bin", "tokens.json"
_TOKEN_BYTES = 4  # int32
# At most a fifth of a file is held out: a choice.
_LARGEST_SHARE = 5


@dataclass(frozen=True)
class TokenPlan:
    """The tokens of a run: ``training`` and ``held_out`` sequences of ``length`` tokens, and where they are from.

    Held-out sequences are from ``eval_text``, or else from ``text`` itself. Tokens are below ``vocabulary``, that of
    ``model``.
    """

    text: Corpus
    eval_text: Corpus | None
    tokenizer: Any
    model: str
    vocabulary: int
    length: int
    training: int
    held_out: int
    seed: int

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file of tokens takes at most: a text that is shorter than planned has a token per byte."""
        planned = self.training * self.length
        training = planned if self.text.size is None else min(planned, self.text.size)
        return _TOKEN_BYTES * (self.held_out * self.length + training)

    def made_from(self) -> dict[str, Any]:
        """Everything that decides the tokens, as JSON; texts by name, size and digest."""
        texts = [
            None if text is None else [text.name, text.size, text.digest(sampled=True)]
            for text in (self.text, self.eval_text)
        ]
        numbers = {name: getattr(self, name) for name in ("vocabulary", "length", "training", "held_out", "seed")}
        special = {"prefix": prefix_tokens(self.tokenizer), "eos": self.tokenizer.eos_token_id}
        return {"texts": texts, **numbers, **special}


@dataclass(frozen=True)
class RunTokens:
    """``training [n, T]``, n at most what was planned, and ``held_out [M, T]``, int32: views of a memory map."""

    training: Tensor
    held_out: Tensor


class TrainingOrder(Dataset[dict[str, Tensor]]):
    """All ``total`` sequences of a run, in order: ``sequences [n, T]`` in a new permutation per epoch."""

    def __init__(self, sequences: Tensor, total: int, seed: int) -> None:
        self._sequences, self._total, self._seed = sequences, total, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self._sequences))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 32) + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(len(self._sequences), generator=generator)
        return {"input_ids": self._sequences[self._permutation[place]].long()}


def open_tokens(plan: TokenPlan, folder: Path) -> RunTokens | None:
    """The tokens in ``folder``, or None when there are none made from the same text in the same way."""
    path, record = folder / _TOKENS, folder / _RECORD
    if not (path.is_file() and record.is_file()):
        return None
    try:
        written = json.loads(record.read_bytes())
        held_out, training, made_from = written["held_out"], written["training"], written["made_from"]
        shape = (held_out + training, plan.length)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if made_from != plan.made_from() or path.stat().st_size != _TOKEN_BYTES * shape[0] * shape[1]:
        return None
    tokens = torch.from_file(str(path), size=shape[0] * shape[1], dtype=torch.int32).view(shape)
    if tokens.numel() and (tokens.min() < 0 or tokens.max() >= plan.vocabulary):
        return None
    return RunTokens(training=tokens[held_out:], held_out=tokens[:held_out])


def make_tokens(plan: TokenPlan, folder: Path) -> None:
    """Tokenize the text into ``folder``, each file whole or not at all.

    A text that is shorter than planned gives all the sequences that it has. Raises InputError when it has none, when
    there is too little to hold out, or when the model does not know a token.
    """
    # Before the text is read: a later edit makes it another text.
    made_from = plan.made_from()
    held_out, training = _held_out(plan)
    count = _write(folder / _TOKENS, chain([held_out], training), plan.held_out + plan.training) - plan.held_out
    if not count:
        raise _too_short(plan.text, plan.length, 1)
    record = {"made_from": made_from, "held_out": plan.held_out, "training": count}
    replace_file(folder / _RECORD, [(json.dumps(record, indent=1) + "\n").encode()])


def _held_out(plan: TokenPlan) -> tuple[Tensor, Iterator[Tensor]]:
    """The held-out sequences ``[M, T]``, and those of all documents after the last one that they hold a part of."""
    if plan.eval_text is not None:
        held_out = _first(_sequences(plan, chain(*_documents(plan, plan.eval_text))), plan.held_out)
        if len(held_out) < plan.held_out:
            raise _too_short(plan.eval_text, plan.length, plan.held_out)
        return held_out, _sequences(plan, chain(*_documents(plan, plan.text)))
    first, others = _documents(plan, plan.text)
    held_out = _first(_sequences(plan, first), plan.held_out)
    if len(held_out) < plan.held_out:
        raise InputError(
            f"{plan.text.name}: too little text to hold out {plan.held_out} sequences of {plan.length} tokens for the "
            f"evaluation, found {len(held_out)}; give another text with {opt('eval_text')}, lower "
            f"{opt('eval_sequences')}, or use "
            f"{opt('eval_every', 0)}"
        )
    return held_out, _sequences(plan, chain(first, others))


def _documents(plan: TokenPlan, text: Corpus) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """The tokens of the documents that may be held out, all of a dataset, and those of the documents after them."""
    prefix = prefix_tokens(plan.tokenizer)
    count, parts = text.parts()
    some = islice(parts, None if count is None else count // _LARGEST_SHARE)
    first, others = (tokenize(plan.tokenizer, prefix, chain.from_iterable(part)) for part in (some, parts))
    return first, others


def _sequences(plan: TokenPlan, documents: Iterable[Tensor]) -> Iterator[Tensor]:
    """The documents' sequences ``[n, T]``, checked."""
    prefix, eos = prefix_tokens(plan.tokenizer), plan.tokenizer.eos_token_id
    for rows in packed(documents, prefix, eos, plan.length):
        check_vocabulary(rows, plan.vocabulary, plan.model)
        yield rows


def packed(documents: Iterable[Tensor], prefix: list[int], eos: int | None, length: int) -> Iterator[Tensor]:
    """Documents end to end, each with ``prefix`` before and ``eos`` after it, cut into sequences: some ``[n, length]``.

    Without an EOS token no sequence holds more than one document, and what is left of each is dropped.
    """
    begin = torch.tensor(prefix, dtype=torch.int64)
    end = torch.tensor([] if eos is None else [eos], dtype=torch.int64)
    rest = begin[:0]
    for document in documents:
        # A chat template may have ended the text already.
        ended = document[-1:].tolist() == [eos]
        stream = torch.cat([rest, begin, document, end[:0] if ended else end])
        rows = cut([stream], length, None)
        rest = stream[:0] if eos is None else stream[rows.numel() :]
        yield rows


def _first(sequences: Iterator[Tensor], count: int) -> Tensor:
    """The first ``count`` sequences, or all when there are fewer; no more documents are read than they take."""
    rows: list[Tensor] = []
    while sum(map(len, rows)) < count and (some := next(sequences, None)) is not None:
        rows.append(some)
    return torch.cat(rows)[:count] if rows else torch.empty(0, 0, dtype=torch.int64)


def _write(path: Path, sequences: Iterable[Tensor], most: int) -> int:
    """Write at most ``most`` sequences as int32; returns how many there were."""
    count = 0

    def parts() -> Iterator[bytes]:
        nonlocal count
        for rows in sequences:
            some = rows[: most - count].to(torch.int32)
            count += len(some)
            yield some.numpy().tobytes()
            if count == most:
                return

    replace_file(path, parts())
    return count


def _too_short(text: Corpus, length: int, count: int) -> InputError:
    needed = f"{count} sequence{'s' * (count > 1)} of {length} tokens"
    return InputError(
        f"{text.name}: too little text: expected at least {needed}; give more text or lower {opt('seq_len')}"
    )


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.writelines(parts)
    os.replace(part, path)
