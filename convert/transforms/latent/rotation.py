"""A rotation of the latent under which a quantized latent cache loses least.

The channels of a fitted latent differ in energy by orders of magnitude, and one step of quantization for all of them,
or one exponent that saturates, is wrong for most. An orthogonal map before the latent and its transpose in what reads
it change nothing, and with one that mixes every channel into every other all have about the same energy.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.weights import LatentWeights


def hartley(size: int) -> Tensor:
    """The discrete Hartley matrix ``[size, size]``: orthogonal, symmetric, its own inverse; float64.

    It is there for every size, where a Hadamard matrix is not (a latent with a constant channel has an odd number of
    others), and no element is larger than ``sqrt(2 / size)``. KL of a trained model at 48 + 16, nats per token, in a
    cache of FP8, INT8 and INT4: 0.0008, 0.0000 and 0.011; as fitted 0.0012, 3.98 and 3.98
    (recipes/benchmarks/bench_latent_cache.py).
    """
    index = torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi / size * (index[:, None] * index % size)  # whole turns off first: exact for any size
    return (angle.cos() + angle.sin()) / math.sqrt(size)


def rotated(latent: LatentWeights) -> LatentWeights:
    """``latent`` with all its channels mixed: ``c' = Q c``, read by ``uk Q^T`` and ``uv Q^T``. Queries keep theirs."""
    mix = hartley(latent.rank).to(latent.down.device)

    def turned(rows: Tensor) -> Tensor:
        return (mix @ rows.double()).to(rows)

    return replace(
        latent,
        down=turned(latent.down),
        down_bias=None if latent.down_bias is None else turned(latent.down_bias),
        uk=(latent.uk.double() @ mix).to(latent.uk),
        uv=(latent.uv.double() @ mix).to(latent.uv),
    )
