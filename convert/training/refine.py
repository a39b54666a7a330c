"""Refinement: training one layer's converted attention on calibration text to match the source's,
without labels.

A step runs the converted model's stock attention module on a batch of the student's inputs, with
the layer's master weights rounded to the dtype in which they will be saved. The attention update
``a`` is what the layer adds to the residual stream: the attention output times the family's
residual scale, normalized in some families (olmo2, gemma). With ``h`` and ``h'`` the teacher's and
the student's residuals before the layer, the target of the student's update is

    target = (h + a(h)) - h'

so that a layer also corrects the errors of earlier layers. The loss is the squared error against
the target, relative to the teacher's attention update, with each token weighted by the inverse of
its residual's size (`compute_token_weights`): otherwise the few tokens with massive activations, in
the teacher or the student, would dominate.

Memory holds one layer of each model, the master weights and Adam's moments.
"""

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attention.drift.compare import sum_squares
from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.training.budget import choose_refine_batch_size
from kvfold.convert.training.loop import TrainingResult, TrainingTask, draw_batches, train
from kvfold.convert.walk.output_fit import UNCHANGED, AttentionUpdate, compute_token_weights
from kvfold.convert.walk.walk import Student, WalkLayer

# Chosen, not tuned: the steps between two evaluations on held-out sequences, and the most that
# ``auto`` spends on a layer, ten of these rounds.
REFINE_ROUND = 50
MOST_STEPS = 500
# Figures: excess loss (nats per token) of the model that ships, measured by a script in git
# history: MQA / MLA 24+8 after 40 steps, or MQA by auto with at most 400 steps, on 64 sequences of
# 64 tokens. Without a date: 2026-11-22. auto: 50 steps +0.0314, 100 +0.0321, 200 +0.0324: flat, and
# a layer that gains little takes 100 steps, not 150
_DECAY_STEPS = 50  # the last steps of ``auto``, in which the learning rate falls to zero
# auto: 0.003 +0.0311, 0.01 +0.0321, 0.03 +0.0317: flat; larger means fewer steps (350, 338, 325).
# Reference MHA model, MLA 40+24, most of whose error comes from earlier layers (measured by a
# script in git history, 2026-11-23): 0.03 +0.0091, 0.01 +0.0085, in 1.25 times the time.
MIN_GAIN = 0.01  # relative; after a round that gains less the learning rate falls
# 0.0125: +0.0383 / +0.0726, 0.05: +0.0338 / +0.0649 (2026-11-24); at a width of 256 _WIDTH_LR gives
# the same rate
_RELATIVE_LR = 0.05  # relative to the root mean square of the tensor
_WIDTH_LR = 0.8  # the same times the root of the model's width: Adam's steps of all inputs add up
# 0 against 0.5, two seeds, 2026-11-24: +0.0353 and +0.0219 / +0.0543 and +0.0361, +0.0338 and
# +0.0145 / +0.0649 and +0.0436; reference MHA model (--model) +0.0479 and +0.0642 / +0.1159 and
# +0.1416, +0.0466 and +0.0675 / +0.1204 and +0.1416: MLA 24+8 prefers 0, MQA mostly 0.5, and
# neither by more than the seeds differ
_ERROR_POWER = 0.5  # the same times this power of the error before training, where that is below 1
# 1.0 alone: MQA as with all three: no layer fails at 0.05. At 0.2 all do; a quarter of it is 0.05
# again
_RETRY_LR = (
    1.0,
    0.25,
    0.0625,
)  # a layer that got no better is trained again with a lower learning rate

TensorMap = Mapping[str, Tensor]


@dataclass(frozen=True)
class RefineSettings:
    """The settings of refinement that all layers of a run share. ``steps`` is the number of steps
    per layer, or ``"auto"``.

    ``update`` and ``student_update`` define how the teacher's and the student's layers add
    attention outputs to the residual. Set ``constant`` for a student in layout ``free``, to
    preserve its constant channel.
    """

    steps: int | str
    seed: int = 0
    update: AttentionUpdate = UNCHANGED
    student_update: AttentionUpdate = UNCHANGED
    constant: bool = False


def refine_layer(
    walk_layer: WalkLayer, tensors: TensorMap, settings: RefineSettings
) -> TrainingResult:
    """Train the attention tensors among ``tensors`` of the layer of ``walk_layer``, so that it
    matches the source's. Returns all ``tensors``, refined if that lowered the held-out error.

    The errors are ``||missing||^2 / ||added||^2`` on held-out sequences: the difference between the
    student's and the teacher's residuals after the attention, relative to the teacher's attention
    update, with each token weighted by the inverse of its residual size.
    """
    teacher = walk_layer.teacher
    with walk_layer.student.stream.use_training_precision():
        training = make_examples(
            settings.update,
            teacher.layer,
            zip(teacher.calibration, teacher.attention, walk_layer.calibration, strict=True),
        )
    count = sum(len(chunk.inputs) for chunk in training.chunks)
    attention = [output.attention for output in teacher.outputs]
    chunks = zip(teacher.held_out, attention, walk_layer.held_out, strict=True)
    held_out = make_examples(settings.update, teacher.layer, chunks)
    walk_layer.student.set_layer_tensors(tensors)
    with walk_layer.student.stream.open_layer(walk_layer.index) as layer:
        for learning_rate_scale in _RETRY_LR:
            task = RefineTask(
                walk_layer.student,
                layer,
                tensors,
                settings,
                training,
                held_out,
                learning_rate_scale,
            )
            # Each layer has its own order of the sequences.
            seed = settings.seed * 1_000_003 + walk_layer.index
            size = choose_refine_batch_size(training.chunks[0].inputs.shape[1])
            *_, result = train(task, draw_batches(count, size, seed), REFINE_ROUND)
            # The optimizer and its hooks refer to each other: gigabytes would stay.
            del task
            gc.collect()
            if result.best_step:
                break
    return replace(result, tensors={**tensors, **result.tensors})


def compute_learning_rate_factor(steps: int | str, step: int, errors: Sequence[float]) -> float:
    """Return the learning rate after ``step`` steps of refinement, relative to its peak; 0 ends the
    training.

    For a number of ``steps`` the rate falls linearly to zero. For ``"auto"`` it is constant until a
    round lowers the best error by less than ``MIN_GAIN``, then falls linearly to zero, within
    ``MOST_STEPS`` steps in all.
    """
    if isinstance(steps, int):
        return 1 - step / steps
    most = (MOST_STEPS - _DECAY_STEPS) // REFINE_ROUND
    rounds = range(1, min(len(errors) - 1, most) + 1)
    settled = (i for i in rounds if not errors[i] < (1 - MIN_GAIN) * min(errors[:i]))
    falls = REFINE_ROUND * next(settled, most)
    return 1.0 if step < falls else 1 - (step - falls) / _DECAY_STEPS


class RefineTask(TrainingTask):
    """The training task of refinement: trains the attention of one open converted layer on the
    sequences ``training``; ``learning_rate_scale`` multiplies the learning rate.
    """

    def __init__(
        self,
        student: Student,
        layer: OpenLayer,
        tensors: TensorMap,
        settings: RefineSettings,
        training: "RefineExamples",
        held_out: "RefineExamples",
        learning_rate_scale: float = 1.0,
    ) -> None:
        super().__init__(student, [layer], tensors, constant=settings.constant)
        self._settings = settings
        self._training = training
        self._held_out = held_out
        self._learning_rate_scale = learning_rate_scale

    def learning_rate(self, step: int, errors: Sequence[float]) -> float:
        """Return the learning rate after ``step`` steps, relative to the size of each tensor; 0
        ends the training.
        """
        width = self._training.chunks[0].inputs.shape[-1]
        # The smaller the error before training is, the smaller the steps must be.
        distance = min(1.0, math.pow(errors[0], _ERROR_POWER))
        peak = min(_RELATIVE_LR, _WIDTH_LR / math.sqrt(width)) * distance
        return (
            self._learning_rate_scale
            * peak
            * compute_learning_rate_factor(self._settings.steps, step, errors)
        )

    def backward(self, batch: list[int]) -> None:
        """Add to the master weights the gradients of the squared error on ``batch``."""
        training = self._training
        size = len(training.chunks[0].inputs)
        rows = [divmod(index, size) for index in batch]
        examples = [[states[row] for states in training.chunks[chunk]] for chunk, row in rows]
        with self.stream.use_training_precision():
            missing = self._compute_error(
                ExampleChunk(*map(torch.stack, zip(*examples, strict=True)))
            )
        # Divided by the root of the count, not by the count: float16 gradients neither vanish nor
        # overflow, and Adam does not see the difference.
        scale = math.sqrt(missing.numel()) * (training.energy or 1.0)
        (missing.square().sum() / scale).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def measure_error(self) -> float:
        """Return the squared error on held-out sequences, relative to the size of the teacher's
        attention update.
        """
        chunks = self._held_out.chunks
        elements = sum(chunk.targets.numel() for chunk in chunks)
        missing = float(sum(sum_squares(self._compute_error(chunk)) for chunk in chunks))
        return missing / elements / (self._held_out.energy or 1 / elements)

    def _compute_error(self, chunk: "ExampleChunk") -> Tensor:
        """Return the student's attention update minus its target, times each token's weight, ``[b,
        T, E]`` in float32 or wider.
        """
        (layer,) = self.layers
        with self.load_master_weights(layer):
            added = self._settings.student_update.compute_update(
                layer, layer.attend(chunk.inputs).attention
            )
        wide = torch.promote_types(added.dtype, torch.float32)
        return (added.to(wide) - chunk.targets.to(wide)) * chunk.weights.to(wide)


class ExampleChunk(NamedTuple):
    """A few training sequences for refining a layer: the student's inputs and the attention updates
    to learn.

    inputs    the student's residuals before the layer, ``[b, T, E]``
    targets   the updates that its attention should add to them, ``[b, T, E]``
    weights   the factors on the tokens' errors, ``[b, T, 1]``
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True)
class RefineExamples:
    """All training or held-out sequences for refining a layer, with the size of the teacher's
    attention update.

    chunks  the sequences in the walk's chunks
    energy  the weighted mean square of the teacher's attention update
    """

    chunks: list[ExampleChunk]
    energy: float


@torch.no_grad()
def make_examples(
    update: AttentionUpdate, layer: OpenLayer, chunks: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> RefineExamples:
    """Return the sequences on which a layer is refined or evaluated.

    A chunk has the teacher's residual stream before the teacher's ``layer``, its attention's
    output, and the student's residual stream; ``update`` is the teacher's.
    """
    examples: list[ExampleChunk] = []
    energy = 0.0
    device = next(iter(layer.tensors.values())).device
    # Every step draws from all chunks: they stay on the device.
    for inputs, attention, student_inputs in (
        [states.to(device) for states in chunk] for chunk in chunks
    ):
        added = update.compute_update(layer, attention)
        wide = torch.promote_types(added.dtype, torch.float32)
        residual = inputs.to(wide)
        student_residual = student_inputs.to(wide)
        added = added.to(wide)
        weights = compute_token_weights(residual + added, student_residual)
        targets = (added + (residual - student_residual)).to(student_inputs.dtype)
        examples.append(ExampleChunk(student_inputs, targets, weights))
        energy += float(sum_squares(added * weights))
    return RefineExamples(examples, energy / sum(chunk.targets.numel() for chunk in examples))
