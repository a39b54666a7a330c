"""MHA or GQA into multi-head latent attention, from calibration statistics.

1. Rotary keys: the principal complex components over the heads at the frequencies that ``Slots`` names.
2. What remains of the keys loses its rotation; its best constant stand-in, the gain of ``pair_gains``, goes into
   ``uk``.
3. The rest of the keys, in units of scores, and the values, in units of the layer's output, share one latent: the
   principal components of both together. ``uk`` and ``uv`` are the least-squares readings of keys and values from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.latent_weights import LatentWeights
from kvfold.convert.transforms.rope_slots import (
    PairKeys,
    Slots,
    components,
    pair_gains,
    pair_keys,
    query_scales,
    second_moment,
    with_bias,
)
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


@dataclass(frozen=True)
class Basis:
    """A latent ``c = down x`` of unit total energy, and how linear functions of ``x`` are best read from it."""

    down: Tensor
    readout: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """``[n, E] -> [n, R]``: the map from ``c`` that comes closest to ``rows x`` over the calibration text."""
        return rows @ self.readout


@dataclass(frozen=True)
class RotarySplit:
    """Slots' keys ``key [P/2, E+1]`` and queries ``query [H, P/2, E+1]``; ``rest [G, L, E+1]`` what they leave.

    Complex.
    """

    key: Tensor
    query: Tensor
    rest: Tensor


def to_latent(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    centred: bool = True,
) -> LatentWeights:
    """A layer with ``rank`` latent channels; ``centred`` takes the mean out of the latent and gives it to the biases.

    ``scale`` multiplies the source's scores; ``head_dim ** -0.5`` unless given. A layer that does not rotate gets zero
    rotary keys. The result is in at least float32.
    """
    split = split_rotary(weights, statistics, rotary, slots)
    gains = pair_gains(statistics, rotary).to(weights.q.device)
    keys = unrotated_keys(weights, rotary, split.rest)
    stood_in = apply_gains(keys, gains, rotary)
    values = with_bias(weights.v, weights.v_bias)
    basis = joint_basis(
        key_units(weights, statistics, rotary, gains, keys), value_units(weights, values), statistics, rank, centred
    )
    return assemble(weights, statistics, rotary, split, stood_in, values, basis, slots, scale, centred)


def split_rotary(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, slots: Slots) -> RotarySplit:
    """Rotary keys of the slots, the queries that read them, and what is left of every key."""
    wide = weights.model_dim + 1
    if not rotary.dims:
        empty = torch.zeros(0, dtype=torch.complex128, device=weights.q.device)
        count = slots.rope_dim // 2
        return RotarySplit(
            empty.new_zeros(count, wide),
            empty.new_zeros(weights.heads, count, wide),
            empty.new_zeros(weights.kv_heads, 0, wide),
        )
    pairs = pair_keys(weights, statistics, rotary)
    scales = query_scales(pairs)
    _, vectors = components(pairs)
    split = [_split_pair(pairs, scales, vectors, pair, count) for pair, count in enumerate(slots.counts)]
    key, query, rest = (list(parts) for parts in zip(*split, strict=True))
    return RotarySplit(torch.cat(key), torch.cat(query, 1), torch.stack(rest, 1))


def _split_pair(
    pairs: PairKeys, scales: Tensor, vectors: Tensor, pair: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One frequency.

    ``count`` shared keys ``[count, E+1]``, their queries ``[H, count, E+1]`` and the rest ``[G, E+1]``.
    """
    scale, basis, key = scales[:, pair], vectors[pair, :, :count], pairs.k[:, pair]
    shared = basis.mH @ (scale[:, None] * key)
    rest = key - (basis / scale[:, None]) @ shared
    group = pairs.q.shape[0] // pairs.k.shape[0]
    reading = (basis.conj() / scale[:, None]).repeat_interleave(group, 0)
    query = reading[:, :, None] * pairs.q[:, pair, None, :]
    unit = scale.square().mean().sqrt()
    return shared / unit, query * unit, rest


def unrotated_keys(weights: AttentionWeights, rotary: Rotary, rest: Tensor) -> Tensor:
    """Keys ``[G, D, E+1]`` with the slots' part taken out of the rotating dims.

    The rotary amplitude is multiplied in.
    """
    keys = with_bias(weights.k, weights.k_bias)
    return torch.cat([rest.real, rest.imag, keys[:, rotary.dims :]], 1)


def apply_gains(keys: Tensor, gains: Tensor, rotary: Rotary) -> Tensor:
    """``[G, D, n]`` as every query head's ``[H, D, n]``, the rotating pairs times their gain ``m_{h,l}``."""
    half = rotary.dims // 2
    per_head = keys.repeat_interleave(gains.shape[0] // keys.shape[0], 0)
    real, imaginary, still = per_head[:, :half], per_head[:, half : 2 * half], per_head[:, 2 * half :]
    a, b = gains.real[..., None], gains.imag[..., None]
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, still], 1)


def amplified_queries(weights: AttentionWeights, rotary: Rotary) -> Tensor:
    """Queries ``[H, D, E+1]``, the rotary amplitude multiplied into the rotating dims."""
    rows = with_bias(weights.q, weights.q_bias)
    return torch.cat([rows[:, : rotary.dims] * rotary.amplitude, rows[:, rotary.dims :]], 1)


def key_units(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, gains: Tensor, keys: Tensor
) -> Tensor:
    """Keys ``[G, D, E+1]`` in units of scores: their squared length is the energy of the scores that they cause."""
    queries = amplified_queries(weights, rotary)
    moment = second_moment(statistics).to(queries.device)
    energy = torch.einsum("hde,ef,hdf->hd", queries, moment, queries)
    half = rotary.dims // 2
    pair = (energy[:, :half] + energy[:, half : 2 * half]) * gains.abs().square()
    energy = torch.cat([pair / 2, pair / 2, energy[:, 2 * half :]], 1)
    return keys * energy.unflatten(0, (weights.kv_heads, -1)).sum(1).clamp_min(0).sqrt()[..., None]


def value_units(weights: AttentionWeights, values: Tensor) -> Tensor:
    """Values ``[G, D, E+1]`` in units of the layer's output.

    ``M^{1/2} v``, ``M`` summed over the queries of the head.
    """
    metric = torch.einsum("ehd,ehc->hdc", weights.o.double(), weights.o.double())
    energy, vectors = torch.linalg.eigh(metric.unflatten(0, (weights.kv_heads, -1)).sum(1))
    root = vectors * energy.clamp_min(0).sqrt()[:, None] @ vectors.mT
    return root @ values


def joint_basis(keys: Tensor, values: Tensor, statistics: LayerStatistics, rank: int, centred: bool) -> Basis:
    """Principal components of ``keys`` and ``values [G, D, E+1]``, each block at unit energy.

    Unused channels are zero.
    """
    root = covariance_root(statistics, centred).to(keys.device)
    blocks = [block[..., :-1].flatten(0, 1) @ root for block in (keys, values)]
    stacked = torch.cat([block / block.norm().clamp_min(torch.finfo(block.dtype).tiny) for block in blocks])
    return principal_basis(stacked, root, rank)


def covariance_root(statistics: LayerStatistics, centred: bool) -> Tensor:
    """``L [E, E]`` with ``L L^T`` the inputs' covariance (second moment unless ``centred``), made invertible."""
    gram, mean = statistics.gram.double(), statistics.mean.double()
    covariance = gram - torch.outer(mean, mean) if centred else gram
    ridge = covariance.diagonal().mean() * 1e-9
    return torch.linalg.cholesky(
        (covariance + covariance.mT) / 2 + ridge * torch.eye(len(mean), dtype=torch.float64, device=mean.device)
    )


def principal_basis(rows: Tensor, root: Tensor, rank: int) -> Basis:
    """``rows [n, E]`` act on whitened inputs ``root^{-1} x``.

    Their right singular vectors, scaled by the singular values.
    """
    _, sigma, vectors = torch.linalg.svd(rows, full_matrices=False)
    used = min(rank, int((sigma > sigma.max() * 1e-12).sum()))
    sigma, vectors = sigma[:used], vectors[:used]
    sigma = sigma / sigma.norm().clamp_min(torch.finfo(sigma.dtype).tiny)
    down = torch.linalg.solve_triangular(root, vectors, upper=False, left=False) * sigma[:, None]
    readout = root @ vectors.mT / sigma
    spare = rank - used
    return Basis(torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(readout, (0, spare)))


def assemble(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    split: RotarySplit,
    keys: Tensor,
    values: Tensor,
    basis: Basis,
    slots: Slots,
    scale: float | None,
    centred: bool,
) -> LatentWeights:
    """Everything in the terms of ``LatentWeights``; the value mean goes into the output bias."""
    keep = torch.promote_types(weights.q.dtype, torch.float32)
    group = weights.heads // weights.kv_heads
    mean = statistics.mean.double().to(weights.q.device)
    queries = amplified_queries(weights, rotary)
    rope_key = _real(split.key)
    rope_query = _real(split.query)
    down_bias = -(basis.down @ mean) if centred else None
    constant = values[..., -1] + (values[..., :-1] @ mean if centred else 0)
    return LatentWeights(
        down=basis.down,
        rope_key=rope_key[..., :-1],
        q_nope=queries[..., :-1],
        q_rope=rope_query[..., :-1],
        uk=basis.read(keys[..., :-1]),
        uv=basis.read(values[..., :-1]).repeat_interleave(group, 0),
        o=weights.o,
        theta=slots.theta,
        scale=weights.head_dim**-0.5 if scale is None else scale,
        down_bias=down_bias,
        rope_key_bias=None if weights.k_bias is None else rope_key[..., -1],
        q_nope_bias=None if weights.q_bias is None else queries[..., -1],
        q_rope_bias=None if weights.q_bias is None else rope_query[..., -1],
        o_bias=_output_bias(weights, constant.repeat_interleave(group, 0))
        if centred or weights.v_bias is not None
        else weights.o_bias,
    ).map(lambda tensor: tensor.to(keep).contiguous())


def _real(rows: Tensor) -> Tensor:
    """Complex ``[..., n, E+1]`` as half-split real ``[..., 2n, E+1]``."""
    return torch.cat([rows.real, rows.imag], -2)


def _output_bias(weights: AttentionWeights, constant: Tensor) -> Tensor:
    bias = torch.einsum("ehd,hd->e", weights.o.double(), constant)
    return bias if weights.o_bias is None else bias + weights.o_bias.double()
