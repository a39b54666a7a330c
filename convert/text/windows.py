"""Calibration text as sequences of tokens, each begun as the tokenizer begins a text, none overlapping another."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.text.documents import BUILT_IN, Corpus, Document, Split, open_corpus

__all__ = ["BUILT_IN", "CalibrationTokens", "held_out_count", "load_calibration"]

_BLOCK = 1 << 16  # characters; a tokenizer's own records take many times the text, so few go in at once
_BLOCKS_AT_ONCE = 8
_READ_AT_LEAST = 2 << 20
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class CalibrationTokens:
    """``calibration [N, T]`` and ``held_out [M, T]``, int64, which share no stretch of text.

    ``source`` tells a person where they are from; ``digest`` is the SHA-256 of that text (of the name, for a dataset).
    """

    calibration: Tensor
    held_out: Tensor
    source: str
    digest: str


def held_out_count(samples: int) -> int:
    """How many sequences are kept aside beside ``samples``: an eighth, at least 8."""
    return max(8, math.ceil(samples / 8))


def load_calibration(
    spec: str | None,
    tokenizer: Any,
    samples: int,
    seq_len: int,
    seed: int = 0,
    kept_aside: int | None = None,
    split: Split = "calibration",
    option: str = "--calibration",
) -> CalibrationTokens:
    """Draw ``samples`` sequences of ``seq_len`` tokens to calibrate on, and ``kept_aside`` others (``held_out_count``).

    ``spec`` is a .txt file (one document), a .jsonl file (``text`` or ``messages`` per line), the name of a dataset, or
    None for a ``split`` of the text that ships with kvfold. No sequence crosses a document's end, except that
    documents shorter than a sequence, and what is left of longer ones, are packed with the tokenizer's EOS token
    between them where it has one.
    Raises InputError, which names the ``option`` that gave ``spec``, for text that is unreadable or too short.
    """
    wanted = samples + (held_out_count(samples) if kept_aside is None else kept_aside)
    prefix = prefix_tokens(tokenizer)
    if seq_len <= len(prefix):
        raise InputError(
            f"--seq-len: expected more than the {len(prefix)} tokens that begin every text, found {seq_len}"
        )
    corpus = open_corpus(spec, renderer(tokenizer), seed, split, option)
    windows = _enough_windows(corpus, tokenizer, prefix, seq_len, wanted)
    drawn = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:wanted]]
    tokens = torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(wanted, -1), drawn], dim=1)
    return CalibrationTokens(tokens[:samples], tokens[samples:], corpus.name, corpus.digest())


def prefix_tokens(tokenizer: Any) -> list[int]:
    """What ``add_special_tokens`` puts before a text (BOS for Llama and Gemma, nothing for GPT-2)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return list(special[:start])
    return []


def _enough_windows(corpus: Corpus, tokenizer: Any, prefix: list[int], seq_len: int, wanted: int) -> Tensor:
    """``wanted`` windows ``[n, seq_len - len(prefix)]`` or more: text is read until there are, or none is left."""
    limit = max(_READ_AT_LEAST, wanted * seq_len * _BYTES_PER_TOKEN)
    while True:
        documents, whole = corpus.documents(limit)
        tokens = [document_tokens(tokenizer, prefix, document) for document in documents]
        windows = cut(tokens, seq_len - len(prefix), tokenizer.eos_token_id)
        if len(windows) >= wanted:
            return windows
        if whole:
            raise _too_little(corpus, tokenizer, sum(map(len, tokens)), len(tokens), len(windows), seq_len, wanted)
        limit *= 4


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


def document_tokens(tokenizer: Any, prefix: list[int], document: Document) -> Tensor:
    """A document's tokens without special ones at its start (a chat template writes its own BOS)."""
    ids: list[int] = []
    blocks = list(_blocks(document.text))
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = blocks[start : start + _BLOCKS_AT_ONCE]
        ids += chain.from_iterable(tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"])
    if document.rendered and prefix and ids[: len(prefix)] == prefix:
        ids = ids[len(prefix) :]
    return torch.tensor(ids, dtype=torch.int64)


def _blocks(text: str) -> Iterator[str]:
    """``text`` in pieces of about ``_BLOCK`` characters, cut before a line break or space where there is one."""
    start = 0
    while start < len(text):
        stop = start + _BLOCK
        if stop < len(text):
            at = max(text.rfind("\n", start + _BLOCK // 2, stop), text.rfind(" ", start + _BLOCK // 2, stop))
            stop = at if at > start else stop
        yield text[start:stop]
        start = stop


def renderer(tokenizer: Any) -> Any:
    """What turns ``messages`` into text: the tokenizer's chat template. It raises ValueError where there is none."""

    def render(messages: list[Mapping[str, Any]]) -> str:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("it has none; give rows with `text` instead")
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        return text

    return render


def _too_little(
    corpus: Corpus, tokenizer: Any, tokens: int, documents: int, windows: int, seq_len: int, wanted: int
) -> InputError:
    message = (
        f"{corpus.name}: too little text: {wanted} sequences of {seq_len} tokens need {wanted * seq_len} tokens, "
        f"found {tokens} in {documents} document{'s' * (documents != 1)}, enough for {windows} sequences"
    )
    if tokenizer.eos_token_id is None and documents > 1:
        message += " (short documents cannot be packed: the tokenizer has no EOS token)"
    return InputError(f"{message}; give more text, or lower --samples or --seq-len")
