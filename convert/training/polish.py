"""Polishing: all converted attention of a model trained together against its source's next-token distributions.

The loss is ``KL(source || student)`` on calibration text, no labels. The source takes part as its residual streams
after the last layer, made once: its head is the student's. Everything but the converted attention is frozen.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvfold.attention.drift.frame import Arguments, Frame, Stop
from kvfold.convert.stream.stock import empty_model
from kvfold.convert.stream.weights import Read, WeightMap
from kvfold.convert.training.budget import ROUND, batch_size
from kvfold.convert.training.fit import FitResult, Trainee, divergence, fit, random_batches

# Steps. KL of the model that ships after 60 steps, MLA 24+8 / 40+24 refined: 1 0.1027 / 0.0250, 10 0.1045 / 0.0249:
# flat (bench_polish_constants.py)
_WARMUP = 10
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
# Elements. The allocator reuses float32 blocks below 32 MiB instead of mapping them anew.
_LOGITS = 6 << 20


@dataclass(frozen=True)
class Text:
    """Sequences ``tokens [N, T]``, and the source's residual streams after the last layer, ``states [N, T, E]``."""

    tokens: Tensor
    states: Tensor


def polish(
    trainee: "ModelTrainee",
    training: Text,
    held_out: Text,
    steps: int,
    *,
    seed: int = 0,
    saved: Path | None = None,
    progress: Callable[[int, float], None] = lambda step, error: None,
) -> FitResult:
    """Train ``trainee``; the errors are the KL on held-out sequences, nats per token.

    The state of the run is kept in the file ``saved``: where there is one, the run goes on from it.
    """
    count, length = training.tokens.shape

    def schedule(done: int, errors: Sequence[float]) -> float:
        peak = polishing_rate(errors[0], training.states.shape[-1], trainee.layers)
        return peak * slowdown(errors, steps) * min(1.0, (done + 1) / _WARMUP) * (1 - done / steps)

    batches = random_batches(count, batch_size(length), seed)
    return fit(trainee, training, held_out, schedule, batches, every=ROUND, saved=saved, progress=progress)


def polishing_rate(error: float, width: int, layers: int) -> float:
    """The default peak learning rate, relative to the size of each tensor, of a model of ``width`` and ``layers``.

    ``error`` is that before training.
    """
    # Near its minimum the KL grows with the square of the distance, so that the way to go is in proportion to the root
    # of the error before training; with more, a model that was close is thrown away from where it was. What the layers
    # change adds up, as what a matrix's inputs do. Rounding may make the error of a lossless model negative.
    return _RATE / layers * min(1.0, math.sqrt(max(error, 0.0))) / math.sqrt(width)


def slowdown(errors: Sequence[float], steps: int) -> float:
    """Half for every part of a run of ``steps`` that hardly lowered the least error at the end of those before it.

    ``errors`` are those before training and after every round so far; a part is an eighth of the rounds, rounded up.
    """
    # How far a model may be moved in a step differs between layouts and with how well it is fitted; the first parts
    # tell.
    ends = errors[:: max(1, math.ceil(steps / ROUND / _PARTS))]
    best = accumulate(ends, min)
    return 0.5 ** sum(error > (1 - _MIN_GAIN) * least for error, least in zip(ends[1:], best, strict=False))


class ModelTrainee(Trainee):
    """A converted model in memory: its attention as masters, everything else frozen.

    ``config`` is config.json's content, ``names`` are the stored tensors, which ``read`` gives; those in ``trained``,
    with the dtypes that they are stored in, are the masters. ``autocast`` is the dtype of matrix products, None for
    float32 everywhere. ``constant``: the latents have the constant channel, which is kept.

    A forward pass runs the stock modules with the masters rounded to the dtype in which they will be stored, so that
    what is trained and judged is what a reader of the checkpoint will load. The decoder layers and the head are run
    apart: the logits of a few positions at a time are all that is ever in memory.
    """

    def __init__(
        self,
        config: dict[str, Any],
        read: Read,
        names: Mapping[str, object],
        trained: Mapping[str, torch.dtype],
        device: torch.device,
        autocast: torch.dtype | None = None,
        constant: bool = False,
    ) -> None:
        self.device, self._autocast, self._read = device, autocast, read
        self._precision = partial(torch.autocast, device.type, autocast, enabled=autocast is not None)
        self.model = empty_model(config, torch.float32, device)
        self._map = WeightMap(self.model, names)
        self.sources = [source for source in self._map.sources.values() if not trained.keys().isdisjoint(source.names)]
        super().__init__({name: read(name) for name in trained}, trained, device, constant=constant, by_channel=True)
        self._load_frozen()
        self._frame = Frame(self.model)
        self.layers = len(self._frame.layers)

    def _load_frozen(self) -> None:
        """Give the model all tensors but the masters."""
        made: dict[str, Tensor] = {}
        for source in self._map.sources.values():
            if source not in self.sources:
                made.update(self._map.load(source, self._read, torch.float32, self.device))
        made.update({name: made[other] for name, other in self._map.tied.items() if name not in made and other in made})
        for name, tensor in made.items():
            path, _, kind = name.rpartition(".")
            module = self.model.get_submodule(path)
            if kind not in module._parameters:
                module._buffers[kind] = tensor
                continue
            # Matrices are kept in the dtype of matrix products: autocast would cast them at every step.
            if self._autocast is not None and tensor.dim() > 1 and not isinstance(module, nn.Embedding):
                tensor = tensor.to(self._autocast)
            module._parameters[kind] = nn.Parameter(tensor, requires_grad=False)

    def backward(self, training: Text, batch: list[int]) -> None:
        tokens, states = training.tokens[batch], training.states[batch]
        hidden = self.hidden(tokens)
        # The head's gradients add up here, a few positions at a time, and go through the layers once.
        leaf = hidden.detach().requires_grad_()
        for loss in self._divergences(leaf, states):
            (loss / tokens.numel()).backward()  # type: ignore[no-untyped-call]
        hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def error(self, held_out: Text) -> float:
        """Mean KL of the next-token distributions, nats per token."""
        total, size = 0.0, batch_size(held_out.tokens.shape[1])
        for tokens, states in zip(
            *(torch.split(each, size) for each in (held_out.tokens, held_out.states)), strict=True
        ):
            total += sum(float(each) for each in self._divergences(self.hidden(tokens), states))
        return total / held_out.tokens.numel()

    def hidden(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` -> the residual stream after the last layer, ``[B, T, E]``."""
        after: list[Tensor] = []
        weights: list[dict[str, Tensor]] = [{} for _ in self._frame.layers]

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            layer = self._frame.layers[index]
            output = functional_call(layer, weights[index], (hidden, *arguments.args), arguments.kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if index == len(self._frame.layers) - 1:
                after.append(hidden)
                raise Stop
            return hidden

        # The trained parameters of every layer, as a reader of the files would make them; gradients pass.
        rounded = {name: master.to(self.stored[name]) for name, master in self.masters.items()}
        for source in self.sources:
            made = self._map.load(
                source,
                lambda name: rounded[name] if name in rounded else self._read(name),
                self._autocast or torch.float32,
                self.device,
            )
            for target, tensor in made.items():
                index, _, name = target.removeprefix(f"{self._frame.path}.").partition(".")
                weights[int(index)][name] = tensor
        with self._precision():
            self._frame.run(visit, input_ids=tokens.to(self.device))
        return after[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer, ``[B, T, E]`` -> logits ``[B, T, V]``."""
        with self._precision():
            return self._frame.logits(hidden, inputs_embeds=hidden.detach())

    def _divergences(self, hidden: Tensor, states: Tensor) -> Iterator[Tensor]:
        """The sums of ``KL(source || student)`` over stretches of positions, each as long as memory allows."""
        count, length = hidden.shape[:2]
        size = max(1, _LOGITS // (count * self.model.get_output_embeddings().weight.shape[0]))
        for start in range(0, length, size):
            part = hidden[:, start : start + size]
            with torch.no_grad():
                expected = self.logits(states[:, start : start + size].to(part.device, part.dtype))
            yield divergence(self.logits(part).flatten(0, 1), expected.flatten(0, 1))
