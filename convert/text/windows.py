"""Non-overlapping token sequences cut from text, each beginning with the tokenizer's special prefix
tokens.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, format_option, option_error
from kvfold.convert.request import SELF, count_held_out
from kvfold.convert.text.corpus import Corpus, TextSplit, open_corpus, permutation, with_share
from kvfold.convert.text.tokenizer import prefix_tokens, tokenize

# Bytes of a text that are read first, chosen: several times what most tokenizers need, as windows
# are drawn from all.
_READ_AT_LEAST = 2 << 20
_BYTES_PER_TOKEN = 16
# Chosen: as many held-out tokens as of shorter sequences by default, 4 x 2048 and 16 x 512.
_LONG_SEQUENCES = 4


@dataclass(frozen=True)
class CalibrationTokens:
    """Token sequences without overlap, int64 except ``further``.

    calibration     ``[N, T]``, for fits and refinement
    held_out        ``[M, T]``, for measurements
    source          the text's name in messages
    digest          SHA-256 of the text, or of the name of a dataset
    further         ``[K, T]``, int32, more sequences for polishing; K may be 0
    long            ``[L, T']`` with T' > T, held out too, for the loss by position; L may be 0
    held_out_texts  the text of each held-out sequence of a mixture; empty for a single text
    plain           names of the texts in which no document has ``messages``
    """

    calibration: Tensor
    held_out: Tensor
    source: str
    digest: str
    further: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    long: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    held_out_texts: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    @property
    def training(self) -> Tensor:
        """The calibration and further sequences, ``[N + K, T]``, int32."""
        if not len(self.further):
            return self.calibration.int()
        return torch.cat([self.calibration.int(), self.further])


@dataclass(frozen=True)
class _Drawn:
    """The sequences drawn from one text, all int32; ``rendered`` is True if the text has dialogues,
    which the chat template renders.

    ``share`` is that of the text as the option spells it, such as ``:3``, possibly empty.
    """

    name: str
    share: str
    digest: str
    calibration: Tensor
    held_out: Tensor
    further: Tensor
    long: Tensor
    rendered: bool


def load_calibration(
    spec: str | Sequence[str | None] | None,
    tokenizer: Any,
    samples: int,
    seq_len: int,
    seed: int = 0,
    held_out: int | None = None,
    split: TextSplit = "calibration",
    option: str = "calibration",
    further: int = 0,
    fewer: bool = True,
    write: Callable[[int], Tensor] | None = None,
    long_length: int = 0,
) -> CalibrationTokens:
    """Draw ``samples`` calibration sequences of ``seq_len`` tokens each, and ``held_out`` sequences
    for evaluation, by default ``count_held_out(samples)``.

    ``further`` additional sequences are drawn; with ``fewer``, as many of them as the text contains
    that was read for the others. If ``long_length`` exceeds ``seq_len``, four more sequences of so
    many tokens are drawn from text that the model did not write, or none if it is too short.

    ``spec`` is a plain text file (one document), a .jsonl file (``text`` or ``messages`` per line),
    the name of a dataset, or None for a ``split`` of the text that ships with kvfold. If ``spec``
    is a list, the texts contribute to each set by their shares, shuffled with the seed;
    ``NAME:SHARE`` gives a text's share if ``option`` is calibration; the last may be
    ``self:SHARE``, whose sequences ``write(count)`` returns. Sequences do not cross document
    boundaries, except that short documents and the remainders of longer ones are packed, separated
    by the tokenizer's EOS token; without an EOS token they are dropped. Raises InputError, naming
    ``option``, if a text is unreadable or too short.
    """
    mixed = spec is not None and not isinstance(spec, str)
    specs: Sequence[Any] = spec if mixed else [spec]  # type: ignore[assignment]
    shares = [with_share(s) if s and option == "calibration" else (s, 1.0) for s in specs]
    weights = [weight for _, weight in shares]
    foreign = [weight * (name != SELF) for name, weight in shares]
    held_out = count_held_out(samples) if held_out is None else held_out
    long_count = _LONG_SEQUENCES if long_length > seq_len and any(foreign) else 0
    counts = [share_counts(count, weights) for count in (samples, held_out, further)]
    counts.append(share_counts(long_count, foreign if any(foreign) else weights))
    if any(not count and name != SELF for count, (name, _) in zip(counts[0], shares, strict=True)):
        fewest = math.ceil(sum(weights) / min(weights))
        raise option_error(
            "samples",
            samples,
            f": each of the {len(specs)} {format_option(option)} texts must contribute at least one"
            f" sequence; use at least --samples {fewest}",
        )
    texts: list[_Drawn] = []
    for text, (name, weight), *wanted in zip(specs, shares, *counts, strict=True):
        share = (text or "").removeprefix(name or "")
        if name == SELF and write is not None:
            # Of further sequences the other texts may contain fewer than their shares.
            others = sum(len(drawn.further) for drawn in texts)
            if texts:
                fitting = others * weight / (sum(weights) - weight or 1)
                wanted[2] = min(wanted[2], math.ceil(fitting))
            rows = write(sum(wanted[:3])).int()
            digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
            first, second, third = _split(rows, wanted)
            texts.append(_Drawn(SELF, share, digest, first, second, third, rows[:0], True))
        else:
            corpus = open_corpus(name, tokenizer, seed, split, option)
            texts.append(_draw(corpus, share, tokenizer, wanted, fewer, seq_len, long_length, seed))

    def join(name: str) -> Tensor:
        rows = torch.cat([getattr(drawn, name) for drawn in texts])
        return rows[permutation(len(rows), seed)] if mixed else rows

    long = torch.cat([drawn.long for drawn in texts if len(drawn.long)] or [torch.empty(0, 0)])
    names = [drawn.name for drawn in texts for _ in drawn.held_out]
    digests = " ".join(drawn.digest + drawn.share for drawn in texts)
    return CalibrationTokens(
        calibration=join("calibration").long(),
        held_out=join("held_out").long(),
        source=" + ".join(drawn.name + drawn.share for drawn in texts),
        digest=hashlib.sha256(digests.encode()).hexdigest() if mixed else digests,
        further=join("further"),
        # Fewer would be worse than the held-out sequences, which have positions too.
        long=long.long() if 0 < len(long) == long_count else torch.empty(0, long_length).long(),
        held_out_texts=tuple(names[i] for i in permutation(len(names), seed)) if mixed else (),
        plain=tuple(drawn.name for drawn in texts if not drawn.rendered),
    )


def load_training(
    text: str,
    eval_text: str | None,
    tokenizer: Any,
    seq_len: int,
    count: int,
    held_out: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Draw sequences for uptraining from ``text``: ``[n, T]`` to train on, at most ``count``, and
    ``[held_out, T]``, which come from ``eval_text`` unless it is None; both int32.

    Raises InputError, naming the option, if a text is unreadable or too short.
    """
    reserved = held_out if eval_text is None else 0
    advice = "or lower --eval-sequences or --seq-len"
    corpus = open_corpus(text, tokenizer, seed, option="text")
    windows = _read_windows(corpus, tokenizer, seq_len, reserved + 1, reserved + count, advice)
    rows = windows.rows[permutation(len(windows.rows), seed)]
    if eval_text is None:
        return rows[held_out:][:count], rows[:held_out]
    corpus = open_corpus(eval_text, tokenizer, seed, option="eval_text")
    other = _read_windows(corpus, tokenizer, seq_len, held_out, held_out, advice)
    return rows[:count], other.rows[permutation(len(other.rows), seed)][:held_out]


def share_counts(count: int, weights: Sequence[float]) -> list[int]:
    """Divide ``count`` in proportion to ``weights``; what rounding leaves goes to the largest
    remainders.
    """
    exact = [count * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in order[: count - sum(counts)]:
        counts[i] += 1
    return counts


def _draw(
    corpus: Corpus,
    share: str,
    tokenizer: Any,
    wanted: Sequence[int],
    fewer: bool,
    seq_len: int,
    long_length: int,
    seed: int,
) -> _Drawn:
    """Draw sequences at random from one text: ``wanted`` for calibration, held out, further, and
    long ones.

    Reads the text only until it yields the first two, without ``fewer`` the first three; raises
    InputError if it yields fewer.
    """
    *wanted, long_count = wanted
    needed = sum(wanted[:2] if fewer else wanted)
    advice = "or lower --samples or --seq-len"
    if not fewer:
        advice = "lower --polish, or add --repeat-text"
    windows = _read_windows(corpus, tokenizer, seq_len, needed, needed, advice)
    order = permutation(len(windows.rows), seed)
    # Each long sequence is a run of consecutive windows, without the prefixes between them.
    prefix = windows.prefix
    size = math.ceil((long_length - prefix) / (seq_len - prefix))
    runs = torch.empty(0, max(size, 1), dtype=torch.int64)
    # Windows that no other sequence needs come first; else further sequences, of which there may be
    # fewer, give way.
    for start in (sum(wanted), needed):
        if len(runs) < long_count:
            runs = _find_runs(windows, order[start:], size, long_count)
    order = order[torch.isin(order, runs, invert=True)][: sum(wanted)]
    first, *others = windows.rows[runs].unbind(1)
    bodies = [first, *(rows[:, prefix:] for rows in others)]
    long = torch.cat(bodies, dim=1)[:, :long_length]
    calibration, held_out, further = _split(windows.rows[order], wanted)
    digest = corpus.digest()
    rendered = windows.rendered
    return _Drawn(corpus.name, share, digest, calibration, held_out, further, long, rendered)


def _split(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The calibration, held-out and further sequences among ``rows``, in this order."""
    return torch.tensor_split(rows, [counts[0], counts[0] + counts[1]])


@dataclass(frozen=True)
class _Windows:
    """All windows of the text that was read: ``rows [n, T]``, int32, which begin with ``prefix``
    special tokens.

    The first ``counts[i]`` windows are those of document ``i``, and so on; the rest were packed.
    """

    rows: Tensor
    prefix: int
    counts: list[int]
    rendered: bool


def _read_windows(
    corpus: Corpus, tokenizer: Any, seq_len: int, needed: int, wanted: int, advice: str
) -> _Windows:
    """Read text until it yields ``wanted`` windows, if it has as many. Raises InputError with
    ``advice`` if it has fewer than ``needed``.
    """
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int32)
    length = seq_len - len(prefix)
    if length < 1:
        begins = f"every sequence begins with {len(prefix)} special tokens"
        raise option_error(
            "seq_len", seq_len, f": {begins}; use at least --seq-len {len(prefix) + 1}"
        )
    # Bytes per token are unknown before tokenizing, so more is read until there is enough, or
    # nothing is left.
    limit = max(_READ_AT_LEAST, wanted * seq_len * _BYTES_PER_TOKEN)
    while True:
        documents, complete = corpus.documents(limit)
        tokens = [ids.int() for ids in tokenize(tokenizer, prefix.tolist(), documents)]
        bodies = cut(tokens, length, tokenizer.eos_token_id)
        if complete or len(bodies) >= wanted:
            break
        limit *= 4
    if len(bodies) < needed:
        size = f"{sum(map(len, tokens))} tokens in {len(tokens)} documents"
        if tokenizer.eos_token_id is None and len(tokens) > 1:
            size += " (which cannot be packed because the tokenizer has no EOS token)"
        raise InputError(
            f"{corpus.name}: too little text: {size} yield {len(bodies)} of {needed} sequences of"
            f" {seq_len} tokens; give more text, {advice}"
        )
    rows = torch.cat([prefix.expand(len(bodies), -1), bodies], dim=1)
    counts = [len(ids) // length for ids in tokens]
    rendered = any(document.rendered for document in documents)
    return _Windows(rows, len(prefix), counts, rendered)


def _find_runs(windows: _Windows, free: Tensor, size: int, count: int) -> Tensor:
    """Up to ``count`` runs of ``size`` consecutive windows of one document, all of them in
    ``free``: ``[n, size]``.
    """
    total = len(windows.rows)
    counts = torch.tensor([*windows.counts, total - sum(windows.counts)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    unused = torch.zeros(total, dtype=torch.bool)
    unused[free] = True
    runs: list[Tensor] = []
    for first in free.tolist():
        last = first + size - 1
        if len(runs) == count:
            break
        if last < total and owner[first] == owner[last] and unused[first : last + 1].all():
            unused[first : last + 1] = False
            runs.append(torch.arange(first, last + 1))
    return torch.stack(runs) if runs else torch.empty(0, size, dtype=torch.int64)


def cut(documents: list[Tensor], length: int, eos: int | None) -> Tensor:
    """Cut windows ``[n, length]`` from each document, then from the remainders packed with ``eos``
    (if not None).
    """
    windows = []
    rests = []
    for document in documents:
        end = len(document) // length * length
        windows.append(document[:end].view(-1, length))
        if end < len(document):
            rests.append(document[end:])
    if eos is not None and rests:
        separator = torch.tensor([eos], dtype=rests[0].dtype)
        packed = torch.cat([ids for rest in rests for ids in (rest, separator)])
        windows.append(packed[: len(packed) // length * length].view(-1, length))
    return torch.cat(windows) if windows else torch.empty(0, length, dtype=torch.int64)
