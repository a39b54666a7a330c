"""The losses, and the training loop shared by refinement and polishing.

Refinement (``refine.py``) fits one layer to the source layer's outputs; polishing (``polish.py``)
fits all layers to the source's next-token distributions. Each is a `TrainingTask`, which `train`
runs. Uptraining uses the same losses and step sizes (``steps.py``).
"""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from kvfold.attention.drift.compare import split_logits
from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.checkpoint.atomic import replace_file
from kvfold.convert.errors import summarize_error
from kvfold.convert.training.steps import (
    freeze_constant_channel,
    measure_channel_scales,
    measure_tensor_rms,
    scale_adam_steps,
)
from kvfold.convert.walk.walk import Student

# The model that ships. Second moment 0.95 and 0.999, refined: MQA +0.0338 and +0.0335; MLA 24+8
# +0.0649 and +0.0645 nats per token (measured by a script in git history, 2026-11-24): flat.
# Polished: 0.95 KL 0.1045, 0.99 0.1059 (measured by a script in git history, 2026-11-23).
BETAS = (0.9, 0.95)
# Chosen, not tuned: gradients of a relative error over many tokens are small; Adam's default of
# 1e-8 would shorten their steps.
_EPS = 1e-12

# Seconds of training for each second that writing the state took: a 7B model's is tens of GB, a
# round of it seconds on a GPU. Chosen, not tuned.
_SAVING = 20


class TrainingTask(ABC):
    """What `train` trains: float32 master copies of the attention tensors of open layers, with Adam
    steps relative to each tensor's size. Subclasses define the loss.

    ``tensors`` are the computed tensors of the ``layers`` of ``student``, named as in its files;
    those in a layer's attention are trained. Set ``constant`` for tensors in layout ``free``, to
    preserve their constant channel. With ``by_channel``, steps are also relative to the sizes of
    rows and columns.
    """

    def __init__(
        self,
        student: Student,
        layers: Sequence[OpenLayer],
        tensors: Mapping[str, Tensor],
        *,
        constant: bool = False,
        by_channel: bool = False,
    ) -> None:
        self.stream = student.stream
        self.layers = layers
        self.sources = {
            layer.index: [
                source
                for source in self.stream.list_attention_sources(layer.index)
                if not tensors.keys().isdisjoint(source.names)
            ]
            for layer in layers
        }
        self.stored = student.dtypes
        self.masters: dict[str, nn.Parameter] = {}
        for sources in self.sources.values():
            for name in chain.from_iterable(source.names for source in sources):
                master = tensors[name].detach().to(self.stream.device, torch.float32, copy=True)
                self.masters[name] = nn.Parameter(master)
        student.set_layer_tensors({**tensors, **self.masters})
        slices = freeze_constant_channel(self.masters) if constant else {}
        trained = {name: m for name, m in self.masters.items() if m.requires_grad}
        channels = measure_channel_scales(trained, slices) if by_channel else {}
        self.optimizer = torch.optim.Adam(
            trained.values(), lr=1.0, betas=BETAS, eps=_EPS, fused=True
        )
        scale_adam_steps(
            self.optimizer,
            trained,
            measure_tensor_rms(trained, slices),
            slices,
            channels,
        )

    def load_master_weights(self, layer: OpenLayer) -> AbstractContextManager[None]:
        """Return a context manager that copies the master weights into ``layer``, rounded to the
        dtypes in which they will be stored; gradients flow back to the masters.
        """
        return self.stream.reload_parameters(layer, self.sources[layer.index])

    @abstractmethod
    def learning_rate(self, step: int, errors: Sequence[float]) -> float:
        """Return the learning rate after ``step`` steps, relative to the size of each tensor; 0
        ends the training.

        ``errors`` are those of all rounds so far, the one before training included.
        """

    @abstractmethod
    def backward(self, batch: list[int]) -> None:
        """Add to the master weights the gradients of the loss on the training sequences
        ``batch``.
        """

    @abstractmethod
    def measure_error(self) -> float:
        """Return the error on the held-out sequences."""


@dataclass
class TrainingResult:
    """The best weights of a training so far, chosen by the error on held-out sequences, and how it
    went.

    tensors    on the CPU, in the dtypes in which they will be saved; empty if training never helped
    errors     before training and after every round
    steps      number of steps that were run
    best_step  the step after which the weights were ``tensors``; 0 if training never helped
    curve      further figures of some rounds, for the caller to add to
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    steps: int = 0
    best_step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """Return the entry about this training for ``kvfold.json``, without its curve."""
        return {
            "before": self.errors[0],
            "after": min(self.errors),
            "steps": self.steps,
            "kept": self.best_step,
        }


def train(
    task: TrainingTask, batches: Iterator[list[int]], every: int, saved: Path | None = None
) -> Iterator[TrainingResult]:
    """Train ``task`` until its learning rate is 0. Yields the result so far before training and
    after each step; the errors are measured after every ``every`` steps and the last one.

    The training state is written to the file ``saved`` after the first and the last round, and
    between them as often as writing takes a small part of the time; if that file already exists,
    training resumes from it.
    """
    optimizer = task.optimizer
    result = None
    if saved is not None and saved.is_file():
        result = _load_state(task, saved)
    if result is None:
        result = TrainingResult(errors=[task.measure_error()])
    yield result
    groups = optimizer.param_groups
    next_save = 0.0
    batches = islice(batches, result.steps, None)
    rate = task.learning_rate(result.steps, result.errors)
    while rate > 0:
        task.backward(next(batches))
        for group in groups:
            (master,) = group["params"]
            group["lr"] = rate * group["size"]
            # One at a time: a step keeps a copy of its tensors (`scale_adam_steps`).
            optimizer.param_groups = [group]
            optimizer.step()
            master.grad = None
        optimizer.param_groups = groups
        result.steps += 1
        rate = task.learning_rate(result.steps, result.errors)
        if result.steps % every and rate > 0:
            yield result
            continue
        error = task.measure_error()
        if error < min(result.errors):
            result.best_step = result.steps
            result.tensors = {
                name: master.detach().to("cpu", task.stored[name], copy=True)
                for name, master in task.masters.items()
            }
        # Weights that are no longer finite give no number to compare with.
        result.errors.append(error if math.isfinite(error) else math.inf)
        yield result
        rate = task.learning_rate(result.steps, result.errors)
        if saved is None or (rate and time.monotonic() < next_save):
            continue
        began = time.monotonic()
        state = {**vars(result), "masters": task.masters, "optimizer": optimizer.state_dict()}
        with replace_file(saved) as new:
            torch.save(state, new)
        next_save = time.monotonic() + _SAVING * (time.monotonic() - began)


def _load_state(task: TrainingTask, saved: Path) -> TrainingResult | None:
    """Load the masters and the optimizer's state of ``task`` from the file ``saved``. Returns the
    result so far; None, with a line on stderr and ``task`` unchanged, if the file is damaged.
    """
    try:
        state = torch.load(saved, weights_only=True, map_location="cpu")
        masters = state.pop("masters")
        shapes = {name: tensor.shape for name, tensor in masters.items()}
        if shapes != {name: tensor.shape for name, tensor in task.masters.items()}:
            raise ValueError("other tensors")
        task.optimizer.load_state_dict(state.pop("optimizer"))
        result = TrainingResult(**state)
    except Exception as error:  # whatever torch's readers raise
        print(
            f"discarding {saved}, which cannot be read ({summarize_error(error)}): this"
            " training starts over",
            file=sys.stderr,
        )
        return None
    for name, tensor in masters.items():
        task.masters[name].data.copy_(tensor)
    return result


def draw_batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield endless batches of ``size`` sequence indices below ``count``, reshuffled at the start
    of every epoch.

    An incomplete batch at the end of an epoch is dropped. If ``count`` is less than ``size``,
    batches have ``count`` indices.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    while True:
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))


class OutputHead(Protocol):
    """What follows a model's last layer. ``vocabulary`` is the size of its logits."""

    vocabulary: int

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` for the residual stream ``hidden [B, T, E]``."""


def sum_loss(
    head: OutputHead,
    hidden: Tensor,
    target: Tensor,
    teacher: OutputHead | None = None,
    weights: Iterable[Tensor] = (),
) -> Tensor:
    """Return the sum over tokens of ``KL(teacher || student)`` in nats, for the student's residual
    stream ``hidden [B, T, E]`` and the teacher's, ``target``; without a teacher, that of the
    cross-entropy of the tokens ``target [B, T]``.

    Logits of a block of tokens are in memory at a time, in the backward pass too. Gradients flow to
    ``hidden`` and to the head's ``weights``.
    """
    loss: Tensor = _LossInBlocks.apply(  # type: ignore[no-untyped-call]
        head, teacher, target, hidden, *weights
    )
    return loss


class _LossInBlocks(torch.autograd.Function):
    """`sum_loss`, whose gradients are computed while the logits of a block are in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputHead,
        teacher: OutputHead | None,
        target: Tensor,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Return the loss, and keep its gradients for `backward`."""
        total = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        sums: list[Tensor | None] = []
        for block in split_logits(hidden, head.vocabulary, hidden.device):
            states = hidden[block].detach().requires_grad_()
            with torch.enable_grad():
                logits = head.compute_logits(states)
                loss = _sum_block_loss(logits, target[block], teacher)
            total += loss.detach()
            gradient[block], *others = torch.autograd.grad(
                loss, [states, *weights], allow_unused=True
            )
            sums = [
                added if before is None else before.add_(added)
                for before, added in zip(sums or [None] * len(weights), others, strict=True)
            ]
        ctx.gradients = [gradient, *sums]
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the loss, which are dropped."""
        gradients = [None if each is None else each.mul_(scale) for each in ctx.gradients]
        del ctx.gradients
        return (None, None, None, *gradients)


def _sum_block_loss(logits: Tensor, target: Tensor, teacher: OutputHead | None) -> Tensor:
    """Return the summed loss of a block of tokens, as `sum_loss` does, from their ``logits``."""
    if teacher is None:
        return cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum")
    with torch.no_grad():
        expected = teacher.compute_logits(target)
    # A teacher may have unused tokens in the end.
    rows = expected[..., : logits.shape[-1]].flatten(0, 1)
    return sum_kl(logits.flatten(0, 1), rows.to(logits.device))


def sum_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum over rows of ``KL(softmax(teacher) || softmax(logits))`` in nats, for logits
    ``[n, V]``. Computed in float32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q, log_p = (rows.to(wide).log_softmax(-1) for rows in (logits, teacher))
    return kl_div(log_q, log_p, reduction="sum", log_target=True)
