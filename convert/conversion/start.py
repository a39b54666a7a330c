"""The first lines of a calibrated run: its text, and the time that it will take on this machine."""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.console import duration
from kvfold.convert.conversion.calibration import quick_method
from kvfold.convert.conversion.costs import Machine, costs_of, layer_flops
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import training_autocast
from kvfold.convert.request import SELF
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.documents import BUILT_IN
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.walk.passes import first_layer_seconds


def print_start(plan: Plan, tokens: CalibrationTokens, source: CheckpointStream, finished: int) -> None:
    """Print the calibration text and the time that the run will take, with ``finished`` layers, to stderr."""
    if plan.request.quiet:
        return
    count, length = tokens.calibration.shape
    text = "text that the source wrote itself" if tokens.source == SELF else tokens.source
    seconds = costs_of(plan, processes.count(), finished).seconds(machine_rates(plan, source, tokens.calibration))
    before = f" with {finished} of {plan.geometry.layers} layers finished before" if finished else ""
    time_taken = f"about {duration(sum(seconds.values()))}{before}"
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
    print(
        f"calibrating on {count} x {length} tokens of {text}; {time_taken}: {parts}. "
        f"(--method {quick_method(plan)} needs no text and is faster, but worse.)",
        file=sys.stderr,
    )
    if tokens.source == BUILT_IN:
        print(
            "text that resembles the model's use calibrates better: --calibration FILE.txt|FILE.jsonl", file=sys.stderr
        )


def machine_rates(
    plan: Plan, source: CheckpointStream, tokens: Tensor, clock: Callable[[], float] = time.monotonic
) -> Machine:
    """The rates of this machine, from a few sequences through the first layer and a small product in float64."""
    each, opened = first_layer_seconds(source, tokens, clock)
    names = source.stored_names(0)
    stored = sum(plan.checkpoint.info(name).nbytes for name in names)
    square = torch.ones(512, 512, dtype=torch.float64)
    started = clock()
    square @ square
    product = clock() - started
    flops = layer_flops(plan, tokens.shape[1])
    return Machine(
        processes.count(),
        flops / each,
        2 * 512**3 / product,
        stored / opened,
        flops / _training_seconds(plan, source, tokens, each, clock),
    )


def _training_seconds(
    plan: Plan, source: CheckpointStream, tokens: Tensor, each: float, clock: Callable[[], float]
) -> float:
    """Seconds that a token takes through a layer in training steps; ``each`` where they compute as the walk does."""
    trains = plan.request.refine or plan.request.polish
    dtype = training_autocast(plan.checkpoint, source.device) if trains else None
    if dtype is None or dtype == source.dtype:
        return each
    with torch.autocast(source.device.type, dtype):
        return first_layer_seconds(source, tokens, clock)[0]
