"""Polishing: training all converted attention layers jointly to match a teacher's next-token
distributions.

The teacher is the source. The loss is ``KL(teacher || student)`` on calibration text, without
labels. The teacher's residual streams after its last layer are computed for many steps at once; its
head, which is the student's too, yields its logits. Only the converted attention is trained.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvfold.attention.drift.compare import distances
from kvfold.attention.drift.recording import Arguments, Stop
from kvfold.attention.drift.streams import Frame
from kvfold.convert import processes
from kvfold.convert.families.layer_io import Read
from kvfold.convert.stream.parameters import WeightMap
from kvfold.convert.stream.stock import empty_model
from kvfold.convert.training.budget import BLOCK_STEPS, LOGITS, POLISH_ROUND, batch_size
from kvfold.convert.training.fit import (
    AfterRound,
    FitResult,
    Trainee,
    divergence,
    fit,
    random_batches,
)

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


@dataclass(frozen=True)
class Text:
    """The sequences ``tokens [N, T]`` and the teacher's residual streams after its last layer,
    ``states [N, T, E]``.
    """

    tokens: Tensor
    states: Tensor


class TrainingText:
    """Training sequences ``tokens [N, T]``; ``run(indices)`` returns the teacher's residual streams
    ``[n, T, E]``.

    They are computed for a block of coming batches at a time, so that memory does not grow with the
    text. Each of several processes takes its share of every batch.
    """

    def __init__(self, tokens: Tensor, run: Callable[[list[int]], Tensor]) -> None:
        self.tokens = tokens
        self._run = run
        self._coming: list[int] = []
        self._places: dict[int, int] = {}
        self._states = torch.empty(0)

    def announced(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yield ``batches``; a block of them is announced at its first."""
        while block := list(islice(batches, BLOCK_STEPS)):
            self._coming = sorted({index for batch in block for index in processes.shard(batch)})
            yield from block

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """The tokens and states of the sequences ``indices``."""
        if not self._places.keys() >= set(indices):
            self._places = {index: place for place, index in enumerate(self._coming)}
            self._states = self._run(self._coming)
        return self.tokens[indices].long(), self._states[[self._places[index] for index in indices]]


def polish(
    trainee: "ModelTrainee",
    training: TrainingText,
    held_out: Text,
    steps: int,
    *,
    seed: int = 0,
    saved: Path | None = None,
    progress: AfterRound = lambda fitted: None,
) -> FitResult:
    """Train ``trainee`` for ``steps`` steps; the result's errors are the held-out KL in nats per
    token.

    The training state is written to the file ``saved`` as often as `fit` says; if that file already
    exists, training resumes from it.
    """
    count, length = training.tokens.shape

    def schedule(done: int, errors: Sequence[float]) -> float:
        peak = polishing_rate(errors[0], held_out.states.shape[-1], trainee.layers)
        return peak * slowdown(errors, steps) * min(1.0, (done + 1) / _WARMUP) * (1 - done / steps)

    batches = training.announced(islice(random_batches(count, batch_size(length), seed), steps))
    return fit(
        trainee,
        training,
        held_out,
        schedule,
        batches,
        every=POLISH_ROUND,
        saved=saved,
        progress=progress,
    )


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
        error > (1 - _MIN_GAIN) * least for error, least in zip(ends[1:], best, strict=False)
    )


class ModelTrainee(Trainee):
    """A converted model in memory, with some trainable tensors and everything else frozen.

    ``config`` is the content of config.json, ``names`` are the checkpoint's tensor names, and
    ``read`` returns a tensor by name. ``stored`` maps the tensors to the dtypes in which they will
    be saved; those of the ``attention`` are trained. The model's final norm and head, which are the
    teacher's too, turn the teacher's residual streams into logits. ``autocast`` is the dtype of
    matrix products; None means float32 everywhere. Set ``constant`` to preserve the latents'
    constant channel.

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
        device: torch.device,
        autocast: torch.dtype | None = None,
        *,
        constant: bool = False,
    ) -> None:
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
        super().__init__(
            {name: read(name) for name in attention},
            stored,
            device,
            constant=constant,
            by_channel=True,
        )
        self._load_frozen()
        self._frame = Frame(self.model)
        self.layers = len(self._frame.layers)

    def _load_frozen(self) -> None:
        """Load all tensors except the trained ones into the model."""
        made: dict[str, Tensor] = {}
        for source in self._map.sources.values():
            if source not in self.sources:
                made.update(self._map.load(source, self._read, torch.float32, self.device))
        made.update(
            {
                name: made[other]
                for name, other in self._map.tied.items()
                if name not in made and other in made
            }
        )
        for name, tensor in made.items():
            path, _, kind = name.rpartition(".")
            module = self.model.get_submodule(path)
            if kind not in module._parameters:
                module._buffers[kind] = tensor
                continue
            # Matrices are kept in the dtype of matrix products: autocast would cast them at every
            # step.
            if (
                self._autocast is not None
                and tensor.dim() > 1
                and not isinstance(module, nn.Embedding)
            ):
                tensor = tensor.to(self._autocast)
            module._parameters[kind] = nn.Parameter(tensor, requires_grad=False)

    def backward(self, training: TrainingText, batch: list[int]) -> None:
        """Store a batch's gradients in the masters; with several processes, each computes a share
        of the sequences.
        """
        if own := processes.shard(batch):
            tokens, states = training.batch(own)
            weights = self._weights()
            hidden = self.hidden(tokens, weights)
            # Gradients of the last layer's output add up here, a few positions at a time, and go
            # through the layers once.
            leaf = hidden.detach().requires_grad_()
            for logits, expected, _ in self._predictions(leaf, states):
                loss = divergence(logits.flatten(0, 1), expected.flatten(0, 1))
                (loss / (len(batch) * tokens.shape[1])).backward()  # type: ignore[no-untyped-call]
            hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
        self.sum_gradients()

    def error(self, held_out: Text) -> float:
        """The mean KL from the teacher's next-token distributions on ``held_out``, in nats per
        token.
        """
        return processes.broadcast_from_rank0(lambda: self.figures(held_out)["kl"])

    @torch.no_grad()
    def figures(self, held_out: Text) -> dict[str, float]:
        """``kl`` from the teacher, ``loss``, ``excess`` over the teacher's loss (nats),
        ``top_1_agreement``; means.
        """
        sums = torch.zeros(4, dtype=torch.float64)
        size = batch_size(held_out.tokens.shape[1])
        autocast = self._autocast
        self._autocast = None
        try:
            weights = self._weights()
            wide = _in_float32(self.model)
            for tokens, states in zip(
                *(torch.split(each, size) for each in (held_out.tokens, held_out.states)),
                strict=True,
            ):
                hidden = self.hidden(tokens, weights)[:, :-1]
                labels = tokens[:, 1:].to(self.device)
                for logits, expected, span in self._predictions(hidden, states[:, :-1], wide):
                    sums += distances(expected, logits, labels[:, span]).sum(1).cpu()
        finally:
            self._autocast = autocast
        kl, agreement, expected_loss, loss = (sums / held_out.tokens[:, 1:].numel()).tolist()
        return {
            "kl": kl,
            "excess": loss - expected_loss,
            "loss": loss,
            "top_1_agreement": agreement,
        }

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
        """The trained parameters of each layer as a reader of the files would make them, by their
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
    return {
        name: each.float() for name, each in module.named_parameters() if each.element_size() < 4
    }
