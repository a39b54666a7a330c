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

    down: ``X [P + R, E+1]`` on whitened inputs ``[z; 1]`` (`linalg.whiten_inputs`): shared rotary
        keys (``P`` rows), then the latent; the last column is the mean of each row
    up_keys: ``[H, D, P + R]``, each head's keys from both, as its queries see them
    up_values: ``[G, D, R]``, the values from the latent
    """

    down: Tensor
    up_keys: Tensor
    up_values: Tensor

    @property
    def rank(self) -> int:
        """The number of latent channels ``R``, without the constant channel of layout ``free``."""
        return self.up_values.shape[-1]

    @property
    def rope_dim(self) -> int:
        """The number of rotary rows ``P``."""
        return len(self.down) - self.rank


@dataclass(frozen=True)
class RotationMoments:
    """The effect of rotary embedding, averaged over random distances, on second moments between two
    kinds of rows (cached rows or keys).

    Rows are the real parts of rotary pairs, their imaginary parts, then rows that do not rotate.
    Rotation multiplies each pair by ``e^{-i theta delta}``, independently of the inputs.

    left, right: ``[H, p]`` and ``[H, q]``, the mean factors ``E e^{-i theta delta}`` of the pairs
    variation: ``[H, 2p, 2q]``, the covariances of the factors, in the form that
        `linalg.average_rotations` takes
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
    distances: DistanceMixture, cached_theta: Tensor, key_theta: Tensor
) -> tuple[RotationMoments, RotationMoments]:
    """Return the rotation moments of cached rows with themselves, and of cached rows with the
    source's keys.

    ``cached_theta`` and ``key_theta`` are the frequencies of their rotary pairs, float64.
    """
    speeds = torch.cat([cached_theta, -cached_theta, key_theta, -key_theta, key_theta.new_zeros(1)])
    distinct, index = torch.unique(speeds, return_inverse=True)
    moments = compute_rotary_moments(distances, distinct)[:, index[:, None], index]
    means = moments[:, :-1, -1]
    variation = moments[:, :-1, :-1] - means[:, :, None] * means[:, None].conj()
    count = len(cached_theta)
    rotary = 2 * count
    left = means[:, :count]
    right = means[:, rotary : rotary + len(key_theta)]
    same = RotationMoments(left, left, variation[:, :rotary, :rotary])
    return same, RotationMoments(left, right, variation[:, :rotary, rotary:])


@dataclass(frozen=True)
class LatentLeastSquares:
    """The least-squares problem that fits a latent to one layer. Inputs are whitened: ``x = root z
    + E[x]`` with ``cov(z) = 1`` (`linalg.whiten_inputs`).

    projections: the layer to approximate
    keys, values: ``[G, D, E]``, its keys and values from ``z``, in the dtype of products over ``E``
    key_means: ``[G, D]``
    mean: ``m [E] = root^-1 E[x]`` if the down-projection must not have a bias, and the mean of the
        values is to be explained too; None if a bias is allowed, and value errors are measured
        around their mean
    same, cross: the rotation moments of the cached rows with themselves and with the keys
    query_weight: ``[H, D, D]``, the squared output error per error of a key
    value_weight: ``[G, D, D]``, the squared output error per error of a value
    """

    projections: LayerProjections
    keys: Tensor
    values: Tensor
    key_means: Tensor
    mean: Tensor | None
    same: RotationMoments
    cross: RotationMoments
    query_weight: Tensor
    value_weight: Tensor

    def multiply_value_moment(self, latent: Tensor) -> Tensor:
        """Return ``S latent^T [E, R]`` for ``latent [R, E]`` and the moment ``S [E, E]`` that
        weighs errors of the values: ``cov(z) = 1`` or, without a bias, ``E[x x^T]`` whitened.
        """
        if self.mean is None:
            return latent.mT
        return latent.mT + torch.outer(self.mean, latent @ self.mean)


def alternate_least_squares(
    projections: LayerProjections,
    queries: Tensor,
    mean: Tensor | None,
    theta: Tensor,
    distances: DistanceMixture,
    factors: LatentFactors,
    dtype: torch.dtype,
) -> LatentFactors:
    """Return ``factors`` improved by alternating least squares: `ALS_ROUNDS` of up-projections,
    then the down-projection; the up-projections are solved once more.

    ``projections``: of keys and values on whitened ``[z; 1]``. ``queries [H, D, D]``: second
    moments of queries. ``mean`` as in `LatentLeastSquares`. ``theta [P/2]``: angles of the
    rotary rows. ``distances``: between queries and keys. ``dtype``: of products over ``E``.
    """
    values = projections.values[..., :-1].to(dtype)
    # A score error moves about as much output as the values vary: the output energy of an average
    # head.
    output = (projections.metric * (values @ values.mT)).sum() / len(projections.queries)
    angles = projections.rotary.theta.to(queries)
    same, cross = make_rotation_moments(distances, theta.to(queries), angles)
    problem = LatentLeastSquares(
        projections=projections,
        keys=projections.keys[..., :-1].to(dtype),
        values=values,
        key_means=projections.keys[..., -1],
        mean=mean,
        same=same,
        cross=cross,
        query_weight=queries * projections.scale**2 * output,
        value_weight=projections.metric * VALUE_WEIGHT,
    )
    for _ in range(ALS_ROUNDS):
        factors = _solve_down_projection(problem, _solve_up_projections(problem, factors))
    return _solve_up_projections(problem, factors)


def _solve_up_projections(problem: LatentLeastSquares, factors: LatentFactors) -> LatentFactors:
    """Return ``factors`` with the up-projections ``A_h [D, P + R]`` and ``B_g [D, R]`` that fit the
    present down-projection best, and with uncorrelated latent channels of unit energy; those
    without energy come last and are zero.

    Let ``y`` be the cached rows and ``k`` the source's key, both as head ``h`` sees them, ``c`` the
    latent and ``v`` the value. The normal equations are

        A_h E[y y^T] = E[k y^T]        B_g E[c c^T] = B_g = E[v c^T]
    """
    projections = problem.projections
    rope = factors.rope_dim
    latent = factors.down[rope:]
    # If biases are allowed, the latent's mean is zero.
    if problem.mean is None:
        latent = pad(latent[:, :-1], (0, 1))
    moment = latent[:, :-1] @ problem.multiply_value_moment(latent[:, :-1])
    energy, axes = decompose_symmetric(moment)
    used = energy > energy[0].clamp_min(torch.finfo(energy.dtype).tiny) * 1e-12
    latent = (axes * torch.where(used, energy, torch.inf).rsqrt()).mT @ latent
    back = axes * torch.where(used, energy, 0.0).sqrt()
    present = torch.cat([factors.up_keys[..., :rope], factors.up_keys[..., rope:] @ back], -1)
    down = torch.cat([factors.down[:rope], latent])
    linear = down[:, :-1]
    mean = down[:, -1]
    gram = problem.same.rotate_moment(linear @ linear.mT, mean, mean)  # E[y y^T], [H, n, n]
    products = _multiply(problem.keys, linear.mT).mT  # [G, n, D]
    times = projections.query_heads_per_kv_head
    cross = problem.cross.rotate_moment(  # E[y k^T], [H, n, D]
        products.repeat_interleave(times, 0), mean, problem.key_means.repeat_interleave(times, 0)
    )
    # Scaled to a unit diagonal, so that one damping suits both rotary rows and weak latent
    # channels; directions without energy do not change.
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)[..., None]
    residual = (cross - gram @ present.mT) / scale
    step = solve_damped(gram / (scale.mT * scale), residual, ALS_DAMPING) / scale
    return LatentFactors(
        down=down,
        up_keys=present + step.mT,
        up_values=_multiply(problem.values, problem.multiply_value_moment(linear[rope:])),
    )


def _multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``rows [G, D, E] columns [E, n]`` in float64, computed in the dtype of ``rows``."""
    product = rows.flatten(0, 1) @ columns.to(rows)
    return product.view(*rows.shape[:2], -1).to(columns)


def _multiply_heads(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over heads of ``left [H, n, D] right [H, D, m]``, ``[n, m]``: multiplied in
    the dtype of ``right``, returned in that of ``left``.
    """
    product = left.to(right).transpose(0, 1).flatten(1) @ right.flatten(0, 1)
    return product.to(left)


def _solve_down_projection(problem: LatentLeastSquares, factors: LatentFactors) -> LatentFactors:
    """Return ``factors`` with the down-projection ``X = [L a]`` that fits the present
    up-projections best; ``a`` is the mean of the rows.

    A change ``dL, da`` solves

        V dL + M da m^T = P + p m^T     (the derivative with respect to L)
        M da = p                        (with respect to a, if biases are allowed; then m = 0)

    ``V, M [n, n]`` are the costs of a change, ``P [n, E]`` and ``p [n]`` the unexplained remainder.
    Without biases ``da = dL m``. Multiplying the first equation by ``m`` yields one for ``da``
    alone:

        dL = V^-1 (P + (p - M da) m^T)        (V + (m.m) M) da = P m + (m.m) p
    """
    projections = problem.projections
    rope = factors.rope_dim
    linear = factors.down[:, :-1]
    means = factors.down[:, -1]
    weighted = factors.up_keys.mT @ problem.query_weight  # [H, n, D]
    parts = problem.same.compute_gradient_factors(weighted @ factors.up_keys)
    V, M = (part.sum(0) for part in parts)
    parts = problem.cross.compute_gradient_factors(weighted)
    of_keys, of_means = (
        torch.unflatten(part, 0, (-1, projections.query_heads_per_kv_head)).sum(1) for part in parts
    )
    P = _multiply_heads(of_keys, problem.keys)
    p = torch.einsum("gnd,gd->n", of_means, problem.key_means)
    weighted = factors.up_values.mT @ problem.value_weight  # [G, R, D]
    needed = _multiply_heads(weighted, factors.up_values)
    through_values = _multiply_heads(weighted, problem.values)
    V[rope:, rope:] += needed
    P[rope:] += through_values
    if problem.mean is not None:
        M[rope:, rope:] += needed
        p[rope:] += through_values @ problem.mean
    P -= V @ linear
    p -= M @ means
    # Damping is relative to the energy of each row; rows without energy do not change.
    energy = V.diagonal()
    damping = torch.diag(torch.where(energy > 0, energy * ALS_DAMPING, 1.0))
    V = V + damping
    if problem.mean is None:
        change = torch.linalg.solve(M + damping, p)
    else:
        m = problem.mean
        change = torch.linalg.solve(V + (m @ m) * M, P @ m + (m @ m) * p)
        P += torch.outer(p - M @ change, m)
    linear = linear + torch.linalg.solve(V, P)
    return replace(factors, down=torch.cat([linear, (means + change)[:, None]], 1))
