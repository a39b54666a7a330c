"""Measure a converted checkpoint against its source: the drift, the loss by position, and the loss
of the files on disk.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import Measurement, compare_predictions
from kvfold.attention.drift.metrics import finite
from kvfold.attention.drift.report import DriftReport, make_report
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.walk.walk import Walk, chunk_size, last_states

# Nearly every weight takes part in the loss of every token, so that few tell whether all were
# written: chosen.
_CHECKED_TOKENS = 2048
# Relative. What is written was rounded in memory too, so only the order of sums differs: chosen far
# above that.
_AGREE = 1e-3


@contextmanager
def open_stream(folder: Path, like: CheckpointStream) -> Iterator[CheckpointStream]:
    """Open the checkpoint in ``folder`` as a stream on the device of ``like``."""
    with closing(open_checkpoint(folder)) as checkpoint:
        yield CheckpointStream(
            checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device
        )


def measure_walk(walk: Walk) -> DriftReport:
    """The drift of a walk's student from its source on the held-out text, after the last layer."""
    teacher = walk.teacher
    return make_report(walk.measurement(), teacher.stream, walk.student.stream, teacher.tokens)


def measure_by_position(folder: Path, calibration: Calibration, drift: DriftReport) -> DriftReport:
    """``drift`` with the loss by position on long sequences, if there are any, of the files in
    ``folder``.

    Where activations exceed float32 only in long sequences, the stretches stay those of the shorter
    ones.
    """
    tokens = calibration.tokens.long
    if not len(tokens):
        return drift
    source = calibration.source
    try:
        stretches = _compare_files(folder, tokens, source, source).stretches
    except InputError as error:
        # Hours of work are not lost for a measurement beside it.
        length = calibration.tokens.held_out.shape[1]
        print(f"the loss by position ends at {length} tokens: {error}", file=sys.stderr)
        return drift
    finally:
        source.release()
    return replace(drift, stretches=stretches)


@torch.no_grad()
def _compare_files(
    folder: Path, tokens: Tensor, like: CheckpointStream, teacher: CheckpointStream | None = None
) -> Measurement:
    """Compare the checkpoint in ``folder`` on ``tokens`` with ``teacher``; with itself if only its
    loss matters.
    """
    with open_stream(folder, like) as stream:
        actual = last_states(stream, tokens)
        expected = actual if teacher is None else last_states(teacher, tokens)
        chunks = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
        return compare_predictions(teacher or stream, stream, expected, actual, chunks)


def check_written(folder: Path, calibration: Calibration, drift: DriftReport) -> None:
    """Raise KvfoldError if the checkpoint in ``folder`` has another loss on the first held-out
    sequences than the one measured in memory.
    """
    held_out = calibration.tokens.held_out
    tokens = held_out[: max(1, _CHECKED_TOKENS // held_out.shape[1])]
    expected = fmean(loss for _, _, loss in drift.by_sequence[: len(tokens)])
    written = _compare_files(folder, tokens, calibration.source).student_loss  # nats per token
    if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
        raise KvfoldError(
            f"the written checkpoint has a loss of {written:.6f} nats, but the converted model in"
            f" memory had {expected:.6f} on the same text; the output was discarded, please report"
            " this"
        )


def record_entries(
    calibration: Calibration, notes: Mapping[str, Any], drift: DriftReport
) -> dict[str, Any]:
    """The entries of a calibrated run for ``kvfold.json``, identical for equal runs."""
    tokens = calibration.tokens
    entries = {
        "calibration": {
            "source": tokens.source,
            "sha256": tokens.digest,
            "sequences": len(tokens.calibration),
            "held_out": len(tokens.held_out),
            "tokens_each": tokens.calibration.shape[1],
        },
        **notes,
        "drift": drift.to_dict(),
    }
    by_text: dict[str, list[tuple[float, float, float]]] = {}
    for text, figures in zip(tokens.held_out_texts, drift.by_sequence, strict=False):
        by_text.setdefault(text, []).append(figures)
    if by_text:  # of a mixture
        entries["drift"]["texts"] = [
            {
                "text": text,
                "sequences": len(figures),
                "kl": finite(fmean(kl for kl, _, _ in figures)),
                "excess": finite(fmean(excess for _, excess, _ in figures)),
            }
            for text, figures in sorted(by_text.items())
        ]
    return entries
