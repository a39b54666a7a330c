"""What a calibrated run measured, and the check that the written checkpoint is the model that was measured."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.attention.drift.compare import compare_predictions
from kvfold.attention.drift.report import DriftReport
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import hidden_states
from kvfold.convert.errors import KvfoldError
from kvfold.convert.methods.registry import Notes
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.walk.passes import chunk_size, last_states

_AGREE = 1e-3  # relative; what is written was rounded in memory too, so only the order of sums differs


@dataclass(frozen=True)
class Calibrated:
    """The measurements of a calibrated run. ``stream`` is the source's, ``spill`` the folder for hidden states."""

    tokens: CalibrationTokens
    drift: DriftReport
    choices: Notes
    stream: CheckpointStream
    spill: str | None = None

    def record(self, folder: Path) -> dict[str, Any]:
        """For ``kvfold.json``: nothing that differs between equal runs.

        Raises KvfoldError when the loss of the checkpoint in ``folder`` is not the one that was measured in memory.
        """
        expected, written = self.drift.measured.student_loss, written_loss(folder, self)
        if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
            raise KvfoldError(
                f"the written checkpoint has a loss of {written:.6f} nats, the converted model in memory had "
                f"{expected:.6f} on the same text: nothing was kept; please report it"
            )
        return self._entries({"loss_in_memory": expected, "loss_of_written_checkpoint": written})

    def _entries(self, written: Mapping[str, float]) -> dict[str, Any]:
        text = {"source": self.tokens.source, "sha256": self.tokens.digest}
        counts = {"sequences": len(self.tokens.calibration), "held_out": len(self.tokens.held_out)}
        length = {"tokens_each": self.tokens.calibration.shape[1]}
        return {
            "calibration": text | counts | length,
            **self.choices,
            "drift": self.drift.to_dict() | {"written": dict(written)},
        }


@torch.no_grad()
def written_loss(folder: Path, measured: Calibrated) -> float:
    """Mean negative log-likelihood of the checkpoint in ``folder`` on the held-out sequences, nats per token."""
    tokens = measured.tokens.held_out
    with written_stream(folder, measured.stream) as stream, hidden_states(measured.spill) as keep:
        parts = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
        states = last_states(stream, tokens, keep)
        return compare_predictions(stream, stream, states, states, parts).teacher_loss


@contextmanager
def written_stream(folder: Path, like: CheckpointStream) -> Iterator[CheckpointStream]:
    """The checkpoint in ``folder`` as a stream like the source's."""
    checkpoint = open_checkpoint(folder)
    try:
        yield CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device, like.dtype)
    finally:
        checkpoint.close()
