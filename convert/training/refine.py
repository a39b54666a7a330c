"""Refinement: a layer's converted attention trained on calibration text to match the source's. No labels.

The layer's tensors, in the terms of the files, are float32 masters under Adam. A step runs the stock attention module
of the converted model with them, rounded to the dtype that will be stored and computed in the stream's, on a batch of
the student's inputs; the loss is the mean squared error of the student's residual stream against the teacher's, each
token's relative to its residual, all relative to the teacher's attention update (``objective.py``). Gradients reach
the masters through the read of a stored tensor by name (``stream/stream.py``). Held-out sequences decide: the best
weights seen on them are kept, those before training included. In memory are a layer of either model, the masters and
their moments.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert import processes
from kvfold.convert.device import bfloat16_pays
from kvfold.convert.errors import KvfoldError
from kvfold.convert.training.batches import random_batches
from kvfold.convert.training.objective import Batch, Examples, examples, squares
from kvfold.convert.walk.output_fit import UNCHANGED, AttentionUpdate
from kvfold.convert.walk.walk import Step, Student

ROUND = 50  # steps between two evaluations on held-out sequences
AUTO_STEPS = 500  # the most that ``auto`` spends on a layer
# Figures: excess loss (nats per token) of the model that ships, by recipes/benchmarks/bench_refine_constants.py;
# MQA / MLA 24+8 after 40 steps, or MQA by auto with at most 400 steps, on 64 sequences of 64 tokens.
# auto: 50 steps +0.0314, 100 +0.0321, 200 +0.0324: flat, and a layer that gains little takes 100 steps, not 150
_DECAY_STEPS = 50  # the last steps of ``auto``, in which the learning rate falls to zero
# auto: 0.003 +0.0311, 0.01 +0.0321, 0.03 +0.0317: flat; larger means fewer steps (350, 338, 325). An MHA model of 6
# layers, MLA 40+24, most of whose error was inherited: 0.03 +0.0091, 0.01 +0.0085, in 1.25 times the time.
MIN_GAIN = 0.01  # relative; after a round that gains less the learning rate falls
# 2: +0.0446 / +0.1545, 8: +0.0341 / +0.0731, 32: +0.0388 / +0.0670, in 1.6 to 2 times the time of 8
_BATCH = 8
# 0.0125: +0.0337 / +0.0773, 0.05: +0.0341 / +0.0731; at a width of 256 _WIDTH_LR gives the same rate
_RELATIVE_LR = 0.05  # relative to the root mean square of the tensor
_WIDTH_LR = 0.8  # the same times the root of the model's width: Adam's steps of all inputs add up
# 0: +0.0296 / +0.0651, 0.5: +0.0353 / +0.0738, 0.75: +0.0364 / +0.0767. Small models that are far off want 0; the close
# fits of trained ones are spoiled by it
_ERROR_POWER = 0.5  # the same times this power of the error before training, where that is below 1
# 1.0 alone: +0.0341 on MQA, as with all three: no layer fails at 0.05. At 0.2 all do; a quarter of it is 0.05 again
_RETRY_LR = (1.0, 0.25, 0.0625)  # a layer that got no better is trained again with a lower learning rate
# second: 0.95 +0.0341 / +0.0718, 0.98 +0.0341 / +0.0731, 0.999 +0.0341 / +0.0738: flat
_BETAS = (0.9, 0.98)
_EPS = 1e-12  # gradients of a relative error are small

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Refinement:
    """The settings that the layers of a run share. ``steps`` is a number per layer or ``"auto"``.

    ``update`` and ``student_update`` say how the teacher's and the student's layers add their attention to the
    residual. ``lr_multipliers`` gives, for a layer's tensors, the learning rate of each element relative to the rest of
    its tensor: 0 freezes it; tensors without an entry move evenly. ``progress(layer, step, error)`` is called with
    the error on held-out sequences.
    """

    steps: int | str
    seed: int = 0
    update: AttentionUpdate = UNCHANGED
    student_update: AttentionUpdate = UNCHANGED
    lr_multipliers: Callable[[Tensors], Tensors] = lambda tensors: {}
    progress: Callable[[int, int, float], None] = lambda layer, step, error: None


@dataclass(frozen=True)
class Refined:
    """A layer's tensors and its error on held-out sequences, before and after.

    The error is ``||missing||^2 / ||added||^2``: the difference of the two residual streams over the teacher's
    attention update, token by token relative to the residual. In the same unit are ``inherited``, the difference
    before the layer, which one attention can hardly mend, and ``own``, that of the attention's update after
    refinement. Of the ``steps`` made, ``kept`` is the one whose weights these are, 0 for those before training.
    """

    tensors: Tensors
    before: float
    after: float
    inherited: float
    own: float
    steps: int
    kept: int

    def record(self) -> dict[str, Any]:
        """For ``kvfold.json``."""
        return {name: value for name, value in vars(self).items() if name != "tensors"}


def refine_layer(step: Step, tensors: Tensors, task: Refinement) -> Refined:
    """Train those of ``tensors`` that the attention module of ``step``'s layer is made of.

    Raises KvfoldError in a walk that does not keep the calibration sequences.
    """
    if not step.calibration:
        raise KvfoldError("refinement needs a walk that keeps the calibration sequences")
    training = examples(task.update, step.teacher, step.calibration, step.student_calibration, shared=True)
    held_out = examples(task.update, step.teacher, step.held_out, step.student_held_out)
    step.student.put(tensors)
    with step.student.stream.open_layer(step.index) as layer:
        for lr_decay in _RETRY_LR:
            student = _Student(step.student, layer, tensors, task.student_update)
            trial = _train(student, training, held_out, task, lr_decay)
            if trial.kept:
                break
        made = {**tensors, **trial.weights}
        step.student.put(made)
        own = student.error(examples(task.update, step.teacher, step.held_out, step.student_held_out, correct=False))
    inherited = held_out.inherited / held_out.energy if held_out.energy else held_out.inherited
    return Refined(made, trial.errors[0], min(trial.errors), inherited, own, trial.steps, trial.kept)


class _Student:
    """The converted layer with float32 masters in place of its attention's tensors."""

    def __init__(self, twin: Student, layer: OpenLayer, tensors: Tensors, update: AttentionUpdate) -> None:
        self.index = layer.index
        self._stream, self._layer, self._update = twin.stream, layer, update
        sources = twin.stream.attention_sources(layer.index)
        self._trained = [source for source in sources if not tensors.keys().isdisjoint(source.names)]
        trained = {name for source in self._trained for name in source.names}
        self.masters = {
            name: tensor.detach().to(self._stream.device, torch.float32, copy=True).requires_grad_()
            for name, tensor in tensors.items()
            if name in trained
        }
        twin.put({**tensors, **self.masters})
        stored = {twin.stored_dtype(name) for name in self.masters}
        self._bfloat16 = bfloat16_pays(self._stream.device, stored)

    def missing(self, hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """The student's attention update of ``hidden`` minus its ``target``, times ``weight``, in float32 or wider."""
        self._stream.reload(self._layer, self._trained)
        added = self._update.of(self._layer, self._layer.attend(hidden))
        wide = torch.promote_types(added.dtype, torch.float32)
        return (added.to(wide) - target.to(wide)) * weight.to(wide)

    def loss(self, batch: Batch, energy: float) -> Tensor:
        """The loss of a training step over ``batch``."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16):
            missing = self.missing(*batch)
        # Divided by the root of the count, not by the count: float16 gradients neither vanish nor overflow; Adam does
        # not see the difference.
        return missing.square().sum() / (math.sqrt(missing.numel()) * (energy or 1.0))

    def gradients(self, training: Examples, sequences: Sequence[int]) -> None:
        """Leave the gradients of a step over ``sequences`` in the masters; several processes share these out."""
        own = [index for index in sequences if index in training.own]
        if own:
            energy = training.energy * math.sqrt(len(sequences) / len(own))  # the count is that of all sequences
            self.loss(training.batch(own), energy).backward()  # type: ignore[no-untyped-call]
        for master in self.masters.values():
            master.grad = torch.zeros_like(master) if master.grad is None and not own else master.grad
        processes.add_up(master.grad for master in self.masters.values() if master.grad is not None)

    def error(self, sequences: Examples) -> float:
        """The error on held-out ``sequences``, as the first process finds it."""
        return processes.from_first(lambda: self._error(sequences))

    @torch.no_grad()
    def _error(self, sequences: Examples) -> float:
        missing = sum(squares(self.missing(*batch)) for batch in sequences.batches())
        return missing / sequences.numbers / sequences.energy if sequences.energy else missing

    def weights(self) -> dict[str, Tensor]:
        return {name: master.detach().to("cpu", copy=True) for name, master in self.masters.items()}


class _Trial:
    """One training of a layer: the errors on held-out sequences, and the weights with the least, made in step ``kept``.

    ``kept`` is 0, and ``weights`` empty, while nothing is better than the weights before training.
    """

    def __init__(self, error: float) -> None:
        self.errors = [error]
        self.weights: dict[str, Tensor] = {}
        self.kept = self.steps = 0

    def evaluate(self, error: float, student: _Student, step: int) -> None:
        if error < min(self.errors):
            self.weights, self.kept = student.weights(), step
        self.errors.append(error if math.isfinite(error) else math.inf)


def _train(student: _Student, training: Examples, held_out: Examples, task: Refinement, lr_decay: float) -> _Trial:
    trial = _Trial(student.error(held_out))
    task.progress(student.index, 0, trial.errors[0])
    with torch.no_grad():
        multipliers = task.lr_multipliers(student.masters)
    optimizer = _optimizer(
        student.masters, multipliers, lr_decay * first_lr(training.inputs[0].shape[-1], trial.errors[0])
    )
    slowed = [_slowed(student.masters[name], multiplier) for name, multiplier in multipliers.items()]
    batches = sample_batches(training.count, task.seed, student.index)
    for step, lr in enumerate(lr_schedule(task.steps, trial.errors), 1):
        _step(student, optimizer, slowed, training, next(batches), lr)
        trial.steps = step
        if step % ROUND == 0 or step == task.steps:
            trial.evaluate(student.error(held_out), student, step)
            task.progress(student.index, step, trial.errors[-1])
    return trial


@dataclass(frozen=True)
class _Slowed:
    """The ``elements`` of a ``master``, by their number, that learn more slowly than the rest of it."""

    master: Tensor
    elements: Tensor
    multipliers: Tensor


def _slowed(master: Tensor, multiplier: Tensor) -> _Slowed:
    elements = (multiplier.flatten() != 1).nonzero().squeeze(1)
    return _Slowed(master.detach(), elements, multiplier.flatten()[elements])


def _step(
    student: _Student,
    optimizer: torch.optim.Adam,
    slowed: Sequence[_Slowed],
    training: Examples,
    sequences: Sequence[int],
    lr: float,
) -> None:
    """One step of Adam; ``lr`` is relative to each tensor's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    optimizer.zero_grad(set_to_none=True)
    student.gradients(training, sequences)
    before = [slow.master.view(-1)[slow.elements] for slow in slowed]
    optimizer.step()
    for slow, value in zip(slowed, before, strict=True):
        flat = slow.master.view(-1)
        flat[slow.elements] = torch.lerp(value, flat[slow.elements], slow.multipliers)


def _optimizer(masters: Tensors, multipliers: Tensors, lr: float) -> torch.optim.Adam:
    """Adam with a learning rate for each tensor, so that weights of any size move alike; biases as their weights."""
    sizes = {name: _size(master.detach(), multipliers.get(name)) for name, master in masters.items()}
    groups = []
    for name, master in masters.items():
        weight = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
        groups.append({"params": [master], "scale": lr * sizes.get(weight, sizes[name])})
    return torch.optim.Adam(groups, lr=lr, betas=_BETAS, eps=_EPS, fused=True)


def first_lr(width: int, error: float) -> float:
    """First learning rate in a model of ``width``, relative to the root mean square of a tensor.

    ``error`` is that before training: weights that are nearly right must not be moved far.
    """
    return default_lr(width) * min(1.0, math.pow(error, _ERROR_POWER))


def default_lr(width: int) -> float:
    """Highest learning rate in a model of ``width``, relative to the root mean square of a tensor."""
    return min(_RELATIVE_LR, _WIDTH_LR / math.sqrt(width))


def _size(tensor: Tensor, multiplier: Tensor | None) -> float:
    """Root mean square of the elements that are not frozen; 0 without any."""
    free = tensor if multiplier is None else tensor[multiplier > 0]
    return float(free.square().mean().sqrt()) if free.numel() else 0.0


def lr_schedule(steps: int | str, errors: list[float]) -> Iterator[float]:
    """The learning rate of every step, relative to the first. ``errors`` grows by one after every ``ROUND`` steps.

    A number of steps: falls linearly to zero. ``auto``: constant until a round gains less than ``MIN_GAIN``, then
    linearly to zero; no more than ``AUTO_STEPS`` in all.
    """
    if isinstance(steps, int):
        yield from (1 - done / steps for done in range(steps))
        return
    for _ in range((AUTO_STEPS - _DECAY_STEPS) // ROUND):
        yield from repeat(1.0, ROUND)
        if not errors[-1] < (1 - MIN_GAIN) * min(errors[:-1]):
            break
    yield from (1 - done / _DECAY_STEPS for done in range(_DECAY_STEPS))


def sample_batches(count: int, seed: int, layer: int) -> Iterator[list[int]]:
    """Batches of the numbers below ``count`` for the refinement of ``layer``."""
    return random_batches(count, _BATCH, seed * 1_000_003 + layer)
