"""Sound that stands in for recordings, where a model that hears is run and nobody gave any."""

import torch
from torch import Tensor, nn

_PATCH = 8, 25  # mel bins and frames of 10 ms in which sound is about the same: a quarter of a second
SYNTHETIC = "synthetic sound"


def synthetic_sound(numbers: Tensor, bins: int, frames: int) -> Tensor:
    """Log-mel features ``[B, bins, frames]`` of sounds by their ``numbers [B]``: equal numbers, equal sounds.

    Random values that change slowly with pitch and time, between -1 and 1 as Whisper's feature extractor gives them. No
    speech is in it: what a model makes of it says nothing of how well it transcribes.
    """
    coarse = [max(2, -(-size // patch)) for size, patch in zip((bins, frames), _PATCH, strict=True)]
    drawn = [torch.rand(1, *coarse, generator=torch.Generator().manual_seed(int(number))) for number in numbers]
    smooth = nn.functional.interpolate(torch.stack(drawn), (bins, frames), mode="bilinear", align_corners=True)
    return 2 * smooth[:, 0] - 1
