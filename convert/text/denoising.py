"""Denoising tasks for encoder-decoders: spans of a text are taken out, and the decoder is to write what is missing.

Which task a model was trained on shows in its tokenizer:

span corruption, where there are sentinels ``<extra_id_0>``, ... (T5; Raffel et al. 2020, arXiv:1910.10683, 3.1.4)::

    text     a b c d e f g h            encoder  a b <0> e f g <1> </s>      decoder  <0> c d <1> h </s>

text infilling, where there is a mask (Bart; Lewis et al. 2020, arXiv:1910.13461, 2.2)::

    text     <s> a b c d e f g h </s>   encoder  <s> a b <mask> e f g <mask> </s>   decoder  <s> a b ... h </s>

15 % of the tokens are in spans for span corruption, 30 % for infilling, of 3 tokens on average. Spans and what lies
between them are a random division of both into as many parts, as in T5's ``random_spans_noise_mask``: so all sequences
have the same lengths, and none needs padding. Infilling by Bart draws lengths by Poisson's law instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.text.tokenizer import prefix_tokens, suffix_tokens
from kvfold.convert.text.windows import CalibrationTokens

_SPAN = 3.0  # tokens of a span, on average
_CORRUPTED, _INFILLED = 0.15, 0.3
LOSS = "denoising loss"


@dataclass(frozen=True)
class _Task:
    """``sentinels [n]``: what stands for each span; ``repeats``: the decoder writes the whole text, not just spans.

    ``start`` is the decoder's first token; ``prefix`` and ``suffix`` are around every text.
    """

    sentinels: Tensor
    share: float
    repeats: bool
    start: int
    prefix: Tensor
    suffix: Tensor


def denoising_tasks(
    tokens: CalibrationTokens, tokenizer: Any, config: Mapping[str, Any], seed: int
) -> CalibrationTokens:
    """Each sequence ``[T]`` as the encoder's tokens, ``encoded`` of them, then the decoder's, which predicts all but
    the first.

    The sequences stand between the tokenizer's prefix and suffix. Raises InputError for a tokenizer without sentinels
    and mask, and for sequences too short for a span.
    """
    task, generator = _task_of(tokenizer, config), torch.Generator().manual_seed(seed)
    made = {
        name: _corrupted(getattr(tokens, name), task, generator)
        for name in ("calibration", "held_out", "further")
        if len(getattr(tokens, name))
    }
    sequences: dict[str, Any] = {name: each for name, (each, _) in made.items()}
    return replace(tokens, encoded=next(iter(made.values()))[1], loss=LOSS, **sequences)


def _task_of(tokenizer: Any, config: Mapping[str, Any]) -> _Task:
    known = tokenizer.get_vocab()
    sentinels = [known[name] for name in (f"<extra_id_{number}>" for number in range(len(known))) if name in known]
    mask = getattr(tokenizer, "mask_token_id", None)
    if not sentinels and mask is None:
        raise InputError(
            "the tokenizer: expected sentinels (<extra_id_0>, ...) or a mask token, by which spans are taken out of "
            "the calibration text, found neither; use a method that reads no text"
        )
    start = config.get("decoder_start_token_id")
    return _Task(
        torch.tensor(sentinels or [mask]),
        _CORRUPTED if sentinels else _INFILLED,
        not sentinels,
        int(config.get("pad_token_id") or 0) if start is None else int(start),
        torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64),
        torch.tensor(suffix_tokens(tokenizer), dtype=torch.int64),
    )


def _corrupted(sequences: Tensor, task: _Task, generator: torch.Generator) -> tuple[Tensor, int]:
    """``[N, S + T]``, and ``S``, of whole ``sequences [N, length]``."""
    pairs = [_pair(sequence, task, generator) for sequence in sequences]
    return torch.stack([torch.cat(pair) for pair in pairs]), len(pairs[0][0])


def _pair(sequence: Tensor, task: _Task, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The encoder's and the decoder's tokens for one sequence."""
    text = sequence[len(task.prefix) : len(sequence) - len(task.suffix)]
    missing = max(1, round(task.share * len(text)))
    spans = max(1, round(missing / _SPAN))
    spans = spans if task.repeats else min(spans, len(task.sentinels))
    if len(text) < missing + spans:
        raise InputError(f"--seq-len: expected room for a span and what is around it, found {len(text)} tokens of text")
    lengths = zip(_divided(len(text) - missing, spans, generator), _divided(missing, spans, generator), strict=True)
    parts = torch.split(text, [length for both in lengths for length in both])  # kept, missing, kept, missing, ...
    marks = task.sentinels.expand(spans) if task.repeats else task.sentinels[:spans]
    encoded = _woven(parts[::2], [mark[None] for mark in marks])
    written = text if task.repeats else _woven([mark[None] for mark in marks], parts[1::2])
    start = torch.tensor([task.start])
    prefix = task.prefix if task.repeats else task.prefix[:0]
    return torch.cat([task.prefix, encoded, task.suffix]), torch.cat([start, prefix, written, task.suffix])


def _woven(first: Any, second: Any) -> Tensor:
    return torch.cat([part for both in zip(first, second, strict=True) for part in both])


def _divided(count: int, parts: int, generator: torch.Generator) -> list[int]:
    """``count`` as a sum of ``parts`` numbers from 1 on, every such sum as likely as any other."""
    cuts = torch.randperm(count - 1, generator=generator)[: parts - 1].sort().values + 1
    return [stop - start for start, stop in pairwise([0, *cuts.tolist(), count])]
