"""MHA or GQA into multi-head latent attention: from calibration statistics, or from the weights alone (`svd_fit`).

1. Rotary keys: the principal complex components over the heads at the frequencies that ``Slots`` names.
2. What remains of the keys loses its rotation; the gain of ``pair_gains`` is the best constant in its place.
3. The rest of the keys, in units of scores, and the values, in units of the layer's output, share one latent: the
   principal components of both together.
4. From there ``als`` alternates between readings and cached rows: a head may then read any rotary key, not only that
   of its pair, and make up for a lost rotation with one of another frequency.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import mixed_distances
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent.als import LatentFit
from kvfold.convert.transforms.latent.slots import RotarySplit, Slots, apply_gains, pair_gains, split_rotary
from kvfold.convert.transforms.latent.units import PLAIN, Units, from_units, in_units, units_of
from kvfold.convert.transforms.latent.weights import LatentWeights, LinearLayer
from kvfold.convert.transforms.linalg import covariance, head_moments, input_moment, metric_root
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


@dataclass(frozen=True)
class Basis:
    """A latent ``c = down x`` of unit total energy, and the best reading of linear functions of ``x`` from it."""

    down: Tensor
    readout: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """``[n, E] -> [n, R]``: the map from ``c`` that comes closest to ``rows x`` over the calibration text."""
        return rows @ self.readout


@dataclass(frozen=True)
class FittedLayer:
    """A layer and its latent in ``units``: ``weights``, the same as linear maps, their ``fit``.

    ``mean [E+1]`` of the inputs ``[x; 1]``. ``centered``: the mean is taken out of the latent and given to the biases.
    """

    weights: AttentionWeights
    layer: LinearLayer
    mean: Tensor
    fit: LatentFit
    units: Units
    centered: bool


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
    """The layer as latent attention with ``rank`` channels, in at least float32.

    ``context``: the number of positions the result has to serve; 0 means the length of the calibration text.
    ``centered`` takes the mean out of the latent and gives it to the biases; without it the result has no bias that the
    source has not. ``scale`` multiplies the source's scores; ``head_dim ** -0.5`` unless given. ``rounds`` of
    alternating least squares (``als.ROUNDS``); 0 leaves the principal components as they are. A layer that does not
    rotate gets zero rotary keys.
    """
    fitted = fit_layer(
        weights, statistics, rotary, slots, rank, context=context, scale=scale, centered=centered, rounds=rounds
    )
    return assemble(fitted, slots)


def svd_latent(
    weights: AttentionWeights,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    gain: Tensor | None = None,
) -> LatentWeights:
    """The layer as latent attention with ``rank`` channels, from its weights alone; arguments as `svd_fit`."""
    return assemble(svd_fit(weights, rotary, slots, rank, scale=scale, gain=gain), slots)


def fit_layer(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    context: int,
    scale: float | None,
    centered: bool,
    rounds: int | None,
) -> FittedLayer:
    """The fit of `to_latent`, before it is written as weights."""
    scale = weights.head_dim**-0.5 if scale is None else scale
    statistics = statistics.to(weights.q.device)
    # Fits square sizes: in float64 they fail for layers far from size one, which rescaling by powers of two mends.
    units = units_of(weights, statistics)
    weights, statistics = in_units(weights, statistics, units)
    start = _start(weights, statistics, rotary, slots, context, scale * units.scores, centered)
    layer, split = start.layer, start.split
    basis = principal_basis(start.rows, start.root, rank)
    fit = first_fit(split, apply_gains(split.rest, start.gains, rotary), layer.values, basis)
    rounds = als.ROUNDS if rounds is None else rounds
    if rounds and basis.down.any():  # where nothing is left for the latent, the first fit is exact
        distances = mixed_distances(statistics.profile, context, als.UNIFORM, als.TAIL)
        inputs = layer, start.queries, start.moment, rotary, slots.theta, distances
        fit = als.alternate(als.make_problem(*inputs, rank, centered=centered), fit, rounds)
    return FittedLayer(weights, layer, start.moment[-1], fit, units, centered)


def svd_fit(
    weights: AttentionWeights,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    gain: Tensor | None = None,
) -> FittedLayer:
    """The baseline without calibration: a truncated SVD of the stacked key and value projections.

    ``slots`` from ``stride_slots``, as in MHA2MLA (arXiv:2502.14837): one shared key per slot, the principal component
    over the heads' weights. The rest of the keys loses its rotation. ``gain [E]``, the weight of the norm before the
    attention, only sets the scale of the latent.
    """
    layer = LinearLayer.of(weights, rotary, weights.head_dim**-0.5 if scale is None else scale)
    moment = torch.eye(weights.model_dim + 1, dtype=torch.float64, device=weights.q.device)  # nothing known of inputs
    split = split_rotary(layer, rotary, slots, head_moments(layer.queries, moment), moment)
    rows = torch.cat([split.rest, layer.values])[..., :-1].flatten(0, 1)
    basis = principal_basis(rows, moment[:-1, :-1], rank)
    norm = (basis.down if gain is None else basis.down * gain.to(basis.down)).norm().clamp_min(1e-30)
    basis = Basis(basis.down / norm, basis.readout * norm)
    fit = first_fit(split, split.rest.repeat_interleave(layer.group, 0), layer.values, basis)
    return FittedLayer(weights, layer, moment[-1], fit, PLAIN, centered=False)


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

    A latent of rank ``R`` keeps the first ``R`` of all that the rotary keys leave.
    """
    statistics = statistics.to(weights.q.device)
    weights, statistics = in_units(weights, statistics, units_of(weights, statistics))
    rows = _start(weights, statistics, rotary, slots, context, 1.0, centered).rows
    energies: Tensor = torch.linalg.eigvalsh(rows.mT @ rows).flip(0).clamp_min(0)
    return energies / energies.sum().clamp_min(torch.finfo(energies.dtype).tiny)


@dataclass(frozen=True)
class _Start:
    """What the principal components and the least squares both start from.

    Second moments of the inputs and of ``queries``; the rotary keys, the rest of the keys and the ``gains`` in place of
    its rotation; that rest and the values as ``rows [n, E]`` on inputs whitened by ``root``.
    """

    layer: LinearLayer
    moment: Tensor
    queries: Tensor
    split: RotarySplit
    gains: Tensor
    root: Tensor
    rows: Tensor


def _start(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    context: int,
    scale: float,
    centered: bool,
) -> _Start:
    moment, layer = input_moment(statistics), LinearLayer.of(weights, rotary, scale)
    queries = head_moments(layer.queries, moment)
    split = split_rotary(layer, rotary, slots, queries, moment)
    gains, root = pair_gains(statistics, rotary, context), moment_root(moment, centered)
    in_output, _ = metric_root(layer.metric)  # M^{1/2}: values in units of the layer's output
    rows = joint_rows(key_units(queries, rotary, gains, split.rest), in_output @ layer.values, root)
    return _Start(layer, moment, queries, split, gains, root, rows)


def key_units(queries: Tensor, rotary: Rotary, gains: Tensor, keys: Tensor) -> Tensor:
    """Keys ``[G, D, E+1]`` in units of scores: their squared length is the energy of the scores that they cause."""
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    half = rotary.dims // 2
    # Rotation spreads a query's energy evenly over the two dims of a pair.
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
    # Directions at the level of rounding would get a readout of 1e12: these channels stay zero.
    used = min(rank, int((sigma > sigma.max() * 1e-12).sum()))
    sigma, vectors = sigma[:used], vectors[:used]
    sigma = sigma / sigma.norm().clamp_min(torch.finfo(sigma.dtype).tiny)
    down = torch.linalg.solve_triangular(root, vectors, upper=False, left=False) * sigma[:, None]
    readout = root @ vectors.mT / sigma
    spare = rank - used
    return Basis(torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(readout, (0, spare)))


def first_fit(split: RotarySplit, keys: Tensor, values: Tensor, basis: Basis) -> LatentFit:
    """Slots and basis as a fit. ``keys [H, D, E+1]`` without rotation, ``values [G, D, E+1]``."""
    latent = torch.nn.functional.pad(basis.down, (0, 1))
    reading = torch.cat([split.reading, basis.read(keys[..., :-1])], -1)
    return LatentFit(torch.cat([split.rows, latent]), reading, basis.read(values[..., :-1]))


def assemble(fitted: FittedLayer, slots: Slots) -> LatentWeights:
    """The fit written as weights, in the layer's units before the fit; constant values go into the output bias."""
    weights, layer, mean, fit = fitted.weights, fitted.layer, fitted.mean[:-1], fitted.fit
    keep = torch.promote_types(weights.q.dtype, torch.float32)
    rope, group = slots.rope_dim, layer.group
    rope_key, down = fit.rows[:rope], fit.rows[rope:, :-1]
    rope_query = torch.einsum("hdp,hde->hpe", fit.reading[..., :rope], layer.queries)
    constant = layer.values[..., -1] + (layer.values[..., :-1] @ mean if fitted.centered else 0)
    o_bias = weights.o_bias
    if fitted.centered or weights.v_bias is not None:
        # Attention rows sum to one, so constant values reach the output whole.
        moved = torch.einsum("ehd,hd->e", weights.o.double(), constant.repeat_interleave(group, 0))
        o_bias = moved if o_bias is None else moved + o_bias.double()
    latent = LatentWeights(
        down=down,
        rope_key=rope_key[:, :-1],
        q_nope=layer.queries[..., :-1],
        q_rope=rope_query[..., :-1],
        uk=fit.reading[..., rope:],
        uv=fit.values.repeat_interleave(group, 0),
        o=weights.o,
        theta=slots.theta,
        scale=layer.scale / fitted.units.scores,
        down_bias=-(down @ mean) if fitted.centered else None,
        rope_key_bias=rope_key[:, -1] if fitted.centered or weights.k_bias is not None else None,
        q_nope_bias=None if weights.q_bias is None else layer.queries[..., -1],
        q_rope_bias=None if weights.q_bias is None else rope_query[..., -1],
        o_bias=o_bias,
    ).map(lambda tensor: tensor.to(keep).contiguous())
    return from_units(latent, fitted.units)
