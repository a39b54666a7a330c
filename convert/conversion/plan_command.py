"""The command ``kvfold plan``: what a conversion will take, before any machine is rented for it. No torch here."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from kvfold.convert.console import Choice, PanelCommand, PanelOption, check_writable, duration, steps_or_auto
from kvfold.convert.errors import InputError
from kvfold.convert.measure.options import tell
from kvfold.convert.request import TARGETS, ConvertRequest
from kvfold.convert.sizes import bytes_text

_POSITIVE = click.FloatRange(min=0, min_open=True)
_FLOP = {"EFLOP": 1e18, "PFLOP": 1e15, "TFLOP": 1e12}
_ALONE, _BY_ONE = ("fitting", "polishing"), " by the first process alone"
_FIT_GFLOPS = 200.0  # float64, of the processor beside a GPU: 16 threads of a server at a quarter of their peak


_target = partial(click.option, cls=PanelOption, panel="Target")
_calibration = partial(click.option, cls=PanelOption, panel="Calibration")
_refinement = partial(click.option, cls=PanelOption, panel="Refinement")
_machine = partial(click.option, cls=PanelOption, panel="Machine")
_running = partial(click.option, cls=PanelOption, panel="Running")


@click.command(cls=PanelCommand, short_help="What a conversion of MODEL takes: hours, memory, bytes.")
@click.argument("model", required=False)
@_target("--shape", metavar="NAME", help="A well-known model instead of MODEL: llama-3-405b, ...")
@_target("--to", type=Choice(TARGETS), required=True, help="Attention kind to convert to.")
@_target("--kv-heads", type=int, metavar="N", help="Key/value heads to keep (gqa).")
@_target("--kv-rank", type=int, metavar="R", help="Rank of the latent (mla).")
@_target("--rope-dim", type=int, metavar="P", help="Rotary key dims (mla).")
@_target("--budget", type=int, metavar="N", help="Choose R + P = N by measured drift (mla).")
@_target("--method", metavar="NAME", help="As of `kvfold convert`.")
@_target("--group", metavar="NAME", help="As of `kvfold convert`.")
@_target("--layout", metavar="NAME", help="As of `kvfold convert`.")
@_calibration("--samples", type=int, default=128, show_default=True, help="Calibration sequences.")
@_calibration("--seq-len", type=int, default=512, show_default=True, help="Tokens per sequence.")
@_refinement("--refine", type=steps_or_auto, default="0", metavar="STEPS|auto", help="Steps per layer.")
@_refinement("--polish", type=steps_or_auto, default="0", metavar="STEPS|auto", help="Steps of all layers together.")
@_machine("--gpus", type=click.IntRange(1), default=1, show_default=True, help="GPUs, one process each.")
@_machine(
    "--tflops",
    type=_POSITIVE,
    default=300.0,
    show_default=True,
    help="Of each GPU, reached in products of the checkpoint's dtype (an H100 has 990 at its peak).",
)
@_machine(
    "--fit-gflops",
    type=_POSITIVE,
    default=_FIT_GFLOPS,
    show_default=True,
    help="Of the processor in float64: one process fits.",
)
@_machine(
    "--disk",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    metavar="GB/S",
    help="Speed of the disk, shared by all.",
)
@_running("--spill", metavar="DIR", help="As of `kvfold convert`: hidden states in a file in DIR, not in memory.")
@_running("--json", "json_file", metavar="FILE|-", help="Also write the numbers to FILE; -: to stdout alone.")
def plan(
    model: str | None,
    shape: str | None,
    gpus: int,
    tflops: float,
    fit_gflops: float,
    disk: float,
    json_file: str | None,
    **options: Any,
) -> None:
    """Estimate what `kvfold convert` of MODEL would take: bytes read and written, memory per process, time.

    Reads the headers and the config only. The estimate is the one that `convert` prints at its start, with the rates
    given here instead of measured ones. Times of fits are extrapolated from models of up to 1024 dims.
    """
    if (model is None) == (shape is None):
        raise InputError("kvfold plan: expected MODEL or a --shape, one of both; see `kvfold plan --help`")
    if json_file is not None:
        check_writable(json_file)
    from kvfold.convert.conversion.costs import Machine, costs_of
    from kvfold.convert.conversion.known_shapes import shape_checkpoint
    from kvfold.convert.conversion.plan import make_plan
    from kvfold.convert.io.checkpoint import open_headers

    request = ConvertRequest(model=model or str(shape), out="OUT", **options)
    checkpoint = open_headers(model) if model is not None else shape_checkpoint(str(shape))
    try:
        costs = costs_of(made := make_plan(request, checkpoint), gpus)
    finally:
        checkpoint.close()
    seconds = costs.seconds(Machine(gpus, 1e12 * tflops, 1e9 * fit_gflops, 1e9 * disk))
    found = {
        "model": checkpoint.origin,
        "to": made.layout.kind,
        "bytes_read": costs.read,
        "bytes_written": costs.written,
        "memory_per_process": costs.memory,
        "spilled_per_process": costs.spilled,
        "flops": asdict(costs.work),
        "seconds": seconds,
    }
    tell(json_file, lambda: found, _text(found, gpus, _ALONE if gpus > 1 and request.calibrated else ()))


def _text(found: dict[str, Any], gpus: int, alone: Sequence[str]) -> str:
    """The numbers for users; what ``alone`` names is done by the first of ``gpus`` processes."""
    seconds = found["seconds"]
    operations = ", ".join(
        f"{name.replace('_', ' ')} {_flop(value)}" for name, value in found["flops"].items() if value
    )
    times = ", ".join(
        f"{name} {_time(value)}{_BY_ONE if name in alone else ''}" for name, value in seconds.items() if value
    )
    lines = [
        f"{found['model']} -> {found['to']}",
        f"read {bytes_text(found['bytes_read'])}, written {bytes_text(found['bytes_written'])} by all processes",
        f"memory of a process: about {bytes_text(found['memory_per_process'])}",
        *(
            [f"hidden states of a process on disk: {bytes_text(spilled)}"]
            if (spilled := found["spilled_per_process"])
            else []
        ),
        *([f"operations: {operations}"] if operations else []),
        f"time with {gpus} process{'es' * (gpus > 1)}: {_time(sum(seconds.values()))} ({times})",
    ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    """Seconds as text: "7 s", "12 min", "3.4 h", "210 h"."""
    hours = seconds / 3600
    return duration(seconds) if hours < 1.5 else f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"


def _flop(operations: float) -> str:
    """Floating-point operations as text: "1.2 EFLOP"."""
    unit, size = next(((unit, size) for unit, size in _FLOP.items() if operations >= size), ("GFLOP", 1e9))
    scaled = operations / size
    return f"{scaled:,.0f} {unit}" if scaled >= 10 else f"{scaled:.1f} {unit}"
