"""MHA or GQA into multi-head latent attention, from calibration statistics.

1. Rotary keys: the principal complex components over the heads at the frequencies that ``Slots`` names.
2. What remains of the keys loses its rotation; the gain of ``pair_gains`` is the constant that stands in for it.
3. The rest of the keys, in units of scores, and the values, in units of the layer's output, share one latent: the
   principal components of both together.
4. From there ``als`` alternates between readings and cached rows: a head may then read any rotary key, not only its own
   pair's, and make up for a lost rotation with one of another frequency.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import mixed_distances
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent.als import Fit, LinearLayer
from kvfold.convert.transforms.latent.slots import Slots, amplified, components, pair_gains, pair_keys, query_scales
from kvfold.convert.transforms.latent.units import Units, from_units, in_units, units_of
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.linalg import (
    covariance,
    head_moments,
    input_moment,
    metric_root,
    output_metric,
    with_bias,
)
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


@dataclass(frozen=True)
class RotarySplit:
    """The slots' keys ``rows [P, E+1]``, each head's ``reading [H, D, P]`` of them, ``rest [G, D, E+1]`` of keys."""

    rows: Tensor
    reading: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Basis:
    """A latent ``c = down x`` of unit total energy, and how linear functions of ``x`` are best read from it."""

    down: Tensor
    readout: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """``[n, E] -> [n, R]``: the map from ``c`` that comes closest to ``rows x`` over the calibration text."""
        return rows @ self.readout


@dataclass(frozen=True)
class LatentFit:
    """A layer as linear maps, the mean ``[E+1]`` of its inputs ``[x; 1]``, and the latent fitted to it."""

    layer: LinearLayer
    mean: Tensor
    fit: Fit


@dataclass(frozen=True)
class FittedLayer:
    """A fit, the ``units`` that it is in, and the layer's ``weights`` in these units."""

    weights: AttentionWeights
    fitted: LatentFit
    units: Units


def to_latent(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    context: int = 0,
    scale: float | None = None,
    centered: bool = True,
    rounds: int | None = None,
) -> LatentWeights:
    """A layer with ``rank`` latent channels.

    ``context``: how many positions the result has to serve; 0 stands for the calibration text's own length.
    ``centered`` takes the mean out of the latent and gives it to the biases; without it the result has no bias that the
    source has not. ``scale`` multiplies the source's scores; ``head_dim ** -0.5`` unless given. ``rounds`` of
    alternating least squares (``als.ROUNDS``); 0 leaves the principal components as they are. A layer that does not
    rotate gets zero rotary keys. The result is in at least float32.
    """
    scale = weights.head_dim**-0.5 if scale is None else scale
    fitted = fit_layer(
        weights, statistics, rotary, slots, rank, context=context, scale=scale, centered=centered, rounds=rounds
    )
    return assemble_layer(fitted, slots, scale, centered=centered)


def fit_layer(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    context: int,
    scale: float,
    centered: bool,
    rounds: int | None,
) -> FittedLayer:
    """The fit of ``to_latent``, before it is written as weights."""
    statistics = statistics.to(weights.q.device)
    units = units_of(weights, statistics)
    weights, statistics = in_units(weights, statistics, units)
    given = _given(weights, statistics, rotary, slots, context, scale * units.scores, centered)
    layer, split = given.layer, given.split
    basis = principal_basis(given.rows, given.root, rank)
    fit = first_fit(split, apply_gains(split.rest, given.gains, rotary), layer.values, basis)
    rounds = als.ROUNDS if rounds is None else rounds
    if rounds and basis.down.any():  # where nothing is left for the latent, the first fit is exact
        distances = mixed_distances(statistics.profile, context, als.UNIFORM, als.TAIL)
        inputs = layer, given.queries, given.moment, rotary, slots.theta, distances
        fit = als.alternate(als.make_problem(*inputs, rank, centered=centered), fit, rounds)
    return FittedLayer(weights, LatentFit(layer, given.moment[-1], fit), units)


def assemble_layer(fitted: FittedLayer, slots: Slots, scale: float, *, centered: bool) -> LatentWeights:
    """``assemble`` in the layer's own units; ``scale`` multiplies its scores."""
    latent = assemble(fitted.weights, fitted.fitted, slots, centered=centered)
    return from_units(replace(latent, scale=scale), fitted.units)


def latent_spectrum(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    *,
    context: int = 0,
    centered: bool = True,
) -> Tensor:
    """``[E]``, descending, float64: the shares of energy of the principal components that `to_latent` starts from.

    They are those of all that the rotary keys leave; a latent of rank ``R`` keeps the first ``R``.
    """
    statistics = statistics.to(weights.q.device)
    weights, statistics = in_units(weights, statistics, units_of(weights, statistics))
    rows = _given(weights, statistics, rotary, slots, context, 1.0, centered).rows
    energies: Tensor = torch.linalg.eigvalsh(rows.mT @ rows).flip(0).clamp_min(0)
    return energies / energies.sum().clamp_min(torch.finfo(energies.dtype).tiny)


@dataclass(frozen=True)
class _Given:
    """A layer on its inputs: second moments of inputs and ``queries``, rotary keys and the rest, what stands in for its
    rotation, and that rest with the values as ``rows [n, E]`` on inputs whitened by ``root``.
    """

    layer: LinearLayer
    moment: Tensor
    queries: Tensor
    split: RotarySplit
    gains: Tensor
    root: Tensor
    rows: Tensor


def _given(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    context: int,
    scale: float,
    centered: bool,
) -> _Given:
    moment, layer = input_moment(statistics), linear_layer(weights, rotary, scale)
    queries = head_moments(layer.queries, moment)
    split = split_rotary(layer, rotary, slots, queries, moment)
    gains, root = pair_gains(statistics, rotary, context), moment_root(moment, centered)
    in_output, _ = metric_root(layer.metric)  # M^{1/2}: values in units of the layer's output
    rows = joint_rows(key_units(queries, rotary, gains, split.rest), in_output @ layer.values, root)
    return _Given(layer, moment, queries, split, gains, root, rows)


def linear_layer(weights: AttentionWeights, rotary: Rotary, scale: float) -> LinearLayer:
    """The layer as maps on ``[x; 1]``, the rotary amplitude multiplied into queries and keys."""
    return LinearLayer(
        queries=amplified(with_bias(weights.q, weights.q_bias), rotary),
        keys=amplified(with_bias(weights.k, weights.k_bias), rotary),
        values=with_bias(weights.v, weights.v_bias),
        metric=output_metric(weights.o, weights.kv_heads),
        scale=scale,
    )


def split_rotary(layer: LinearLayer, rotary: Rotary, slots: Slots, queries: Tensor, moment: Tensor) -> RotarySplit:
    """The slots' rotary keys, how heads read them, and the keys without them.

    ``queries [H, D, D]`` and ``moment [E+1, E+1]`` are the second moments of queries and of ``[x; 1]``.
    """
    half, keys = rotary.dims // 2, layer.keys
    reading = keys.new_zeros(*layer.queries.shape[:2], slots.rope_dim)
    if not half:
        return RotarySplit(keys.new_zeros(slots.rope_dim, keys.shape[-1]), reading, keys)
    pairs = pair_keys(keys, queries, moment, rotary)
    scales = query_scales(pairs)
    _, vectors = components(pairs)
    shared: list[Tensor] = []
    left_over: list[Tensor] = []
    slot = 0
    for pair, count in enumerate(slots.counts):
        key, scale, basis = pairs.keys[:, pair], scales[:, pair], vectors[pair, :, :count]
        top, factor = basis.mH @ (scale[:, None] * key), basis / scale[:, None]  # [count, E+1], [G, count]
        left_over.append(key - factor @ top)
        unit = scale.square().mean().sqrt()  # keeps the shared keys in the units of the source's
        shared.append(top / unit)
        _read_pair(reading, (factor * unit).repeat_interleave(layer.group, 0), pair, half, slot)
        slot += count
    left = torch.stack(left_over, 1)  # [G, L, E+1]
    rest = torch.cat([left.real, left.imag, keys[:, rotary.dims :]], 1)
    rows = torch.cat(shared)
    return RotarySplit(torch.cat([rows.real, rows.imag]), reading, rest)


def _read_pair(reading: Tensor, factor: Tensor, pair: int, half: int, slot: int) -> None:
    """Enter complex factors ``[H, count]`` of ``pair`` on the slots from ``slot`` on into ``reading [H, D, P]``."""
    slots = reading.shape[2] // 2
    real, imaginary = slice(slot, slot + factor.shape[1]), slice(slots + slot, slots + slot + factor.shape[1])
    reading[:, pair, real] = reading[:, half + pair, imaginary] = factor.real
    reading[:, half + pair, real] = factor.imag
    reading[:, pair, imaginary] = -factor.imag


def apply_gains(keys: Tensor, gains: Tensor, rotary: Rotary) -> Tensor:
    """``[G, D, n]`` as every query head's ``[H, D, n]``, the rotating pairs times their gain ``m_{h,l}``."""
    half = rotary.dims // 2
    per_head = keys.repeat_interleave(gains.shape[0] // keys.shape[0], 0)
    real, imaginary, still = per_head[:, :half], per_head[:, half : 2 * half], per_head[:, 2 * half :]
    a, b = gains.real[..., None], gains.imag[..., None]
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, still], 1)


def key_units(queries: Tensor, rotary: Rotary, gains: Tensor, keys: Tensor) -> Tensor:
    """Keys ``[G, D, E+1]`` in units of scores: their squared length is the energy of the scores that they cause."""
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    half = rotary.dims // 2
    pair = (energy[:, :half] + energy[:, half : 2 * half]) * gains.abs().square() / 2
    energy = torch.cat([pair, pair, energy[:, 2 * half :]], 1)
    return keys * energy.reshape(len(keys), -1, energy.shape[1]).sum(1).sqrt()[..., None]


def joint_rows(keys: Tensor, values: Tensor, root: Tensor) -> Tensor:
    """``keys`` and ``values [G, D, E+1]`` together as rows ``[n, E]`` on whitened inputs, each block at unit energy.

    ``root`` of `moment_root`.
    """
    blocks = [block[..., :-1].flatten(0, 1) @ root for block in (keys, values)]
    return torch.cat([block / block.norm().clamp_min(torch.finfo(block.dtype).tiny) for block in blocks])


def moment_root(moment: Tensor, centered: bool) -> Tensor:
    """``L [E, E]`` with ``L L^T`` the inputs' covariance (second moment unless ``centered``), from `input_moment`."""
    root: Tensor = torch.linalg.cholesky(covariance(moment) if centered else moment[:-1, :-1])
    return root


def principal_basis(rows: Tensor, root: Tensor, rank: int) -> Basis:
    """The right singular vectors of ``rows [n, E]``, scaled by the singular values, as a latent of ``rank`` channels.

    The rows act on whitened inputs ``root^{-1} x``. Unused channels are zero.
    """
    _, sigma, vectors = torch.linalg.svd(rows, full_matrices=False)
    used = min(rank, int((sigma > sigma.max() * 1e-12).sum()))
    sigma, vectors = sigma[:used], vectors[:used]
    sigma = sigma / sigma.norm().clamp_min(torch.finfo(sigma.dtype).tiny)
    down = torch.linalg.solve_triangular(root, vectors, upper=False, left=False) * sigma[:, None]
    readout = root @ vectors.mT / sigma
    spare = rank - used
    return Basis(torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(readout, (0, spare)))


def first_fit(split: RotarySplit, keys: Tensor, values: Tensor, basis: Basis) -> Fit:
    """Slots and basis as a fit. ``keys [H, D, E+1]`` without rotation, ``values [G, D, E+1]``."""
    latent = torch.nn.functional.pad(basis.down, (0, 1))
    reading = torch.cat([split.reading, basis.read(keys[..., :-1])], -1)
    return Fit(torch.cat([split.rows, latent]), reading, basis.read(values[..., :-1]))


def assemble(weights: AttentionWeights, fitted: LatentFit, slots: Slots, *, centered: bool) -> LatentWeights:
    """Everything in the terms of ``LatentWeights``; constant values go into the output bias."""
    keep = torch.promote_types(weights.q.dtype, torch.float32)
    layer, mean, fit = fitted.layer, fitted.mean[:-1], fitted.fit
    rope, group = slots.rope_dim, layer.group
    rope_key, down = fit.rows[:rope], fit.rows[rope:, :-1]
    rope_query = torch.einsum("hdp,hde->hpe", fit.reading[..., :rope], layer.queries)
    constant = layer.values[..., -1] + (layer.values[..., :-1] @ mean if centered else 0)
    o_bias = weights.o_bias
    if centered or weights.v_bias is not None:
        # Attention rows sum to one, so constant values reach the output whole.
        moved = torch.einsum("ehd,hd->e", weights.o.double(), constant.repeat_interleave(group, 0))
        o_bias = moved if o_bias is None else moved + o_bias.double()
    return LatentWeights(
        down=down,
        rope_key=rope_key[:, :-1],
        q_nope=layer.queries[..., :-1],
        q_rope=rope_query[..., :-1],
        uk=fit.reading[..., rope:],
        uv=fit.values.repeat_interleave(group, 0),
        o=weights.o,
        theta=slots.theta,
        scale=layer.scale,
        down_bias=-(down @ mean) if centered else None,
        rope_key_bias=rope_key[:, -1] if centered or weights.k_bias is not None else None,
        q_nope_bias=None if weights.q_bias is None else layer.queries[..., -1],
        q_rope_bias=None if weights.q_bias is None else rope_query[..., -1],
        o_bias=o_bias,
    ).map(lambda tensor: tensor.to(keep).contiguous())
