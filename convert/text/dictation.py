"""Text for models that hear: the decoder is to write it, beside sound that has nothing to do with it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.stream.sound import SYNTHETIC
from kvfold.convert.text.windows import CalibrationTokens

LOSS = "loss of text"


def dictation_tasks(tokens: CalibrationTokens, config: Mapping[str, Any]) -> CalibrationTokens:
    """Each sequence ``[T]`` behind the number of a synthetic sound, once for each of the encoder's positions.

    The decoder starts with its start token, where the tokenizer has not put it in front of every text.
    """
    positions, start = int(config["max_source_positions"]), int(config["decoder_start_token_id"])

    def heard(sequences: Tensor) -> Tensor:
        numbers = torch.arange(len(sequences))[:, None]
        begun = bool(len(sequences)) and bool((sequences[:, 0] == start).all())
        decoded = sequences if begun else torch.cat([torch.full_like(numbers, start), sequences[:, :-1]], 1)
        return torch.cat([numbers.expand(-1, positions), decoded], 1)

    return replace(
        tokens,
        calibration=heard(tokens.calibration),
        held_out=heard(tokens.held_out),
        source=f"{tokens.source}, beside {SYNTHETIC} (no speech, none that belongs to the text)",
        encoded=positions,
        loss=LOSS,
    )
