"""Sequences of tokens cut from text: each begins with the tokenizer's prefix, and none overlaps another."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, opt
from kvfold.convert.request import held_out_count
from kvfold.convert.text.corpus import Corpus, Split, open_corpus, permutation
from kvfold.convert.text.tokenizer import prefix_tokens, render, tokenize

# Bytes of a text that are read first: several times what most tokenizers need, as windows are drawn from all of it.
_READ_AT_LEAST = 2 << 20
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class CalibrationTokens:
    """``calibration [N, T]``, ``held_out [M, T]`` and ``further [K, T]``, int64, which share no stretch of text.

    ``source`` is the name of the text for users; ``digest`` is the text's SHA-256 (the name's, for a dataset).
    ``further`` sequences are for training that takes more than the calibration sequences; there may be none.
    """

    calibration: Tensor
    held_out: Tensor
    source: str
    digest: str
    further: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))

    @property
    def training(self) -> Tensor:
        """The calibration sequences and the further ones, ``[N + K, T]``."""
        return torch.cat([self.calibration, self.further]) if len(self.further) else self.calibration


def load_calibration(
    spec: str | Sequence[str] | None,
    tokenizer: Any,
    samples: int,
    seq_len: int,
    seed: int = 0,
    held_out: int | None = None,
    split: Split = "calibration",
    option: str = "calibration",
    further: int = 0,
) -> CalibrationTokens:
    """Draw ``samples`` calibration sequences of ``seq_len`` tokens and ``held_out`` others (``held_out_count``).

    After them ``further`` ones, or as many as the text has that was read for the others.

    ``spec`` is a file of plain text (one document), a .jsonl file (``text`` or ``messages`` per line), the name of a
    dataset, or None for a ``split`` of the text that ships with kvfold. Several give equal shares of each part, in an
    order drawn from the seed. No sequence crosses a document's end, except that documents shorter than a sequence, and
    what is left of longer ones, are packed with the tokenizer's EOS token between them where it has one.
    Raises InputError, which names the ``option`` that gave ``spec``, for text that is unreadable or too short.
    """
    counts = samples, held_out_count(samples) if held_out is None else held_out, further
    specs = [spec] if spec is None or isinstance(spec, str) else spec
    if len(specs) > samples:
        raise InputError(
            f"{opt('samples', samples)}: each of {len(specs)} {opt(option)} must give one at least; raise it to "
            f"{len(specs)}"
        )
    names, digests, parts = [], [], []
    for number, each in enumerate(specs):
        corpus = open_corpus(each, partial(render, tokenizer), seed, split, option)
        # Shares that differ by 1 at most.
        own = [count // len(specs) + (number < count % len(specs)) for count in counts]
        drawn = _draw(corpus, tokenizer, sum(own[:2]), sum(own), seq_len, seed)
        parts.append(torch.tensor_split(drawn, [own[0], sum(own[:2])]))
        names.append(corpus.name)
        digests.append(corpus.digest())
    mixed = [torch.cat(each) for each in zip(*parts, strict=True)]
    if specs is spec:
        mixed = [each[permutation(len(each), seed)] for each in mixed]
        digests = [hashlib.sha256(" ".join(digests).encode()).hexdigest()]
    return CalibrationTokens(mixed[0], mixed[1], " + ".join(names), digests[0], mixed[2])


def _draw(corpus: Corpus, tokenizer: Any, needed: int, wanted: int, seq_len: int, seed: int) -> Tensor:
    """``wanted`` sequences of one text, or as many as there are in what is read to have those ``needed``."""
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64)
    if seq_len <= len(prefix):
        raise InputError(
            f"{opt('seq_len', seq_len)}: must exceed the {len(prefix)} tokens that begin every text; raise it"
        )
    # Bytes per token are unknown before tokenizing, so more is read until there is enough, or nothing is left.
    limit = max(_READ_AT_LEAST, needed * seq_len * _BYTES_PER_TOKEN)
    while True:
        documents, complete = corpus.documents(limit)
        tokens = list(tokenize(tokenizer, prefix.tolist(), documents))
        windows = cut(tokens, seq_len - len(prefix), tokenizer.eos_token_id)
        if len(windows) >= needed:
            break
        if complete:
            found = f"{sum(map(len, tokens))} tokens in {len(tokens)} document{'s' * (len(tokens) != 1)}"
            if tokenizer.eos_token_id is None and len(tokens) > 1:
                found += ", which cannot be packed as the tokenizer has no EOS token"
            raise InputError(
                f"{corpus.name}: too little text, {len(windows)} of {needed} sequences of {seq_len} tokens ({found}); "
                f"give more text, or lower {opt('samples')} or {opt('seq_len')}"
            )
        limit *= 4
    drawn = windows[permutation(len(windows), seed)[:wanted]]
    return torch.cat([prefix.expand(len(drawn), -1), drawn], dim=1)


def cut(documents: list[Tensor], length: int, eos: int | None) -> Tensor:
    """Windows of ``length`` tokens ``[n, length]``: first out of each document, then out of the packed rests."""
    windows = [document[: len(document) // length * length].view(-1, length) for document in documents]
    rests = [document[len(document) // length * length :] for document in documents]
    rests = [rest for rest in rests if len(rest)]
    if eos is not None and rests:
        end = torch.tensor([eos], dtype=torch.int64)
        packed = torch.cat([part for rest in rests for part in (rest, end)])
        windows.append(packed[: len(packed) // length * length].view(-1, length))
    return torch.cat(windows) if windows else torch.empty(0, length, dtype=torch.int64)


def check_seq_len(seq_len: int, positions: int, model: str) -> None:
    """Raise InputError when a sequence of ``seq_len`` tokens is longer than the ``positions`` of ``model``."""
    if seq_len > positions:
        name = opt("seq_len")
        raise InputError(
            f"{opt('seq_len', seq_len)}: longer than the {positions} positions that {model} is made for; lower {name}"
        )
