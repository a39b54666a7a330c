"""Zeros that bring heads to the sizes that kernels take (``LatentTarget.padded``); nothing that is computed changes."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.transforms.latent.weights import LatentWeights


def padded(latent: LatentWeights, target: LatentTarget) -> LatentWeights:
    """``latent`` with heads and rotary keys of the sizes in the files; itself where they have them."""
    nope, value = target.head_dims(latent.value_dim)
    rope = target.rope_dim
    if (latent.nope_dim, latent.value_dim, latent.rope_dim) == (nope, value, rope):
        return latent
    query = latent.query
    if query is not None:
        query = replace(query, q_nope=_grown(query.q_nope, nope), q_rope=spread(query.q_rope, 1, rope))
    return replace(
        latent,
        rope_key=spread(latent.rope_key, 0, rope),
        q_nope=_grown(latent.q_nope, nope),
        q_rope=spread(latent.q_rope, 1, rope),
        uk=_grown(latent.uk, nope),
        uv=_grown(latent.uv, value),
        o=pad(latent.o, (0, value - latent.value_dim)),
        query=query,
    )


def spread(rows: Tensor, dim: int, size: int) -> Tensor:
    """Half-split rotary dims of ``rows`` along ``dim``, as every ``k``-th pair of ``size`` dims; the others are zero.

    Plain RoPE of ``size`` dims turns its pair ``k i`` as plain RoPE of ``size / k`` dims turns pair ``i``.
    """
    step = size // rows.shape[dim]
    halves = torch.unflatten(rows.movedim(dim, -1), -1, (2, -1, 1))
    return pad(halves, (0, step - 1)).flatten(-3).movedim(-1, dim)


def _grown(rows: Tensor, size: int) -> Tensor:
    """``rows [H, n, ...]`` with zeros behind them: ``[H, size, ...]``."""
    return pad(rows, (0, 0, 0, size - rows.shape[1]))
