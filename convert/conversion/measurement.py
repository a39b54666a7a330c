"""Measure the files of a converted checkpoint against its source."""

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvfold.attention.drift.compare import compare_models
from kvfold.attention.drift.metrics import replace_non_finite
from kvfold.attention.drift.report import DriftReport, make_drift_report
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.errors import InputError
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.walk.walk import check_finite, choose_chunk_size


@torch.no_grad()
def measure_checkpoint(folder: Path, calibration: Calibration) -> DriftReport:
    """Measure the converted checkpoint in ``folder`` against the source on held-out text: KL
    divergence and loss, in nats per token. If the calibration has long sequences, also the loss by
    position.

    Where activations exceed float32 only in long sequences, the stretches stay those of the shorter
    ones.
    """
    source = calibration.source
    tokens = calibration.tokens
    length = tokens.held_out.shape[1]
    with closing(open_checkpoint(folder)) as checkpoint:
        student = CheckpointStream(
            checkpoint.config, checkpoint.read_tensor, list(checkpoint.tensors), source.device
        )
        measured = compare_models(
            source, student, tokens.held_out, choose_chunk_size(source.device, length)
        )
        check_finite([torch.tensor(measured.teacher_loss)], source, None)
        report = make_drift_report(measured, source, student, tokens.held_out)
        if not len(tokens.long):
            return report
        batch = choose_chunk_size(source.device, tokens.long.shape[1])
        try:
            stretches = compare_models(source, student, tokens.long, batch).stretches
        except InputError as error:
            # Hours of work are not lost for a measurement beside it.
            print(f"the loss by position ends at {length} tokens: {error}", file=sys.stderr)
            return report
    return replace(report, stretches=stretches)


def make_record_entries(
    calibration: Calibration, notes: Mapping[str, Any], drift: DriftReport
) -> dict[str, Any]:
    """Return the entries of a calibrated run for ``kvfold.json``: its text, the ``notes`` of its
    layers, and the measured drift. Equal runs give equal entries.
    """
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
                "kl": replace_non_finite(fmean(kl for kl, _, _ in figures)),
                "excess": replace_non_finite(fmean(excess for _, excess, _ in figures)),
            }
            for text, figures in sorted(by_text.items())
        ]
    return entries
