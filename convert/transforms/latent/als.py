"""Fits latent attention to a layer by alternating least squares, from statistics alone.

A head sees a key ``k`` rotated by its distance. After conversion it can compute its key from the
shared rotary keys, rotated as well, and from the latent, which is not rotated. For a fixed
down-projection, the best up-projection of each head is a linear regression; for fixed
up-projections, so is the best down-projection. Both are small problems, because inputs enter only
through their second moments.

Score errors are weighted by the queries that cause them, value errors by the resulting output
error; a score error changes the output about as much as the values vary. That is a linearization:
large errors saturate in the softmax, so values are weighted by `VALUE_WEIGHT`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert.transforms.distances import DistanceMixture, compute_rotary_moments
from kvfold.convert.transforms.latent.latent_weights import LayerProjections
from kvfold.convert.transforms.linalg import (
    average_rotations,
    compute_covariance,
    decompose_symmetric,
    multiply_pairs,
    solve_damped,
)

# Excess loss on held-out text, nats per token (measured by a script in git history, 2026-11-22
# unless dated), of the reference MHA model at 48 + 16 and of SmolLM2-135M at 128 + 64 (64 x 256
# tokens). On SmolLM2 the first three were moved one by one from 10, 0.1 and 0.5 (0.125), then
# together: 0.099, and on windows of 2048 tokens the KL grows by 5 % from the first 256 to the
# second half. The MHA model, which has no sink, would prefer more weight on distances beyond the
# text.

# MHA model: 1: 0.103, 3: 0.096, 5: 0.094, 10: 0.093, 50: 0.095. SmolLM2: 3: 0.114, 10: 0.125.
# Shipped model, 2026-11-24: 1: 0.074, 3: 0.074, 10: 0.078.
VALUE_WEIGHT = 3.0

# Share of distances drawn from the full context, even if heads do not attend there. SmolLM2: 0.02:
# 0.113, 0.1: 0.125. MHA model on text as long as the calibration's sequences: 0: 0.089, 0.05:
# 0.091, 0.1: 0.093, 0.2: 0.100, 0.5: 0.137; on text four times as long: 0: 0.119, 0.1: 0.126.
# Shipped model, 2026-11-24: 0: 0.072, 0.02: 0.074, 0.1: 0.081.
LATENT_UNIFORM = 0.02

# The tail's share of the rest: less than a fold's (`distances.TAIL`), whose keys all keep their
# rotation. Two seeds each, 2026-11-24, at 0.25 against 0.5: MHA model 0.069 and 0.078, 0.071 and
# 0.080; shipped model 0.074 and 0.046, 0.083 and 0.055; on text four times as long (--seq-len 128
# --text) 0.112 and 0.094, 0.123 and 0.080; 0.058 and 0.061, 0.064 and 0.067. MHA model, first seed:
# 0: 0.080, 0.75: 0.077, 1: 0.091.
LATENT_TAIL = 0.25

ALS_ROUNDS = 4  # MHA model: 0: 0.199, 1: 0.099, 4: 0.093, 8: 0.093, 16: 0.094

# Pull toward the present solution, relative to each row's energy. MHA model: 1e-9, 1e-6, 1e-4 and
# 1e-2: 0.0930 each; needed for singular systems, in directions that do not occur in the inputs.
ALS_DAMPING = 1e-6


@dataclass(frozen=True)
class LatentFactors:
    """A layer's keys and values, factored into one down-projection and an up-projection per head.

    down: ``X [P + R, E+1]`` on ``[x; 1]``: shared rotary keys (``P`` rows), then the latent
    up_keys: ``[H, D, P + R]``, each head's keys from both, as its queries see them
    up_values: ``[G, D, R]``, the values from the latent

    ``R`` does not count the constant channel of layout ``free``, which ``--kv-rank`` counts.
    """

    down: Tensor
    up_keys: Tensor
    up_values: Tensor

    @property
    def rank(self) -> int:
        """The number of latent channels ``R``, without the constant channel of layout ``free``."""
        return self.up_values.shape[-1]


@dataclass(frozen=True)
class RotationMoments:
    """The effect of rotary embedding, averaged over random distances, on second moments between two
    kinds of rows (cached rows or keys).

    Rows are the real parts of rotary pairs, their imaginary parts, then rows that do not rotate.
    Rotation multiplies each pair by ``e^{-i theta delta}``, independently of the inputs.

    left, right: ``[H, p]`` and ``[H, q]``, the mean factors ``E e^{-i theta delta}`` of the pairs
    variation: ``[H, 2p, 2q]``, the covariances of the factors in `linalg.make_pair_basis`
    """

    left: Tensor
    right: Tensor
    variation: Tensor

    def rotate_moment(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """Return the second moments ``E[y z^T]`` of rotated rows ``y`` and ``z``, without the part
        that is the same at every distance: ``[H, n_y, n_z]``.

        ``product = A cov(x) B^T``; ``left_mean`` and ``right_mean`` are ``A E[x]`` and ``B E[x]``,
        biases included. A softmax over positions sees only the variation of constant keys with
        distance.
        """
        means = left_mean[..., :, None] * right_mean[..., None, :]
        return self._rotate_by_mean(product) + self._add_covariance(product + means)

    def compute_gradient_factors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices ``V`` and ``M`` for the gradients of ``sum(weight *
        rotate_moment(product, a, b))`` with respect to its arguments.

        With respect to ``A`` in ``product = A cov B^T`` it is ``V B cov``, and with respect to
        ``a`` it is ``M b``.
        """
        back = RotationMoments(self.left.conj(), self.right.conj(), self.variation.conj())
        of_means = back._add_covariance(weight)
        return back._rotate_by_mean(weight) + of_means, of_means

    def _rotate_by_mean(self, moment: Tensor) -> Tensor:
        """Return ``E[R] moment E[S]^T`` for the mean rotations ``R`` and ``S`` of rows
        and columns.
        """
        moment = moment.expand(len(self.left), *moment.shape[-2:])
        return multiply_pairs(multiply_pairs(moment, self.left).mT, self.right).mT

    def _add_covariance(self, moment: Tensor) -> Tensor:
        """Return ``E[R moment S^T] - E[R] moment E[S]^T`` for the second moment ``moment`` of two
        groups of rows, which the rotations ``R`` and ``S`` by a random distance turn: what the
        variation of the distance adds. It is zero outside the rotary rows.
        """
        rows, columns = self.variation.shape[1:]
        rotary = moment[..., :rows, :columns]
        varied = average_rotations(rotary, self.variation, rows // 2, columns // 2)
        return pad(varied, (0, moment.shape[-1] - columns, 0, moment.shape[-2] - rows))


def make_rotation_moments(
    distances: DistanceMixture, cached: Tensor, keys: Tensor
) -> tuple[RotationMoments, RotationMoments]:
    """Return the rotation moments of cached rows with themselves, and of cached rows with the
    source's keys.

    ``cached`` and ``keys`` are the frequencies of their rotary pairs, float64.
    """
    speeds = torch.cat([cached, -cached, keys, -keys, keys.new_zeros(1)])
    distinct, index = torch.unique(speeds, return_inverse=True)
    moments = compute_rotary_moments(distances, distinct)[:, index[:, None], index]
    means = moments[:, :-1, -1]
    variation = moments[:, :-1, :-1] - means[:, :, None] * means[:, None].conj()
    count = len(cached)
    rotary = 2 * count
    left = means[:, :count]
    right = means[:, rotary : rotary + len(keys)]
    same = RotationMoments(left, left, variation[:, :rotary, :rotary])
    return same, RotationMoments(left, right, variation[:, :rotary, rotary:])


@dataclass(frozen=True)
class LatentLeastSquares:
    """The inputs and weights of the least-squares problem that fits a latent to one layer.

    layer: the layer to approximate
    covariance: ``[E, E]`` of the inputs
    mean: ``[E+1]`` of ``[x; 1]``
    mean_weight: ``[E] = covariance^-1 mean``; 0 if ``centered``
    value_moment: ``[E+1, E+1]`` of ``[x; 1]``, which weights value errors; only its covariance if
        ``centered``
    same, cross: the kernels of the cached rows with themselves and with the keys
    centered: the down-projection may have a bias, and value errors are measured around their mean;
        otherwise biases are not allowed, and the mean of the values is included
    query_weight: ``[H, D, D]``, the squared output error per error of a key
    value_weight: ``[G, D, D]``, the squared output error per error of a value
    """

    projections: LayerProjections
    covariance: Tensor
    mean: Tensor
    mean_weight: Tensor
    value_moment: Tensor
    same: RotationMoments
    cross: RotationMoments
    centered: bool
    query_weight: Tensor
    value_weight: Tensor


def alternate_least_squares(
    projections: LayerProjections,
    queries: Tensor,
    moment: Tensor,
    theta: Tensor,
    distances: DistanceMixture,
    factors: LatentFactors,
    *,
    centered: bool,
) -> LatentFactors:
    """Return ``factors`` improved by alternating least squares: `ALS_ROUNDS` of up-projections,
    then the down-projection; the up-projections are solved once more.

    ``queries [H, D, D]`` and ``moment [E+1, E+1]``: second moments of queries and of ``[x; 1]``.
    ``theta [P/2]``: angles of the rotary rows. ``distances``: between queries and keys.
    ``centered`` as in `LatentLeastSquares`.
    """
    cov = compute_covariance(moment)
    mean = moment[-1]
    values = projections.values[..., :-1]
    # A score error moves about as much output as the values vary: the output energy of an average
    # head.
    output = (projections.metric * (values @ cov @ values.mT)).sum() / len(projections.queries)
    same, cross = make_rotation_moments(distances, theta.to(cov), projections.rotary.theta.to(cov))
    problem = LatentLeastSquares(
        projections=projections,
        covariance=cov,
        mean=mean,
        mean_weight=torch.zeros_like(mean[:-1]) if centered else torch.linalg.solve(cov, mean[:-1]),
        value_moment=pad(cov, (0, 1, 0, 1)) if centered else moment,
        same=same,
        cross=cross,
        centered=centered,
        query_weight=queries * projections.scale**2 * output,
        value_weight=projections.metric * VALUE_WEIGHT,
    )
    for _ in range(ALS_ROUNDS):
        factors = _solve_down_projection(problem, _solve_up_projections(problem, factors))
        # Principal units keep the systems well conditioned, and change no key and no value.
        factors = _normalize_factors(problem, factors)
    return _solve_up_projections(problem, factors)


def _solve_up_projections(problem: LatentLeastSquares, factors: LatentFactors) -> LatentFactors:
    """Return ``factors`` with the up-projections ``A_h [D, P + R]`` and ``B_g [D, R]`` that fit the
    present down-projection best.

    Let ``y`` be the cached rows and ``k`` the source's key, both as head ``h`` sees them, ``c`` the
    latent and ``v`` the value. The normal equations are

        A_h E[y y^T] = E[k y^T]        B_g E[c c^T] = E[v c^T]
    """
    projections = problem.projections
    keys = projections.keys.repeat_interleave(projections.query_heads_per_kv_head, 0)
    latent = factors.down[-factors.rank :]
    spread = factors.down[:, :-1] @ problem.covariance
    mean = factors.down @ problem.mean
    seen = problem.same.rotate_moment(spread @ factors.down[:, :-1].mT, mean, mean)  # E[y y^T]
    cross = problem.cross.rotate_moment(
        spread @ keys[..., :-1].mT, mean, keys @ problem.mean
    )  # E[y k^T]
    weighted = problem.value_moment @ latent.mT
    return replace(
        factors,
        up_keys=_solve_regression(factors.up_keys, seen, cross.mT),
        up_values=_solve_regression(
            factors.up_values, latent @ weighted, projections.values @ weighted
        ),
    )


def _solve_regression(present: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """Return ``W [..., m, n]`` with ``W gram = cross``, damped toward ``present [..., m, n]``;
    directions without energy do not change.
    """
    # Scale to a unit diagonal, so that one damping suits both rotary rows and weak latent channels.
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)[..., None, :]
    residual = ((cross - present @ gram) / scale).mT
    return present + solve_damped(gram / (scale.mT * scale), residual, ALS_DAMPING).mT / scale


def _solve_down_projection(problem: LatentLeastSquares, factors: LatentFactors) -> LatentFactors:
    """Return ``factors`` with the down-projection ``X = [L b]`` that fits the present
    up-projections best.

    With ``C = cov(x)`` and ``m = E[x]``, a change ``dL, db`` solves

        V dL C + M (dL m + db) m^T = P C + p m^T     (the derivative with respect to L)
        M (dL m + db) = p                            (with respect to b, if biases are allowed)

    ``V, M [n, n]`` are the costs of a change, ``P [n, E]`` and ``p [n]`` the unexplained remainder.
    Without biases ``db = 0``. With ``u = dL m`` and ``c = C^-1 m``, the first equation times
    ``C^-1`` yields ``dL``, and multiplying ``dL`` by ``m`` yields an equation for ``u`` alone:

        dL = V^-1 (P + (p - M u) c^T)        (V + (m.c) M) u = P m + (m.c) p

    If centered, the second equation eliminates the mean from the first, as if ``c`` were 0, and ``L
    m + b`` changes by ``M^-1 p``.
    """
    projections = problem.projections
    rank = factors.rank
    linear = factors.down[:, :-1]
    bias = factors.down[:, -1]
    present = factors.down @ problem.mean
    weighted = factors.up_keys.mT @ problem.query_weight  # [H, n, D]
    V, M = (
        part.sum(0) for part in problem.same.compute_gradient_factors(weighted @ factors.up_keys)
    )
    by_head = problem.cross.compute_gradient_factors(weighted)
    of_keys, of_means = (
        torch.unflatten(part, 0, (-1, projections.query_heads_per_kv_head)).sum(1)
        for part in by_head
    )
    P = (of_keys @ projections.keys[..., :-1]).sum(0)
    p = (of_means @ (projections.keys @ problem.mean)[..., None]).sum((0, 2))
    weighted = factors.up_values.mT @ problem.value_weight  # [G, R, D]
    needed = (weighted @ factors.up_values).sum(0)
    V[-rank:, -rank:] += needed
    P[-rank:] += (weighted @ projections.values[..., :-1]).sum(0)
    if not problem.centered:
        M[-rank:, -rank:] += needed
        p[-rank:] += torch.einsum("grd,gde,e->r", weighted, projections.values, problem.mean)
    P -= V @ linear
    p -= M @ present
    # Damping is relative to the energy of each row; rows without energy do not change.
    energy = V.diagonal()
    damping = torch.diag(torch.where(energy > 0, energy * ALS_DAMPING, 1.0))
    V = V + damping
    mean = problem.mean[:-1]
    c = problem.mean_weight
    u = torch.linalg.solve(V + (mean @ c) * M, P @ mean + (mean @ c) * p)
    linear = linear + torch.linalg.solve(V, P + torch.outer(p - M @ u, c))
    if problem.centered:
        bias = present + torch.linalg.solve(M + damping, p) - linear @ mean
    return replace(factors, down=torch.cat([linear, bias[:, None]], 1))


def _normalize_factors(problem: LatentLeastSquares, factors: LatentFactors) -> LatentFactors:
    """Return equivalent factors with rotary pairs of unit energy and uncorrelated latent channels,
    scaled by their importance.
    """
    rank = factors.rank
    rotary = factors.down[:-rank]
    latent = factors.down[-rank:]
    energy = (rotary[:, :-1] @ problem.covariance * rotary[:, :-1]).sum(1)
    energy = energy + (rotary @ problem.mean).square()
    unit = energy.view(2, -1).mean(0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0).repeat(2)
    # If biases are allowed, the latent's mean is zero.
    if problem.centered:
        latent = torch.cat([latent[:, :-1], -(latent[:, :-1] @ problem.mean[:-1])[:, None]], 1)
    moment = latent @ problem.value_moment @ latent.mT
    keys = factors.up_keys[..., -rank:]
    # [R, R]: the squared output per error of the latent, through values and through keys.
    through_values = (factors.up_values.mT @ problem.value_weight @ factors.up_values).sum(0)
    importance = (keys.mT @ problem.query_weight @ keys).sum(0) + through_values
    forth, back = _normalize_channels(moment, importance)
    up_keys = torch.cat([factors.up_keys[..., :-rank] * unit, keys @ back], -1)
    down = torch.cat([rotary / unit[:, None], forth @ latent])
    return LatentFactors(down, up_keys, factors.up_values @ back)


def _normalize_channels(moment: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix ``forth [R, R]`` to uncorrelated channels, sized by importance and with a
    total energy of one, and its inverse ``back [R, R]``.
    """
    energy, axes = decompose_symmetric(moment)
    tiny = torch.finfo(energy.dtype).tiny
    used = energy > energy[0].clamp_min(tiny) * 1e-12
    root = torch.where(used, energy, 0.0).sqrt()
    # Channels without energy come last and are zero in both results.
    counts, turn = decompose_symmetric(root[:, None] * (axes.mT @ importance @ axes) * root)
    size = counts.clamp_min(counts[0].clamp_min(1e-300) * 1e-12).sqrt()
    size = torch.where(used, size, 0.0)
    size = size / size.norm().clamp_min(tiny)
    forth = (size[:, None] * turn.mT) @ (axes / torch.where(used, root, torch.inf)).mT
    back = torch.where(used, (axes * root) @ turn / size, 0.0)
    return forth, back
