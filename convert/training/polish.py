"""Polishing: training all converted attention layers jointly to match a teacher's next-token
distributions.

The teacher is the source. The loss is ``KL(teacher || student)`` on calibration text, without
labels. The teacher's residual streams after its last layer are computed for many steps at once; its
head, which is the student's too, yields its logits. Only the converted attention is trained.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvfold.attention.drift.compare import distances
from kvfold.attention.drift.recording import Arguments, Stop
from kvfold.attention.drift.streams import Frame
from kvfold.convert import processes
from kvfold.convert.families.layer_io import Read
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.parameters import WeightMap
from kvfold.convert.stream.stock import empty_model
from kvfold.convert.training.budget import BLOCK_STEPS, LOGITS, POLISH_ROUND, batch_size
from kvfold.convert.training.loop import (
    TrainingResult,
    TrainingTask,
    divergence,
    random_batches,
    train,
)
from kvfold.convert.walk.walk import last_states

# Steps. KL of the model that ships after 60 steps, MLA 24+8 / 40+24 refined: 1 0.1027 / 0.0250, 10
# 0.1045 / 0.0249: flat (bench_polish_constants.py, 2026-11-23)
_WARMUP = 10
# Peak learning rate of one layer at width one and a KL of 1. SmolLM2 (30 layers), MLA 128+64, KL
# after 30 and 60 of 60 steps of 4 x 256 tokens from 0.1369: 2.4 0.1215, 0.1147, 4.8 0.1298, 0.1173;
# layout engine, refined, after 25 of 200 from 0.1286: 1.2 0.1223, 2.4 0.1281, which `slowdown` then
# halves. Reference MHA model at an eighth of its cache, 100 steps: 0.0553 -> 3.6 0.0290, 7 0.0276
# (all 2026-11-23).
_RATE = 2.4
# Parts of a run after each of which the rate is judged, and the least relative gain of one. Model
# that ships, MLA 24+8, 200 steps (bench_polish_constants.py --only _MIN_GAIN --steps 200 --samples
# 700, 2026-11-24): each gains 2 % or more, so that 0 gives the same run as 0.01. The rounds of a
# long run gain less each: judged after every round of 1000 steps, the rate was halved away
# (reference MHA model, MLA 40+24 refined, bench_refine.py --polish 1000, 2026-11-23: 0.0145 ->
# 0.0124; after every eighth, 0.0104).
_RATE_PARTS = 8
_MIN_GAIN = 0.01


class TaughtText(NamedTuple):
    """The sequences ``tokens [N, T]`` and the teacher's residual streams after its last layer,
    ``states [N, T, E]``.
    """

    tokens: Tensor
    states: Tensor


@torch.no_grad()
def run_teacher(
    teacher: CheckpointStream, tokens: Tensor, autocast: torch.dtype | None = None
) -> TaughtText:
    """Run ``teacher`` over ``tokens``, with matrix products of dtype ``autocast``; None means
    float32.
    """
    with torch.autocast(teacher.device.type, autocast, enabled=autocast is not None):
        states = last_states(teacher, tokens)
    return TaughtText(tokens, torch.cat([hidden.to(autocast or hidden.dtype) for hidden in states]))


class TrainingText:
    """Training sequences ``tokens [N, T]`` with the residual streams of ``teacher``.

    These are computed for a block of coming batches at a time, so that memory does not grow with
    the text. Each of several processes takes its share of every batch.
    """

    def __init__(self, teacher: CheckpointStream, tokens: Tensor) -> None:
        self.tokens = tokens
        self._teacher = teacher
        self._coming: list[int] = []
        self._rows: dict[int, int] = {}
        self._states = torch.empty(0)

    def batches(self, steps: int, seed: int) -> Iterator[list[int]]:
        """Yield the indices of ``steps`` batches in random order, and note each block of them at
        its first.
        """
        count, length = self.tokens.shape
        batches = islice(random_batches(count, batch_size(length), seed), steps)
        while block := list(islice(batches, BLOCK_STEPS)):
            own = {index for batch in block for index in processes.shard(batch)}
            self._coming = sorted(own)
            yield from block

    def read(self, indices: list[int]) -> TaughtText:
        """The sequences ``indices``."""
        if not self._rows.keys() >= set(indices):
            self._rows = {index: row for row, index in enumerate(self._coming)}
            coming = self.tokens[self._coming].long()
            self._states = run_teacher(self._teacher, coming, self._teacher.autocast).states
        rows = [self._rows[index] for index in indices]
        return TaughtText(self.tokens[indices].long(), self._states[rows])


def polish(task: "ModelTask", seed: int, saved: Path | None = None) -> Iterator[TrainingResult]:
    """Train ``task``, as `loop.train`; the errors are the held-out KL in nats per token."""
    batches = task.training.batches(task.steps, seed)
    return train(task, batches, POLISH_ROUND, saved)


def polishing_rate(error: float, width: int, layers: int) -> float:
    """The peak learning rate, relative to each tensor's size, for ``layers`` layers with hidden
    size ``width``.

    ``error`` is the KL on held-out sequences before training.
    """
    # Near its minimum the KL grows with the square of the distance, so the distance to the minimum
    # is proportional to the root of the error before training. A higher rate would move a model
    # that is close to its minimum away from it. The changes of all layers add up, and so do those
    # of a matrix's inputs. Rounding may make the error of a lossless model negative.
    return _RATE / layers * min(1.0, math.sqrt(max(error, 0.0))) / math.sqrt(width)


def slowdown(errors: Sequence[float], steps: int) -> float:
    """A factor on the learning rate, halved by each part of the run that does not lower the best
    error by at least 1 %.

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


class ModelTask(TrainingTask):
    """A converted model in memory, whose attention is trained on ``training`` for ``steps`` steps.

    ``config`` is the content of config.json, ``read`` returns a tensor of the checkpoint by name,
    and ``stored`` maps all of them to the dtypes in which they will be saved. Those named
    ``attention`` are trained. The model's final norm and head, which are the teacher's too, turn
    the teacher's residual streams into logits. ``autocast`` is the dtype of matrix products; None
    means float32 everywhere. Set ``constant`` to preserve the latents' constant channel.

    The forward pass runs the stock modules with the master weights rounded to the dtypes in which
    they will be saved, so training and evaluation use the weights that users will load. The decoder
    layers and the head are run separately, so that only the logits of a few positions are in memory
    at a time. Held-out text is evaluated in float32.
    """

    def __init__(
        self,
        config: dict[str, Any],
        read: Read,
        stored: Mapping[str, torch.dtype],
        attention: Collection[str],
        training: TrainingText,
        held_out: TaughtText,
        steps: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
        *,
        constant: bool = False,
    ) -> None:
        self.training = training
        self.held_out = held_out
        self.steps = steps
        self.figures: dict[str, float] = {}
        self.device = device
        self._autocast = autocast
        self._read = read
        self.model = empty_model(config, torch.float32, device)
        self._map = WeightMap(self.model, stored)
        self.sources = [
            source
            for source in self._map.sources.values()
            if not set(attention).isdisjoint(source.names)
        ]
        tensors = {name: read(name) for name in attention}
        super().__init__(tensors, stored, device, constant=constant, by_channel=True)
        self._load_frozen()
        self._frame = Frame(self.model)
        self.layers = len(self._frame.layers)

    def _load_frozen(self) -> None:
        """Load all tensors except the trained ones into the model."""
        loaded: dict[str, Tensor] = {}
        for source in self._map.sources.values():
            if source not in self.sources:
                loaded |= self._map.load(source, self._read, torch.float32, self.device)
        for name, other in self._map.tied.items():
            if name not in loaded and other in loaded:
                loaded[name] = loaded[other]
        for name, tensor in loaded.items():
            path, _, kind = name.rpartition(".")
            module = self.model.get_submodule(path)
            if kind not in module._parameters:
                module._buffers[kind] = tensor
                continue
            # Matrices are kept in the dtype of matrix products: autocast would cast them at every
            # step.
            if self._autocast and tensor.dim() > 1 and not isinstance(module, nn.Embedding):
                tensor = tensor.to(self._autocast)
            module._parameters[kind] = nn.Parameter(tensor, requires_grad=False)

    def learning_rate(self, step: int, errors: Sequence[float]) -> float:
        peak = polishing_rate(errors[0], self.held_out.states.shape[-1], self.layers)
        warmup = min(1.0, (step + 1) / _WARMUP)
        return peak * slowdown(errors, self.steps) * warmup * (1 - step / self.steps)

    def backward(self, batch: list[int]) -> None:
        if own := processes.shard(batch):
            tokens, states = self.training.read(own)
            hidden = self.hidden(tokens)
            # Gradients of the last layer's output add up here, a few positions at a time, and go
            # through the layers once.
            leaf = hidden.detach().requires_grad_()
            for logits, expected, _ in self._predictions(leaf, states):
                loss = divergence(logits.flatten(0, 1), expected.flatten(0, 1))
                (loss / (len(batch) * tokens.shape[1])).backward()  # type: ignore[no-untyped-call]
            hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]

    def error(self) -> float:
        """The mean KL from the teacher's next-token distributions, in nats per token; leaves all
        figures in ``figures``.
        """
        self.figures = processes.broadcast_from_rank0(self._measure)
        return self.figures["kl"]

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        """Means over held-out tokens: ``kl`` from the teacher, ``loss``, ``excess`` over the
        teacher's loss (all in nats), ``top_1_agreement``.
        """
        tokens = self.held_out.tokens
        size = batch_size(tokens.shape[1])
        sums = torch.zeros(4, dtype=torch.float64)
        autocast = self._autocast
        self._autocast = None
        try:
            weights = self._weights()
            wide = _in_float32(self.model)
            for start in range(0, len(tokens), size):
                labels = tokens[start : start + size, 1:].to(self.device)
                hidden = self.hidden(tokens[start : start + size], weights)[:, :-1]
                states = self.held_out.states[start : start + size, :-1]
                for logits, expected, span in self._predictions(hidden, states, wide):
                    sums += distances(expected, logits, labels[:, span]).sum(1).cpu()
        finally:
            self._autocast = autocast
        kl, agreement, teacher_loss, loss = (sums / tokens[:, 1:].numel()).tolist()
        excess = loss - teacher_loss
        return {"kl": kl, "excess": excess, "loss": loss, "top_1_agreement": agreement}

    def hidden(self, tokens: Tensor, weights: list[dict[str, Tensor]] | None = None) -> Tensor:
        """Run the decoder layers on ``tokens [B, T]`` and return the residual stream after them,
        ``[B, T, E]``.
        """
        after: list[Tensor] = []
        trained = weights or self._weights()

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            layer = self._frame.layers[index]
            tensors = trained[index] if self._autocast else _in_float32(layer) | trained[index]
            output = functional_call(layer, tensors, (hidden, *arguments.args), arguments.kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if index == len(self._frame.layers) - 1:
                after.append(hidden)
                raise Stop
            return hidden

        with self._precision():
            self._frame.run(visit, input_ids=tokens.to(self.device))
        return after[0]

    def _weights(self) -> list[dict[str, Tensor]]:
        """The trained parameters of each layer as a reader of the files would form them, by their
        names in it; gradients reach the masters.
        """
        rounded = {name: master.to(self.stored[name]) for name, master in self.masters.items()}
        weights: list[dict[str, Tensor]] = [{} for _ in self._frame.layers]
        for source in self.sources:
            loaded = self._map.load(
                source,
                lambda name: rounded[name] if name in rounded else self._read(name),
                self._autocast or torch.float32,
                self.device,
            )
            for target, tensor in loaded.items():
                index, _, name = target.removeprefix(f"{self._frame.path}.").partition(".")
                weights[int(index)][name] = tensor
        return weights

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None)

    def logits(self, hidden: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Apply the final norm and head to the last layer's output ``[B, T, E]``; returns logits
        ``[B, T, V]``.

        ``tensors`` replace parameters outside the layers by name.
        """
        with self._precision():
            return self._frame.logits(hidden, tensors, inputs_embeds=hidden.detach())

    def _predictions(
        self, hidden: Tensor, states: Tensor, wide: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """The student's and the teacher's logits for spans of positions, short enough to limit the
        memory for them. ``wide`` replaces parameters outside the layers.
        """
        count, length = hidden.shape[:2]
        size = max(1, LOGITS // (count * self.model.get_output_embeddings().weight.shape[0]))
        for start in range(0, length, size):
            span = slice(start, min(start + size, length))
            with torch.no_grad(), self._precision():
                expected = self.logits(states[:, span].to(hidden.device, hidden.dtype), wide)
            yield self.logits(hidden[:, span], wide), expected, span


def _in_float32(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the module's parameters that are kept in fewer bits, by name."""
    parameters = dict(module.named_parameters())
    return {name: p.float() for name, p in parameters.items() if p.element_size() < 4}
