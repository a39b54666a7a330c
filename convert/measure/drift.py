"""``kvfold drift``: compare two checkpoints with one layer of each in memory, and print the result
as a table.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from kvfold.attention.drift.compare import compare
from kvfold.attention.drift.report import TOKENS_AT_ONCE, DriftReport, LayerDrift, report_of
from kvfold.convert.checkpoint.folder import RECORD
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_table
from kvfold.convert.measure.page import number, percent, totals
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import DriftRequest
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.stock import load_config
from kvfold.convert.text.corpus import check_seq_len
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import load_calibration

_COLUMNS = {
    "attention_local": ("attention,", "local"),
    "attention_propagated": ("attention,", "propagated"),
    "residual_local": ("residual,", "local"),
    "residual_propagated": ("residual,", "propagated"),
    "row_kl": ("attention", "rows, KL"),
}
# Chosen: the layers in the summary, and so many that it shows all.
_WORST = 3
_FEW_LAYERS = 8
_LEGEND = (
    (
        "attention, residual: relative error of the attention's output, and of the residual stream"
        " after"
    ),
    "  the layer, against the source; local: with the source's inputs;",
    "  propagated: with the converted model's own inputs",
    "attention rows, KL: between attention weights in nats, mean over heads and positions",
    "worst head: the head with the largest relative error in its part of the attention's output",
    "second numbers: the floor, caused by rounding alone; -: not comparable, or not finite",
)


def drift_checkpoints(request: DriftRequest, progress: Progress | None = None) -> DriftReport:
    """Compare ``out`` with ``model`` on ``samples`` sequences of ``seq_len`` tokens from ``text``.

    The default text ships with kvfold and is never used for calibration. ``seed`` selects the
    sequences. ``progress`` works as in `convert_checkpoint`, with the stages ``compare`` and
    ``floor`` (both layers). The report's ``about`` contains the names and hashes of the models and
    the text. Raises InputError if a checkpoint cannot be opened, the models do not match, or the
    text is too short.

    >>> request = DriftRequest(demo_folder(), demo_folder(), samples=1, seq_len=32)
    >>> drift_checkpoints(request).identical
    True
    """
    with (
        closing(open_checkpoint(request.model)) as source,
        closing(open_checkpoint(request.out)) as student,
    ):
        config, converted = (
            load_config(each, request.trust_remote_code) for each in (source, student)
        )
        for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
            before, after = (getattr(each, key, None) for each in (config, converted))
            if before != after:
                rule = f"{key} must be {before} as in {request.model}, not {after}"
                raise InputError(
                    f"{request.out}: {rule}; use a checkpoint that was converted from that model"
                )
        if [(each.folder / RECORD).exists() for each in (source, student)] == [True, False]:
            swapped = (
                f"{request.model} has a {RECORD}, as conversions have, and {request.out} has none"
            )
            print(
                f"warning: {swapped}; the source comes first, then its conversion", file=sys.stderr
            )
        check_seq_len(
            request.seq_len, getattr(config, "max_position_embeddings", None), source.origin
        )
        place = choose_device(request.device)
        tokenizer = load_tokenizer(source, request.trust_remote_code, "measuring drift")
        drawn = request.samples, request.seq_len, request.seed
        read = load_calibration(
            request.text, tokenizer, *drawn, held_out=0, split="held_out", option="text"
        )
        teacher, compared = (layer_stream(each, place, request.dtype) for each in (source, student))
        tokens = read.calibration
        check_vocabulary(tokens, teacher.vocabulary, source.origin)
        sequences, length = tokens.shape
        if not request.quiet:
            print(
                f"comparing on {sequences} x {length} tokens of {read.source}",
                file=sys.stderr,
                flush=True,
            )
        stages = Stages(progress, request.quiet)
        size = max(1, TOKENS_AT_ONCE // length)
        with source.hashing(), student.hashing():
            with torch.no_grad(), stages("compare", teacher.layers, "layer") as advance:
                measured = compare(teacher, compared, tokens, size, partial(advance, 1))
            with stages("floor", teacher.layers, "layer") as advance:
                report = report_of(
                    measured, teacher, compared, tokens, start=lambda: partial(advance, 1)
                )
        models = {
            name: {"name": checkpoint.origin, "sha256": checkpoint.source_hash()}
            for name, checkpoint in (("source", source), ("converted", student))
        }
        text = {"name": read.source, "sha256": read.digest, "seed": request.seed}
        return replace(report, about={**models, "text": text})


def layer_stream(checkpoint: Checkpoint, device: torch.device, dtype: str) -> CheckpointStream:
    """Open a checkpoint as a stream of layers. Raises InputError if its tensors do not match its
    config.
    """
    computed = compute_dtype(checkpoint, device, dtype)
    try:
        stream = CheckpointStream(
            checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, computed
        )
    except InputError as error:
        # Two checkpoints are open: the error must say in which one the problem is.
        raise error.with_prefix(checkpoint.origin) from error
    stream.parameters.map.check_fits(checkpoint)
    return stream


def drift_table(report: DriftReport, layers: bool = False) -> str:
    """The report as text: a summary and the layers with the largest errors, or with ``layers``
    everything.
    """
    measured = report.measured
    rows = totals(report)
    about = heading(report)
    if not layers:
        about = [line for line in about if not line.startswith("floor: ")]
        rows = [row for row in rows if not row[0].startswith("loss")]
    lines = [*about, *([""] if layers else []), *format_table(rows, (36, 11, 11, 11, 11))]
    if measured.excess_margin is not None:
        least, most = (percent(measured.excess + side * measured.excess_margin) for side in (-1, 1))
        lines.append(f"95 % interval of the drift in perplexity, over sequences: {least} to {most}")
    if layers:
        return "\n".join([*lines, "", *_layers(report, range(len(measured.layers))), "", *_LEGEND])
    # Of errors that are not finite, the first layer's is the cause.
    error = {index: layer.residual_local for index, layer in enumerate(measured.layers)}
    worst = sorted(
        error,
        key=lambda index: error[index] if math.isfinite(error[index]) else math.inf,
        reverse=True,
    )
    shown = worst if len(worst) <= _FEW_LAYERS else worst[:_WORST]
    ordered = f"sorted by the local error of the residual: {len(shown)} of {len(worst)} layers"
    note = (
        f"{ordered}; after each error, its rounding floor; --layers: all layers in order, and the"
        " terms"
    )
    return "\n".join([*lines, "", *_layers(report, shown), note])


def heading(report: DriftReport) -> list[str]:
    """Lines that describe the text, the rounding floor and the models."""
    dtype = report.source_dtype
    floor = report.floor
    if report.student_dtype != dtype:
        dtype = f"{dtype} (converted: {report.student_dtype})"
    sequences, some = (
        f"{count} sequence{'s' * (count != 1)}"
        for count in (report.sequences, floor.sequences if floor else 0)
    )
    lines = [
        f"drift over {sequences} of {report.length} tokens, {dtype} on {report.device}",
        "floor: not measured",
    ]
    if floor is not None:
        lines[1] = (
            f"floor: the source in {floor.dtype} against itself in {floor.reference_dtype}, over"
            f" {some}"
        )
    lines += filter(None, [report.positions_text()])
    for name, values in report.about.items():
        others = "".join(
            f", {key} {value}" for key, value in values.items() if key not in ("name", "sha256")
        )
        hashed = "" if name == "text" else " of config.json and weights"
        lines.append(f"{name}: {values['name']} (sha256{hashed} {values['sha256'][:12]}{others})")
    if report.identical:
        lines.append("the two are identical: every drift is exactly 0")
    return lines


def _layers(report: DriftReport, shown: Iterable[int]) -> list[str]:
    """Table lines with the errors of layers, each with its rounding floor, and the head with the
    largest error.
    """
    layers = report.measured.layers
    floors: Sequence[LayerDrift | None] = (
        [None] * len(layers) if report.floor is None else report.floor.measured.layers
    )
    first, second = zip(*_COLUMNS.values(), strict=True)
    rows = [("layer", *first, "  worst head"), ("from 0", *second, "  and its error")]
    for layer, floor in ((layers[index], floors[index]) for index in shown):
        cells = []
        for name in _COLUMNS:
            low = getattr(floor, name, None)
            rounding = (
                "-" if low is None else f"{low:.0e}" if low and math.isfinite(low) else f"{low:.0f}"
            )
            cells.append(f"{number(getattr(layer, name))} {rounding:>6}")
        head = ""
        if layer.heads:
            worst = max(layer.heads, key=lambda head: head.error)
            head = (
                f"{worst.head:>5} {number(worst.error):>7}" if worst.error > 0 else f"{'none':>5}"
            )
        rows.append((str(layer.layer), *cells, head))
    return format_table(rows, (6, *[13] * len(_COLUMNS)), left=(len(_COLUMNS) + 1,))
