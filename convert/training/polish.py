"""Polishing: all converted attention of a model trained together against its source's next-token distributions.

The loss is ``KL(source || student)`` on calibration text, no labels. The source takes part as its residual streams
after the last layer, made once: its head is the student's. Held-out sequences decide: the best weights seen on them are
kept, those before training included.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.training.batches import random_batches
from kvfold.convert.training.budget import ROUND, batch_size
from kvfold.convert.training.loss import divergence
from kvfold.convert.training.rates import relative_groups
from kvfold.convert.training.steps import RelativeSteps
from kvfold.convert.training.student import Student

_WARMUP = 10  # steps
# Peak learning rate of one layer at width one and a KL of 1. SmolLM2 (30 layers), MLA 128+64, KL after 30 and 60 of 60
# steps of 4 x 256 tokens from 0.1369: 2.4 0.1215, 0.1147, 4.8 0.1298, 0.1173; layout engine, refined, after 25 of 200
# from 0.1286: 1.2 0.1223, 2.4 0.1281, which `slowdown` then halves.
# An MHA model of 6 layers at an eighth of its cache, 100 steps: 0.0553 -> 3.6 0.0290, 7 0.0276.
_RATE = 2.4
# Parts of a run after each of which the rate is judged, and the least relative gain of one: of 200 steps the right rate
# gains 2 to 5 % in each, twice that 0.4 % or less. The rounds of a long run gain less each: judged after every round of
# 1000 steps, the rate was halved away (the MHA model above, refined: 0.0145 -> 0.0124; after every eighth, 0.0104).
_PARTS = 8
_MIN_GAIN = 0.01
_BETAS = (0.9, 0.95)
_EPS = 1e-12
_LOGITS = 6 << 20  # elements; float32 blocks below 32 MiB are reused by the allocator instead of mapped anew


@dataclass(frozen=True)
class Text:
    """Sequences ``tokens [N, T]``, and the source's residual streams after the last layer, ``states [N, T, E]``."""

    tokens: Tensor
    states: Tensor


@dataclass(frozen=True)
class Polished:
    """The trained tensors, as they will be stored.

    ``errors`` are the KL on held-out sequences, nats per token, before training and after every round. Of the ``steps``
    made, ``kept`` is the one whose weights these are, 0 for those before training; ``tensors`` is empty then.
    """

    tensors: Mapping[str, Tensor]
    errors: list[float]
    steps: int
    kept: int

    def record(self) -> dict[str, Any]:
        """For ``kvfold.json``."""
        return {"before": self.errors[0], "after": min(self.errors), "steps": self.steps, "kept": self.kept}


def polish(
    student: Student,
    training: Text,
    held_out: Text,
    steps: int,
    *,
    seed: int = 0,
    lr: float | None = None,
    saved: Path | None = None,
    progress: Callable[[int, float], None] = lambda step, error: None,
) -> Polished:
    """Train ``student``; ``lr`` is relative to the size of each tensor, ``peak_rate`` by default.

    The state of the run is kept in the file ``saved``: where there is one, the run goes on from it.
    """
    run = _Run(student, training, steps, seed, lr, held_out)
    if saved is not None and saved.is_file():
        run.resume(saved)
    else:
        run.evaluate()
    progress(run.step, run.errors[-1])
    while run.step < steps:
        run.train(next_stop(run.step, steps))
        run.evaluate()
        if saved is not None:
            run.save(saved)
        progress(run.step, run.errors[-1])
    return Polished(run.best, run.errors, run.step, run.kept)


def next_stop(step: int, steps: int) -> int:
    """The step at which the next round ends."""
    return min(steps, (step // ROUND + 1) * ROUND)


def peak_rate(error: float, width: int, layers: int) -> float:
    """The default peak learning rate, relative to the size of each tensor, of a model of ``width`` and ``layers``.

    Near its minimum the KL grows with the square of the distance, so that the way to go is in proportion to the root of
    the ``error`` before training; with more, a model that was close is thrown away from where it was. What the layers
    change adds up, as what a matrix's inputs do. Rounding may make the error of a lossless model negative.
    """
    return _RATE / layers * min(1.0, math.sqrt(max(error, 0.0))) / math.sqrt(width)


def learning_rate(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, relative to the peak: a warm start, then linear to zero."""
    return min(1.0, (step + 1) / _WARMUP) * (1 - step / steps)


def slowdown(errors: list[float], steps: int) -> float:
    """Half for every part of a run of ``steps`` that hardly lowered the least error at the end of those before it.

    ``errors`` are those before training and after every round so far; a part is an eighth of the rounds, rounded up.
    How far a model may be moved in a step differs between layouts and with how well it is fitted; the first parts tell.
    """
    ends = errors[:: max(1, math.ceil(steps / ROUND / _PARTS))]
    best = accumulate(ends, min)
    return 0.5 ** sum(error > (1 - _MIN_GAIN) * least for error, least in zip(ends[1:], best, strict=False))


class _Run:
    """The state of a run: masters and moments, the errors so far, and the best weights."""

    def __init__(
        self, student: Student, training: Text, steps: int, seed: int, lr: float | None, held_out: Text
    ) -> None:
        self._student, self._training, self._held_out = student, training, held_out
        self._steps, self._seed, self._lr = steps, seed, lr
        self.step = self.kept = 0
        self.errors: list[float] = []
        self.best: dict[str, Tensor] = {}
        named = student.named_parameters()
        self._optimizer = torch.optim.Adam([master for _, master in named], lr=1.0, betas=_BETAS, eps=_EPS)
        relative_groups(self._optimizer, named, student.sizes)
        if student.channel is not None:
            student.channel.watch(self._optimizer)
        RelativeSteps(named, student.channel.slices if student.channel else ()).watch(self._optimizer)

    def train(self, until: int) -> None:
        """Make the steps up to number ``until``."""
        count, length = self._training.tokens.shape
        peak = self._lr or peak_rate(self.errors[0], self._training.states.shape[-1], self._student.layers)
        peak *= slowdown(self.errors, self._steps)
        batches = random_batches(count, batch_size(length), self._seed)
        for batch in islice(batches, self.step, until):
            for group in self._optimizer.param_groups:
                group["lr"] = peak * group["size"] * learning_rate(self.step, self._steps)
            self._optimizer.zero_grad(set_to_none=True)
            backward(self._student, Text(self._training.tokens[batch], self._training.states[batch]))
            self._optimizer.step()
            self.step += 1

    def evaluate(self) -> None:
        """Measure the error on the held-out sequences; keep the weights if it is the least so far."""
        error = divergence_from_source(self._student, self._held_out)
        if self.errors and error < min(self.errors):
            self.best, self.kept = self._student.rounded(), self.step
        self.errors.append(error if math.isfinite(error) else math.inf)

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "kept": self.kept,
            "errors": self.errors,
            "best": self.best,
            "masters": {name: part.master.detach() for name, part in self._student.trained.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        new = path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location="cpu")
        self.step, self.kept, self.errors, self.best = (state[name] for name in ("step", "kept", "errors", "best"))
        self._student.put(state["masters"])
        self._optimizer.load_state_dict(state["optimizer"])


def backward(student: Student, text: Text) -> None:
    """Add the gradients of the mean divergence on ``text``; the head is run for a few positions at a time."""
    hidden = student.hidden(text.tokens)
    leaf = hidden.detach().requires_grad_()
    for span in _spans(student, text):
        loss = _divergence(student, leaf[:, span], text.states[:, span]) / text.tokens.numel()
        loss.backward()  # type: ignore[no-untyped-call]
    hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]


@torch.no_grad()
def divergence_from_source(student: Student, text: Text) -> float:
    """Mean KL of the next-token distributions, nats per token."""
    total = 0.0
    size = batch_size(text.tokens.shape[1])
    for tokens, states in zip(torch.split(text.tokens, size), torch.split(text.states, size), strict=True):
        hidden, part = student.hidden(tokens), Text(tokens, states)
        total += sum(float(_divergence(student, hidden[:, span], states[:, span])) for span in _spans(student, part))
    return total / text.tokens.numel()


def _divergence(student: Student, hidden: Tensor, states: Tensor) -> Tensor:
    """The sum over positions of ``KL(source || student)`` of residual streams after the last layer."""
    with torch.no_grad():
        expected = student.logits(states.to(hidden.device, hidden.dtype))
    return divergence(student.logits(hidden).flatten(0, 1), expected.flatten(0, 1))


def _spans(student: Student, text: Text) -> Iterator[slice]:
    count, length = text.tokens.shape
    size = max(1, _LOGITS // (count * student.vocabulary))
    yield from (slice(start, start + size) for start in range(0, length, size))
