"""Non-overlapping token sequences cut from text, each beginning with the tokenizer's special prefix
tokens.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, option_error
from kvfold.convert.request import SELF, count_held_out
from kvfold.convert.text.corpus import Corpus, draw_permutation, open_corpus
from kvfold.convert.text.tokenizer import find_prefix_tokens, tokenize_documents

# Bytes of a text that are read first, chosen: several times what most tokenizers need, as windows
# are drawn from all.
_READ_AT_LEAST = 2 << 20
_BYTES_PER_TOKEN = 16
# Chosen: as many held-out tokens as of shorter sequences by default, 4 x 2048 and 16 x 512.
LONG_SEQUENCES = 4


@dataclass(frozen=True)
class CalibrationTokens:
    """The token sequences of a conversion, which do not overlap: for calibration, for measurements,
    and for polishing.

    calibration     ``[N, T]``, for fits and refinement
    held_out        ``[M, T]``, for measurements
    further         ``[K, T]``, int32, more sequences for polishing; K may be 0
    long            ``[L, T']`` with T' > T, held out too, for the loss by position; L may be 0
    source          the text's name in messages
    digest          SHA-256 of the text, or of the name of a dataset
    held_out_texts  the text of each held-out sequence of a mixture; empty for a single text
    """

    calibration: Tensor
    held_out: Tensor
    further: Tensor
    long: Tensor
    source: str
    digest: str
    held_out_texts: tuple[str, ...]

    @property
    def training_sequences(self) -> Tensor:
        """The sequences to train on, those for calibration and the further ones: ``[N + K, T]``,
        int32.
        """
        return torch.cat([self.calibration.int(), self.further])


def load_calibration(
    texts: Sequence[tuple[str | None, float]],
    tokenizer: Any,
    samples: int,
    seq_len: int,
    seed: int = 0,
    further: int = 0,
    fewer: bool = True,
    write: Callable[[int], Tensor] | None = None,
    long_length: int = 0,
    long_count: int = LONG_SEQUENCES,
) -> CalibrationTokens:
    """The token sequences of a conversion: ``samples`` of ``seq_len`` tokens for calibration, and
    ``count_held_out(samples)`` for measurements.

    ``further`` additional sequences are drawn; with ``fewer``, as many of them as the text contains
    that was read for the others. If ``long_length`` exceeds ``seq_len``, ``long_count`` more
    sequences of so many tokens are drawn from text that the model did not write, or none if it is
    too short.

    ``texts`` are names of calibration texts (None: the one that ships with kvfold) and their shares
    in each set, as from `choose_calibration_texts`; the sequences of several texts are shuffled.
    The last may be ``self``, whose sequences ``write(count)`` returns. Sequences do not cross
    document boundaries, except that short documents and the remainders of longer ones are packed,
    separated by the tokenizer's EOS token; without an EOS token they are dropped. Raises InputError
    if a text is unreadable or too short.
    """
    weights = [weight for _, weight in texts]
    read_weights = [weight * (name != SELF) for name, weight in texts]
    long_count *= long_length > seq_len and any(read_weights)
    sizes = (samples, count_held_out(samples), further)
    counts = [divide_by_shares(size, weights) for size in sizes]
    long_counts = divide_by_shares(long_count, read_weights)
    names = []
    digests = []
    drawn: list[tuple[Tensor, ...]] = []
    long: list[Tensor] = []
    for i, (name, weight) in enumerate(texts):
        wanted = [count[i] for count in counts]
        if name == SELF and write is not None:
            if drawn:
                # Of further sequences the other texts may contain fewer than their shares.
                others = sum(len(rows) for _, _, rows in drawn)
                wanted[2] = min(wanted[2], math.ceil(others * weight / (sum(weights) - weight)))
            sequences = write(sum(wanted)).int()
            digests.append(hashlib.sha256(sequences.numpy().tobytes()).hexdigest())
        else:
            corpus = open_corpus(name, tokenizer, seed)
            sequences, runs = _draw_token_sets(
                corpus, wanted, fewer, seq_len, long_counts[i], long_length
            )
            long += runs
            name = corpus.name
            digests.append(corpus.compute_digest())
        names.append(name if weight == 1 else f"{name}:{weight:g}")
        drawn.append(torch.tensor_split(sequences, [wanted[0], wanted[0] + wanted[1]]))
    sets = drawn[0]
    digest = digests[0]
    held_out_texts: tuple[str, ...] = ()
    if len(texts) > 1:
        sets = tuple(_shuffle_rows(torch.cat(rows), seed) for rows in zip(*drawn, strict=True))
        digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        owners = [name for name, rows in zip(names, drawn, strict=True) for _ in rows[1]]
        held_out_texts = tuple(owners[i] for i in draw_permutation(len(owners), seed))
    # Fewer would be worse than the held-out sequences, which have positions too.
    complete = 0 < len(long) == long_count
    return CalibrationTokens(
        calibration=sets[0].long(),
        held_out=sets[1].long(),
        further=sets[2],
        long=torch.stack(long).long() if complete else torch.empty(0, long_length).long(),
        source=" + ".join(names),
        digest=digest,
        held_out_texts=held_out_texts,
    )


def draw_sequences(corpus: Corpus, seq_len: int, needed: int, wanted: int, advice: str) -> Tensor:
    """Sequences ``[n, T]``, int32, in random order, from as much text as yields ``wanted`` of them.

    Raises InputError with ``advice`` if there are fewer than ``needed``.
    """
    rows, _ = _read_windows(corpus, seq_len, needed, wanted, advice)
    return _shuffle_rows(rows, corpus.seed)


def divide_by_shares(count: int, weights: Sequence[float]) -> list[int]:
    """``count`` divided in proportion to ``weights``, as whole numbers; what rounding leaves goes
    to the largest remainders.
    """
    exact = [count * weight / (sum(weights) or 1) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in order[: count - sum(counts)]:
        counts[i] += 1
    return counts


def _shuffle_rows(rows: Tensor, seed: int) -> Tensor:
    """The rows of a tensor in random order; equal seeds give equal orders."""
    return rows[draw_permutation(len(rows), seed)]


def _draw_token_sets(
    corpus: Corpus,
    wanted: Sequence[int],
    fewer: bool,
    seq_len: int,
    long_count: int,
    long_length: int,
) -> tuple[Tensor, list[Tensor]]:
    """Sequences drawn at random from one text: ``[n, T]``, int32, for calibration, measurements and
    polishing (``wanted``), and up to ``long_count`` long ones.

    Reads the text only until it yields the first two, without ``fewer`` all three; raises
    InputError if it yields fewer.
    """
    needed = sum(wanted[:2] if fewer else wanted)
    advice = "or lower --samples or --seq-len" if fewer else "lower --polish, or add --repeat-text"
    rows, owners = _read_windows(corpus, seq_len, needed, needed, advice)
    order = draw_permutation(len(rows), corpus.seed)
    # Each long sequence is a run of consecutive windows, without the prefixes between them.
    prefix = len(find_prefix_tokens(corpus.tokenizer))
    size = math.ceil((long_length - prefix) / (seq_len - prefix))
    runs: list[range] = []
    # Windows that no other sequence needs come first; else further sequences, of which there may be
    # fewer, give way.
    for free in (order[sum(wanted) :], order[needed:]):
        if len(runs) < long_count:
            runs = _find_window_runs(owners, free.tolist(), size, long_count)
    long = [
        torch.cat([rows[run[0]], rows[run[1:], prefix:].flatten()])[:long_length] for run in runs
    ]
    taken = torch.tensor([i for run in runs for i in run], dtype=torch.int64)
    order = order[torch.isin(order, taken, invert=True)][: sum(wanted)]
    return rows[order], long


def _read_windows(
    corpus: Corpus, seq_len: int, needed: int, wanted: int, advice: str
) -> tuple[Tensor, Tensor]:
    """Windows of ``seq_len`` tokens, ``[n, T]``, int32, and the index of the document of each,
    ``[n]``. Text is read until it yields ``wanted`` windows or ends; a window packed from several
    documents has an index of its own.

    Raises InputError with ``advice`` if there are fewer than ``needed``.
    """
    tokenizer = corpus.tokenizer
    prefix = torch.tensor(find_prefix_tokens(tokenizer), dtype=torch.int32)
    length = seq_len - len(prefix)
    if length < 1:
        raise option_error(
            "seq_len",
            seq_len,
            f"must exceed {len(prefix)}, the special tokens that begin every sequence; raise it",
        )
    # Bytes per token are unknown before tokenizing, so more is read until there is enough, or
    # nothing is left.
    limit = max(_READ_AT_LEAST, wanted * seq_len * _BYTES_PER_TOKEN)
    while True:
        documents, complete = corpus.read_documents(limit)
        tokens = [ids.int() for ids in tokenize_documents(tokenizer, prefix.tolist(), documents)]
        bodies = cut_windows(tokens, length, tokenizer.eos_token_id)
        if complete or len(bodies) >= wanted:
            break
        limit *= 4
    if len(bodies) < needed:
        raise InputError(
            f"{corpus.name}: too little text: {sum(map(len, tokens))} tokens in {len(tokens)}"
            f" documents yield {len(bodies)} of {needed} sequences of {seq_len} tokens; give more"
            f" text, {advice}"
        )
    rows = torch.cat([prefix.expand(len(bodies), -1), bodies], dim=1)
    counts = [len(ids) // length for ids in tokens]
    counts.append(len(rows) - sum(counts))
    return rows, torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def _find_window_runs(owners: Tensor, free: list[int], size: int, count: int) -> list[range]:
    """Up to ``count`` runs of ``size`` consecutive windows of the same document, all of them among
    the windows ``free``.
    """
    unused = torch.zeros(len(owners), dtype=torch.bool)
    unused[free] = True
    runs: list[range] = []
    for first in free:
        last = first + size - 1
        if len(runs) == count:
            break
        if last < len(owners) and owners[first] == owners[last] and unused[first : last + 1].all():
            unused[first : last + 1] = False
            runs.append(range(first, last + 1))
    return runs


def cut_windows(documents: list[Tensor], length: int, eos: int | None) -> Tensor:
    """Token windows ``[n, length]`` cut from each document, then from what remains of all
    documents, joined with ``eos`` (if not None).
    """
    whole = [torch.empty(0, dtype=torch.int32)]
    packed = whole.copy()
    for ids in documents:
        end = len(ids) // length * length
        whole.append(ids[:end])
        if end < len(ids) and eos is not None:
            packed += [ids[end:], torch.tensor([eos], dtype=ids.dtype)]
    rest = torch.cat(packed)
    return torch.cat([*whole, rest[: len(rest) // length * length]]).view(-1, length)
