"""A latent for the queries (``q_lora_rank`` of DeepSeek). It saves weights, not cache."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.latent import moment_root, principal_basis
from kvfold.convert.transforms.latent.weights import LatentWeights, QueryLatent
from kvfold.convert.transforms.linalg import input_moment
from kvfold.convert.transforms.weights import LayerStatistics


def query_latent(latent: LatentWeights, statistics: LayerStatistics, rank: int) -> LatentWeights:
    """Queries through ``rank`` channels: the principal components of all heads' queries in units of scores.

    A query's unit is the energy of the key it meets, which makes nope and rotary dims comparable. The biases stay
    biases. Exact from ``rank = min(E, H (N + P))`` on.
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
    return units.clamp_min(units.max() * 1e-6)
