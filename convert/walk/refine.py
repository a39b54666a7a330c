"""Refinement: a layer's converted attention trained on calibration text to do what the source's did. No labels.

The layer's tensors, in the terms of the files, are float32 masters under Adam. A step runs the stock attention module
of the converted model with them, rounded to the dtype that will be stored and computed in the stream's, on a batch of
the student's own inputs; the loss is the mean square of what is missing to the teacher's residual stream, relative to
what the teacher's attention adds (``refine_objective``). Sequences kept aside judge: the best weights seen on them are
kept, those that the layer came with included. In memory are a layer, its twin, the masters and their moments.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.errors import KvfoldError
from kvfold.convert.walk.objective import PLAIN, Examples, Share, examples, squares
from kvfold.convert.walk.twin import Twin
from kvfold.convert.walk.walk import Step

ROUND = 50  # steps between two looks at the sequences kept aside
AUTO_STEPS = 1000  # the most that ``auto`` spends on a layer
_SETTLE = 100  # steps of ``auto`` in which the rate falls to zero
_LEVELS = (1.0, 0.3)  # rates of ``auto``, each until it gains no more
_AUTO_GAIN = 0.01
_BATCH = 8
_RATE = 0.05  # relative to the root mean square of the tensor
_WIDTH_RATE = 0.8  # the same times the root of the model's width: Adam's steps of all inputs add up
_SLOWER = (1.0, 0.25, 0.0625)  # a layer that got no better is tried again
_BETAS = (0.9, 0.98)
_EPS = 1e-12  # gradients of a relative error are small

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Refinement:
    """What the layers of a run have in common. ``steps`` is a number per layer or ``"auto"``.

    ``share`` and ``student_share`` say how the teacher's and the student's layers add their attention to the residual.
    ``paces`` says of a layer's tensors how far their elements move relative to each other; absent ones move evenly.
    ``tell(layer, step, error)`` hears of the error on sequences kept aside.
    """

    steps: int | str
    seed: int = 0
    share: Share = PLAIN
    student_share: Share = PLAIN
    paces: Callable[[Tensors], Tensors] = lambda tensors: {}
    tell: Callable[[int, int, float], None] = lambda layer, step, error: None


@dataclass(frozen=True)
class Refined:
    """A layer's tensors and its error on sequences kept aside, before and after.

    The error is ``||missing||^2 / ||added||^2``: what the student's residual lacks, over what the teacher's attention
    adds. Of the ``steps`` made, ``kept`` is the one whose weights these are, 0 for those that the layer came with.
    """

    tensors: Tensors
    before: float
    after: float
    steps: int
    kept: int

    def record(self) -> dict[str, Any]:
        """For ``kvfold.json``."""
        return {"before": self.before, "after": self.after, "steps": self.steps, "kept": self.kept}


def refine_layer(step: Step, tensors: Tensors, task: Refinement) -> Refined:
    """Train those of ``tensors`` that the attention module of ``step``'s layer is made of."""
    if not step.calibration:
        raise KvfoldError("refinement needs a walk that keeps the calibration sequences")
    training = examples(task.share, step.source, step.calibration, step.student_calibration)
    aside = examples(task.share, step.source, step.held_out, step.student)
    step.twin.put(tensors)
    with step.twin.stream.open_layer(step.index) as layer:
        for slower in _SLOWER:
            student = _Student(step.twin, layer, tensors, task.student_share)
            best = _train(student, training, aside, task, slower)
            if best.weights:
                break
    return Refined({**tensors, **best.weights}, best.errors[0], min(best.errors), best.steps, best.step)


class _Student:
    """The converted layer with masters in place of its attention's tensors."""

    def __init__(self, twin: Twin, layer: OpenLayer, tensors: Tensors, share: Share) -> None:
        self.index = layer.index
        self._stream, self._layer, self._share = twin.stream, layer, share
        sources = twin.stream.attention_sources(layer.index)
        self._trained = [source for source in sources if not tensors.keys().isdisjoint(source.names)]
        trained = {name for source in self._trained for name in source.names}
        self.masters = {
            name: tensor.detach().to(self._stream.device, torch.float32, copy=True).requires_grad_()
            for name, tensor in tensors.items()
            if name in trained
        }
        twin.put({**tensors, **self.masters})

    def missing(self, hidden: Tensor, target: Tensor) -> Tensor:
        """What the student's attention adds too much to ``hidden``, ``[b, T, E]``, in float32 or wider."""
        self._stream.reload(self._layer, self._trained)
        added = self._share.of(self._layer, self._layer.attend(hidden))
        wide = torch.promote_types(added.dtype, torch.float32)
        return added.to(wide) - target.to(wide)

    @torch.no_grad()
    def error(self, sequences: Examples) -> float:
        missing = sum(squares(self.missing(*batch)) for batch in sequences.batches())
        return missing / sequences.numbers / sequences.energy if sequences.energy else missing

    def weights(self) -> dict[str, Tensor]:
        return {name: master.detach().to("cpu", copy=True) for name, master in self.masters.items()}


class _Best:
    """The weights with the least error seen."""

    def __init__(self, error: float) -> None:
        self.errors = [error]
        self.weights: dict[str, Tensor] = {}
        self.step = self.steps = 0

    def see(self, error: float, student: _Student, step: int) -> None:
        if error < min(self.errors):
            self.weights, self.step = student.weights(), step
        self.errors.append(error if math.isfinite(error) else math.inf)


def _train(student: _Student, training: Examples, aside: Examples, task: Refinement, slower: float) -> _Best:
    best = _Best(student.error(aside))
    task.tell(student.index, 0, best.errors[0])
    with torch.no_grad():
        paces = task.paces(student.masters)
    rate = slower * min(_RATE, _WIDTH_RATE / math.sqrt(training.inputs[0].shape[-1]))
    optimiser = _optimiser(student.masters, paces, rate)
    batches = picks(training.count, task.seed, student.index)
    for done, share in enumerate(rates(task.steps, best.errors), 1):
        _step(student, optimiser, paces, training, next(batches), share)
        best.steps = done
        if done % ROUND == 0 or done == task.steps:
            best.see(student.error(aside), student, done)
            task.tell(student.index, done, best.errors[-1])
    return best


def _step(
    student: _Student, optimiser: torch.optim.Adam, paces: Tensors, training: Examples, batch: list[int], share: float
) -> None:
    for group in optimiser.param_groups:
        group["lr"] = share * group["scale"]
    missing = student.missing(*training.batch(batch))
    # Divided by the root of the count, not by the count: float16 gradients neither vanish nor overflow; Adam does not
    # see the difference.
    loss = missing.square().sum() / (math.sqrt(missing.numel()) * (training.energy or 1.0))
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    before = {name: student.masters[name].detach().clone() for name in paces}
    optimiser.step()
    with torch.no_grad():
        for name, pace in paces.items():
            student.masters[name].copy_(torch.lerp(before[name], student.masters[name], pace))


def _optimiser(masters: Tensors, paces: Tensors, rate: float) -> torch.optim.Adam:
    """Adam with a rate for each tensor, so that weights of any size move alike; biases go with their weights."""
    sizes = {name: _size(master.detach(), paces.get(name)) for name, master in masters.items()}
    groups = []
    for name, master in masters.items():
        weight = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
        groups.append({"params": [master], "scale": rate * sizes.get(weight, sizes[name])})
    return torch.optim.Adam(groups, lr=rate, betas=_BETAS, eps=_EPS)


def _size(tensor: Tensor, pace: Tensor | None) -> float:
    """Root mean square of the elements that move; 0 without any."""
    free = tensor if pace is None else tensor[pace > 0]
    return float(free.square().mean().sqrt()) if free.numel() else 0.0


def rates(steps: int | str, errors: list[float]) -> Iterator[float]:
    """The rate of every step, relative to the first. ``errors`` grows by one entry after every ``ROUND`` steps.

    A number of steps: falls linearly to zero. ``auto``: each level goes on until a round gains less than 1 %, then the
    rate falls linearly to zero; no more than ``AUTO_STEPS`` in all.
    """
    if isinstance(steps, int):
        yield from (1 - done / steps for done in range(steps))
        return
    rounds = (AUTO_STEPS - _SETTLE) // ROUND
    for level in _LEVELS:
        while rounds:
            yield from repeat(level, ROUND)
            rounds -= 1
            if not errors[-1] < (1 - _AUTO_GAIN) * min(errors[:-1]):
                break
    yield from (_LEVELS[-1] * (1 - done / _SETTLE) for done in range(_SETTLE))


def picks(count: int, seed: int, layer: int) -> Iterator[list[int]]:
    """Batches of the numbers below ``count``, in an order drawn anew every time that all have been used."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    size = min(_BATCH, count)
    while True:
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))
