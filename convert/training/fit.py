"""The fit loop: steps along a schedule, judged on held-out sequences in rounds; the best weights seen are kept.

Refinement fits one layer to its outputs (``refine.py``), polishing all layers to next-token distributions
(``polish.py``). Both give `fit` the gradients of a batch, the error on held-out sequences, and a schedule.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from kvfold.convert.training.trainee import Trainee

# The learning rate of a step, relative to the size of each tensor, from the number of steps done and the errors of all
# rounds so far, the one before training included. The fit ends where it is 0.
Schedule = Callable[[int, Sequence[float]], float]


@dataclass
class FitResult:
    """The trained tensors as they will be stored, on the CPU.

    ``errors`` are those on held-out sequences, before training and after every round. Of the ``steps`` made, ``kept``
    is the one whose weights these are; 0 for those before training, and ``tensors`` is empty then.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    steps: int = 0
    kept: int = 0


def fit(
    trainee: Trainee,
    backward: Callable[[list[int]], None],
    error: Callable[[], float],
    schedule: Schedule,
    batches: Iterator[list[int]],
    *,
    every: int,
    saved: Path | None = None,
    progress: Callable[[int, float], None] = lambda step, error: None,
) -> FitResult:
    """Train ``trainee`` until ``schedule`` gives 0.

    ``backward(batch)`` leaves the gradients of a batch of sequences in the masters; ``error()`` is judged after
    ``every`` so many steps and after the last, and ``progress(step, error)`` called with it. The state of the fit is
    kept in the file ``saved`` after every round: where there is one, the fit goes on from it.
    """
    fitted = _resume(trainee, saved) if saved is not None and saved.is_file() else FitResult(errors=[error()])
    progress(fitted.steps, fitted.errors[-1])
    batches = islice(batches, fitted.steps, None)
    while (rate := schedule(fitted.steps, fitted.errors)) > 0:
        batch = next(batches)
        trainee.step(rate, lambda batch=batch: backward(batch))  # type: ignore[misc]
        fitted.steps += 1
        if fitted.steps % every and schedule(fitted.steps, fitted.errors) > 0:
            continue
        found = error()
        if found < min(fitted.errors):
            fitted.tensors, fitted.kept = trainee.rounded(), fitted.steps
        # Weights that are no longer finite give no number to compare with.
        fitted.errors.append(found if math.isfinite(found) else math.inf)
        if saved is not None:
            _save(trainee, fitted, saved)
        progress(fitted.steps, fitted.errors[-1])
    return fitted


def _save(trainee: Trainee, fitted: FitResult, path: Path) -> None:
    state = {
        **vars(fitted),
        "masters": {name: master.detach() for name, master in trainee.masters.items()},
        "optimizer": trainee.optimizer.state_dict(),
    }
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


def _resume(trainee: Trainee, path: Path) -> FitResult:
    state = torch.load(path, weights_only=True, map_location="cpu")
    trainee.put(state.pop("masters"))
    trainee.optimizer.load_state_dict(state.pop("optimizer"))
    return FitResult(**state)


def random_batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of ``size`` of the numbers below ``count``, in a new random order every time that all have been used.

    Fewer than ``size`` that are left over wait for the next order; a batch is never larger than ``count``.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    while True:
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))
