"""Optional changes of a fitted latent: a latent for the queries, and channels mixed for a quantized cache.

A query latent (``q_lora_rank`` of DeepSeek) saves weights, not cache.

The channels of a fitted latent differ in energy by orders of magnitude, so one quantization step for all of them, or
one saturating exponent, is wrong for most. An orthogonal map of the latent and its transpose in the weights that read
it change nothing, and a map that mixes every channel into every other gives all of them about the same energy.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.latent import moment_root, principal_basis
from kvfold.convert.transforms.latent.weights import LatentWeights, QueryLatent
from kvfold.convert.transforms.linalg import input_moment
from kvfold.convert.transforms.weights import LayerStatistics


def query_latent(latent: LatentWeights, statistics: LayerStatistics, rank: int) -> LatentWeights:
    """Queries through ``rank`` channels: the principal components of all heads' queries in units of scores.

    A query's unit is the energy of the key it meets, which makes unrotated and rotary dims comparable. The biases stay
    as they are. Exact from ``rank = min(E, H (N + P))`` on.
    """
    moment = input_moment(statistics.to(latent.down.device))
    root = moment_root(moment, centered=False)
    rows = torch.cat([latent.q_nope, latent.q_rope], 1).double()  # [H, N + P, E]
    basis = principal_basis((rows * _key_units(latent, moment[:-1, :-1])[..., None]).flatten(0, 1) @ root, root, rank)
    read = basis.read(rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
    nope, rope = read[:, : latent.nope_dim], read[:, latent.nope_dim :]
    query = QueryLatent(basis.down, nope, rope)
    return replace(latent, query=query.map(lambda tensor: tensor.to(latent.down).contiguous()))


def _key_units(latent: LatentWeights, moment: Tensor) -> Tensor:
    """``[H, N + P]``: the rms of the key dim that each query dim meets; the two dims of a rotary pair share theirs."""
    keys = torch.cat(
        [latent.uk.double() @ latent.down.double(), latent.rope_key.double().expand(latent.heads, -1, -1)], 1
    )
    energy = torch.einsum("hde,ef,hdf->hd", keys, moment, keys).clamp_min(0)
    nope, rope = energy[:, : latent.nope_dim], energy[:, latent.nope_dim :]
    pairs = rope.reshape(len(rope), 2, -1).mean(1)
    units = torch.cat([nope, pairs, pairs], 1).sqrt()
    return units.clamp_min(units.max() * 1e-6)  # dims of dead keys keep a little weight, so that no query vanishes


def hartley(size: int) -> Tensor:
    """The discrete Hartley matrix ``[size, size]``: orthogonal, symmetric, its own inverse; float64.

    It exists for every size, unlike a Hadamard matrix (beside a constant channel a latent has an odd number of others),
    and no element is larger than ``sqrt(2 / size)``. KL of the reference MHA model at 48 + 16, nats per token, in a
    cache of FP8, INT8 and INT4: 0.0008, 0.0000 and 0.011; as fitted 0.0012, 3.98 and 3.98
    (recipes/benchmarks/bench_latent_cache.py).
    """
    index = torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi / size * (index[:, None] * index % size)  # whole turns off first: exact for any size
    return (angle.cos() + angle.sin()) / math.sqrt(size)


def rotated(latent: LatentWeights) -> LatentWeights:
    """``latent`` with all its channels mixed: ``c' = Q c``, read by ``uk Q^T`` and ``uv Q^T``. A query latent stays."""
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
