"""Polishing: training all converted attention layers jointly to match a teacher's next-token
distributions.

The teacher is the source. The loss is ``KL(teacher || student)`` on calibration text, without
labels. The teacher's residual streams after its last layer are computed for many steps at once; its
head, which is the student's too, yields its logits. Only the converted attention is trained.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from kvfold.attention.drift.compare import (
    PredictionFigures,
    measure_prediction_drift,
    split_logits,
)
from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.progress import ProgressStages
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.training.budget import BLOCK_STEPS, POLISH_ROUND, choose_batch_size
from kvfold.convert.training.loop import TrainingTask, draw_batches, sum_loss
from kvfold.convert.walk.walk import Student, run_all_layers

# Steps. KL of the model that ships after 60 steps, MLA 24+8 / 40+24 refined: 1 0.1027 / 0.0250, 10
# 0.1045 / 0.0249: flat (measured by a script in git history, 2026-11-23)
_WARMUP = 10
# Peak learning rate of one layer at width one and a KL of 1. SmolLM2 (30 layers), MLA 128+64, KL
# after 30 and 60 of 60 steps of 4 x 256 tokens from 0.1369: 2.4 0.1215, 0.1147, 4.8 0.1298, 0.1173;
# layout engine, refined, after 25 of 200 from 0.1286: 1.2 0.1223, 2.4 0.1281, which
# `compute_plateau_factor` then halves. Reference MHA model at an eighth of its cache, 100 steps:
# 0.0553 -> 3.6 0.0290, 7 0.0276 (all 2026-11-23).
_RATE = 2.4
# Parts of a run after each of which the rate is judged, and the least relative gain of one. Model
# that ships, MLA 24+8, 200 steps (measured by a script in git history, 2026-11-24): each gains 2 %
# or more, so that 0 gives the same run as 0.01. The rounds of a long run gain less each: judged
# after every round of 1000 steps, the rate was halved away (reference MHA model, MLA 40+24 refined,
# measured by a script in git history, 2026-11-23: 0.0145 -> 0.0124; after every eighth, 0.0104).
_RATE_PARTS = 8
_MIN_GAIN = 0.01


class TeacherText(NamedTuple):
    """Token sequences ``tokens [N, T]`` with the teacher's residual streams after its last layer,
    ``states [N, T, E]``.
    """

    tokens: Tensor
    states: Tensor


@torch.no_grad()
def compute_teacher_states(
    teacher: CheckpointStream,
    tokens: Tensor,
    stages: ProgressStages,
    autocast: torch.dtype | None = None,
) -> TeacherText:
    """Return ``tokens [N, T]`` with the residual streams of ``teacher`` after its last layer, in a
    stage ``teacher``. Matrix products have the dtype ``autocast``; None means float32.
    """
    with (
        torch.autocast(teacher.device.type, autocast, enabled=autocast is not None),
        stages("teacher", teacher.layers, "layer") as advance,
    ):
        states = run_all_layers(teacher, tokens, partial(advance, 1))
        width = states[0].shape[-1]
        joined = torch.empty(*tokens.shape, width, dtype=autocast or states[0].dtype)
        # One chunk at a time, so that memory never holds all states twice.
        for rows in torch.split(joined, len(states[0])):
            rows.copy_(states.pop(0))
    return TeacherText(tokens, joined)


class TrainingText:
    """The training sequences ``tokens [N, T]`` for polishing, with the teacher's residual streams
    computed as they are needed.

    These are computed for a block of coming batches at a time, so that memory does not grow with
    the text.
    """

    def __init__(self, teacher: CheckpointStream, tokens: Tensor, stages: ProgressStages) -> None:
        self.tokens = tokens
        self._stages = stages
        self._teacher = teacher
        self._block: list[int] = []
        self._states: Tensor | None = None

    def draw_batches(self, steps: int, seed: int) -> Iterator[list[int]]:
        """Yield the sequence indices of ``steps`` batches in random order; `read` then serves the
        block of batches to which the last one belongs.
        """
        count, length = self.tokens.shape
        batches = islice(draw_batches(count, choose_batch_size(length), seed), steps)
        while block := list(islice(batches, BLOCK_STEPS)):
            self._block = sorted({index for batch in block for index in batch})
            self._states = None
            yield from block

    def read_sequences(self, indices: list[int]) -> TeacherText:
        """Return the sequences ``indices``, which belong to the current block of batches, with the
        teacher's residual streams.
        """
        if self._states is None:
            tokens = self.tokens[self._block].long()
            teacher = self._teacher
            self._states = compute_teacher_states(
                teacher, tokens, self._stages, teacher.autocast
            ).states
        rows = [bisect_left(self._block, index) for index in indices]
        return TeacherText(self.tokens[indices].long(), self._states[rows])


def compute_plateau_factor(errors: Sequence[float], steps: int) -> float:
    """Return a factor on the learning rate: it is halved by each part of the run that does not
    lower the best error by at least 1 %.

    ``errors`` are the held-out errors before training and after every round so far. A run of
    ``steps`` steps has up to eight parts, each an eighth of its rounds, rounded up.
    """
    # How far a model may be moved in a step differs between layouts and with how well it is fitted;
    # the first parts tell.
    ends = errors[:: max(1, math.ceil(steps / POLISH_ROUND / _RATE_PARTS))]
    best = accumulate(ends, min)
    return 0.5 ** sum(
        error > (1 - _MIN_GAIN) * lowest for error, lowest in zip(ends[1:], best, strict=False)
    )


class PolishTask(TrainingTask):
    """The training task of polishing: trains the attention of all ``layers`` of a converted model
    together on ``text`` for ``steps`` steps.

    The student's final norm and head, which are the teacher's too, turn the teacher's residual
    streams into logits. Set ``constant`` to preserve the latents' constant channel.

    The stock modules run with the master weights rounded to the dtypes in which they will be saved,
    so training and evaluation use the weights that users will load. The head is run separately, on
    a block of tokens at a time. ``held_out`` is evaluated in float32.
    Layers that are open in their stored dtypes keep their inputs alone, and run again for their
    gradients.
    """

    def __init__(
        self,
        student: Student,
        layers: Sequence[OpenLayer],
        tensors: Mapping[str, Tensor],
        text: TrainingText,
        held_out: TeacherText,
        steps: int,
        *,
        constant: bool = False,
    ) -> None:
        super().__init__(student, layers, tensors, constant=constant, by_channel=True)
        self.text = text
        self.held_out = held_out
        self.steps = steps
        self.figures: dict[str, float] = {}

    def learning_rate(self, step: int, errors: Sequence[float]) -> float:
        """Return the learning rate after ``step`` steps: smaller the closer the model was to its
        teacher before training.
        """
        # Near its minimum the KL grows with the square of the distance, so the distance to the
        # minimum is proportional to the root of the error before training. A higher rate would move
        # a model that is close to its minimum away from it. The changes of all layers add up, and
        # so do those of a matrix's inputs. Rounding may make the error of a lossless model
        # negative.
        distance = min(1.0, math.sqrt(max(errors[0], 0.0)))
        width = self.held_out.states.shape[-1]
        peak = _RATE / len(self.layers) * distance / math.sqrt(width)
        warmup = min(1.0, (step + 1) / _WARMUP)
        return peak * compute_plateau_factor(errors, self.steps) * warmup * (1 - step / self.steps)

    def backward(self, batch: list[int]) -> None:
        """Add to the master weights the gradients of the KL from the teacher on ``batch``."""
        tokens, states = self.text.read_sequences(batch)
        with self.stream.use_training_precision():
            hidden = self.run_layers(tokens)
            target = states.to(hidden.device, hidden.dtype)
            loss = sum_loss(self.stream, hidden, target, self.stream)
        (loss / tokens.numel()).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def measure_error(self) -> float:
        """Return the mean KL from the teacher's next-token distributions on held-out text, in nats
        per token. ``figures`` then has the means over its tokens: ``kl`` from the teacher,
        ``loss``, ``excess`` over the teacher's loss (all in nats), and ``top_1_agreement``.
        """
        tokens = self.held_out.tokens
        sums = torch.zeros(len(PredictionFigures._fields), dtype=torch.float64)
        size = choose_batch_size(tokens.shape[1])
        chunks = (torch.split(values, size) for values in self.held_out)
        for batch, states in zip(*chunks, strict=True):
            labels = batch[:, 1:].to(self.stream.device)
            hidden = self.run_layers(batch)[:, :-1]
            expected = states[:, :-1].to(hidden.device, hidden.dtype)
            for block in split_logits(hidden, self.stream.vocabulary, hidden.device):
                logits = self.stream.compute_logits(hidden[block])
                teacher_logits = self.stream.compute_logits(expected[block])
                drift = measure_prediction_drift(teacher_logits, logits, labels[block])
                sums += drift.sum((1, 2)).cpu()
        figures = PredictionFigures(*(sums / tokens[:, 1:].numel()).tolist())
        self.figures = {
            "kl": figures.kl,
            "excess": figures.excess,
            "loss": figures.student_loss,
            "top_1_agreement": figures.agreement,
        }
        return self.figures["kl"]

    def run_layers(self, tokens: Tensor) -> Tensor:
        """Return the student's residual stream after the last layer, ``[B, T, E]``, for ``tokens
        [B, T]``, by the master weights.
        """
        hidden = self.stream.embed(tokens)
        for layer in self.layers:
            # Casts of the weights would otherwise stay for the gradients, with all activations.
            if layer.dtype is not None and torch.is_grad_enabled():
                # Errors that end a second pass early would be taken for the config's.
                with set_checkpoint_early_stop(False):
                    hidden = checkpoint(self._run_layer, layer, hidden, use_reentrant=False)
            else:
                hidden = self._run_layer(layer, hidden)
        return hidden

    def _run_layer(self, layer: OpenLayer, hidden: Tensor) -> Tensor:
        """Return the residual stream after ``layer``, ``[B, T, E]``."""
        with self.load_master_weights(layer):
            return layer(hidden).states
