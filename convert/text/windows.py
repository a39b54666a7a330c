"""Non-overlapping token sequences cut from text, each beginning with the tokenizer's special prefix
tokens.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, format_option, option_error
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.text.corpus import Corpus, TextSplit, open_corpus, permutation, with_share
from kvfold.convert.text.tokenizer import prefix_tokens, render, tokenize

# Bytes of a text that are read first, chosen: several times what most tokenizers need, as windows
# are drawn from all.
_READ_AT_LEAST = 2 << 20
_BYTES_PER_TOKEN = 16
_LONG_SEQUENCES = (
    4  # chosen: as many held-out tokens as of shorter sequences by default, 4 x 2048 and 16 x 512
)


@dataclass(frozen=True)
class CalibrationTokens:
    """The token sequences ``calibration [N, T]``, ``held_out [M, T]`` and ``further [K, T]``,
    without overlap.

    ``source`` is the text's name in messages; ``digest`` is the SHA-256 of the text, or of the name
    for a dataset. ``further`` are additional sequences for training that needs more than the
    calibration sequences; K may be 0. As they may be many, they are int32, the others int64. ``long
    [L, T']`` are more held-out sequences of T' > T tokens, for the loss by position; L is 0 if
    there is no text left for them. ``held_out_texts`` names the text of each held-out sequence of a
    mixture; it is empty for a single text. ``plain`` names the texts in which no document has
    ``messages``.
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
        return (
            torch.cat([self.calibration.int(), self.further])
            if len(self.further)
            else self.calibration.int()
        )


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
    for evaluation.

    ``held_out`` defaults to ``held_out_count(samples)``. ``further`` additional sequences are
    drawn; with ``fewer``, as many of them as the text contains that was read for the others. If
    ``long_length`` exceeds ``seq_len``, four more sequences of so many tokens are drawn from text
    that the model did not write, or none if it is too short.

    ``spec`` is a plain text file (one document), a .jsonl file (``text`` or ``messages`` per line),
    the name of a dataset, or None for a ``split`` of the text that ships with kvfold. If ``spec``
    is a list, the texts contribute to each of the three sets by their shares, shuffled with the
    seed; ``NAME:SHARE`` gives a text's share if ``option`` is calibration; the last may be
    ``self:SHARE``, whose sequences ``write(count)`` returns. Sequences do not cross document
    boundaries, except that short documents and the remainders of longer ones are packed, separated
    by the tokenizer's EOS token; without an EOS token they are dropped. Raises InputError, naming
    ``option``, if a text is unreadable or too short.
    """
    counts = samples, held_out_count(samples) if held_out is None else held_out, further
    specs = [spec] if spec is None or isinstance(spec, str) else spec
    shared = [
        with_share(each) if each and option == "calibration" else (each, 1.0) for each in specs
    ]
    weights = [weight for _, weight in shared]
    shares = [share_counts(count, weights) for count in counts]
    if any(not count and name != SELF for count, (name, _) in zip(shares[0], shared, strict=True)):
        way_out = f"use at least --samples {math.ceil(sum(weights) / min(weights))}"
        share = f"each of the {len(specs)} {format_option(option)} texts must contribute at least one sequence"
        raise option_error("samples", samples, f": {share}; {way_out}")
    unwritten = [weight * (name != SELF) for name, weight in shared]
    long_count = _LONG_SEQUENCES if long_length > seq_len and any(unwritten) else 0
    shares.append(share_counts(long_count, unwritten) if long_count else [0] * len(specs))
    names = list[str]()
    digests = list[str]()
    plain = list[str]()
    of_each = list[str]()
    parts = list[Any]()
    long = list[Tensor]()
    for each, (name, weight), own in zip(specs, shared, zip(*shares, strict=True), strict=True):
        share = (each or "").removeprefix(name or "")
        if name == SELF and write is not None:
            # Of further sequences the other texts may contain fewer than their shares.
            drawn_of_others = (
                sum(len(part[2]) for part in parts) * weight / (sum(weights) - weight or 1)
            )
            drawn = write(
                sum(own[:2]) + (min(own[2], math.ceil(drawn_of_others)) if parts else own[2])
            ).int()
            digest = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
        else:
            corpus = open_corpus(name, partial(render, tokenizer), seed, split, option)
            drawn, longer, rendered = _draw(
                corpus, tokenizer, own, fewer, (seq_len, long_length), seed
            )
            long += longer.unbind()
            name = corpus.name
            digest = corpus.digest()
            plain += [] if rendered else [name]
        parts.append(torch.tensor_split(drawn, [own[0], sum(own[:2])]))
        of_each += own[1] * [name]
        names.append(f"{name}{share}")
        digests.append(digest + share)
    mixed = [torch.cat(each) for each in zip(*parts, strict=True)]
    texts = tuple[str, ...]()
    digest = digests[0]
    if specs is spec:  # a mixture
        mixed = [each[permutation(len(each), seed)] for each in mixed]
        texts = tuple(of_each[place] for place in permutation(len(of_each), seed).tolist())
        digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    # Fewer would be worse than the held-out sequences, which have positions too.
    of_long = (
        torch.stack(long).long()
        if 0 < len(long) == long_count
        else torch.empty(0, long_length, dtype=torch.long)
    )
    source = " + ".join(names)
    first = mixed[0].long()
    second = mixed[1].long()
    return CalibrationTokens(first, second, source, digest, mixed[2], of_long, texts, tuple(plain))


def share_counts(count: int, weights: Sequence[float]) -> list[int]:
    """Divide ``count`` in proportion to ``weights``; what rounding leaves goes to the largest
    remainders.
    """
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


def _draw(
    corpus: Corpus,
    tokenizer: Any,
    wanted: Sequence[int],
    fewer: bool,
    lengths: tuple[int, int],
    seed: int,
) -> tuple[Tensor, Tensor, bool]:
    """Draw sequences at random from one text: ``wanted`` for calibration, held out, further, and
    long ones.

    ``lengths`` are the tokens of the first three kinds, and of the long ones. Reads the text only
    until it yields the first two, without ``fewer`` the first three; raises InputError if it yields
    fewer. Returns the first three kinds, as many long ones as the text has left, and True if the
    text has dialogues.
    """
    seq_len, long_length = lengths
    *wanted, long_count = wanted
    kinds = dict(zip(("to calibrate on", "held out", "more to polish on"), wanted, strict=True))
    needed = sum(wanted[:2] if fewer else wanted)
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int32)
    if seq_len <= len(prefix):
        begins = f"every sequence begins with {len(prefix)} special token{'s' * (len(prefix) != 1)}"
        raise option_error(
            "seq_len", seq_len, f": {begins}; use at least --seq-len {len(prefix) + 1}"
        )
    # Bytes per token are unknown before tokenizing, so more is read until there is enough, or
    # nothing is left.
    limit = max(_READ_AT_LEAST, needed * seq_len * _BYTES_PER_TOKEN)
    while True:
        documents, complete = corpus.documents(limit)
        tokens = [each.int() for each in tokenize(tokenizer, prefix.tolist(), documents)]
        windows = cut(tokens, seq_len - len(prefix), tokenizer.eos_token_id)
        if len(windows) >= needed:
            break
        if complete:
            found = (
                f"{sum(map(len, tokens))} tokens in {len(tokens)}"
                f" document{'s' * (len(tokens) != 1)}"
            )
            if tokenizer.eos_token_id is None and len(tokens) > 1:
                found += " (which cannot be packed because the tokenizer has no EOS token)"
            parts = [
                f"{count} {kind}"
                for kind, count in kinds.items()
                if count and not (fewer and kind[0] == "m")
            ]
            divided = f" ({', '.join(parts)})" if len(parts) > 1 else ""
            advice = "or lower --samples or --seq-len"
            if not fewer:
                most = (len(windows) - wanted[1]) * seq_len // 1000
                at_most = f" to {most}k tokens at most" if most > 0 else ""
                advice = f"lower --polish{at_most}, or add --repeat-text"
            raise InputError(
                f"{corpus.name}: too little text: {found} yield {len(windows)} of {needed}"
                f" sequences of {seq_len} tokens{divided}; give more text, {advice}"
            )
        limit *= 4
    order = permutation(len(windows), seed)
    body = long_length - len(prefix)
    runs = torch.empty(0, 1, dtype=torch.int64)
    # Windows that no other sequence needs come first; else further sequences, of which there may be
    # fewer, give way.
    for start in (sum(wanted), needed):
        if len(runs) < long_count:
            counts = [len(each) // windows.shape[1] for each in tokens]
            runs = _runs(
                counts, len(windows), order[start:], math.ceil(body / windows.shape[1]), long_count
            )
    order = order[torch.isin(order, runs, invert=True)][: sum(wanted)]
    drawn = windows[order]
    joined = windows[runs].flatten(1)[:, : max(0, body)]
    drawn, joined = (
        torch.cat([prefix.expand(len(each), -1), each], dim=1) for each in (drawn, joined)
    )
    return drawn, joined, any(each.rendered for each in documents)


def _runs(documents: list[int], windows: int, free: Tensor, size: int, count: int) -> Tensor:
    """Up to ``count`` runs of ``size`` consecutive windows of one document, all of them in
    ``free``: ``[n, size]``.

    ``documents`` are the numbers of windows of each document; the others of all ``windows`` were
    packed.
    """
    documents = [*documents, windows - sum(documents)]
    owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    unused = torch.zeros(windows, dtype=torch.bool)
    found = list[Tensor]()
    unused[free] = True
    for first in free.tolist():
        last = first + size - 1
        if len(found) == count:
            break
        if last < windows and owner[first] == owner[last] and unused[first : last + 1].all():
            unused[first : last + 1] = False
            found.append(torch.arange(first, last + 1))
    return torch.stack(found) if found else torch.empty(0, size, dtype=torch.int64)


def cut(documents: list[Tensor], length: int, eos: int | None) -> Tensor:
    """Cut windows ``[n, length]`` from each document, then from the remainders packed with ``eos``
    (if not None).
    """
    windows = [
        document[: len(document) // length * length].view(-1, length) for document in documents
    ]
    rests = [document[len(document) // length * length :] for document in documents]
    rests = [rest for rest in rests if len(rest)]
    if eos is not None and rests:
        end = torch.tensor([eos], dtype=rests[0].dtype)
        packed = torch.cat([part for rest in rests for part in (rest, end)])
        windows.append(packed[: len(packed) // length * length].view(-1, length))
    return torch.cat(windows) if windows else torch.empty(0, length, dtype=torch.int64)
