"""Fits latent attention to a layer by alternating least squares, from statistics alone.

A head sees a key ``k`` rotated by its distance. After conversion it can read the shared rotary
keys, rotated as well, and the latent, which is not rotated. For fixed cached rows, the best reading
for each head is a linear regression; for fixed readings, so are the best rows. Both are small
problems, because inputs enter only through their second moments.

Score errors are weighted by the queries that cause them, value errors by the resulting output
error; a score error changes the output about as much as the values vary. That is a linearization:
large errors saturate in the softmax, so values are weighted by `VALUE_WEIGHT`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import Distances, rotary_moments
from kvfold.convert.transforms.latent.latent_weights import LinearLayer
from kvfold.convert.transforms.linalg import covariance, damped_solve, symmetric_eig
from kvfold.convert.transforms.weights import Rotary

# Excess loss on held-out text, nats per token (bench_constants.py), of the
# reference MHA model at 48 + 16 and of SmolLM2-135M at 128 + 64 (`--target`, 64 x 256 tokens). On
# SmolLM2 the first three were moved one by one from 10, 0.1 and 0.5 (0.125), then together: 0.099,
# and on windows of 2048 tokens the KL grows by 5 % from the first 256 to the second half. The MHA
# model, which has no sink, would prefer more weight on distances beyond the text. Without a date:
# 2026-11-22.

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
    """A layer's keys and values, factored into cached rows and the maps that read them.

    rows: ``X [P + R, E+1]`` on ``[x; 1]``, rotary rows first
    reading: ``[H, D, P + R]``, each head's keys from the rows, as its queries see them
    values: ``[G, D, R]``, the values from the latent
    """

    rows: Tensor
    reading: Tensor
    values: Tensor

    @property
    def rank(self) -> int:
        return self.values.shape[-1]


@dataclass(frozen=True)
class Kernel:
    """The second moment of rows ``y_a`` and ``y_b`` as the queries of one head see them at a random
    distance ``delta``, a linear map of the moment at distance 0.

    The first ``2 * pairs`` rows are the real parts, then the imaginary parts of rotary pairs. In
    terms of the pairs and their conjugates, each row turns by ``e^{-i w delta}``, with ``w = theta,
    -theta, 0``. With inputs and distances independent, element ``a, b`` of a moment is multiplied
    by ``E e^{-i (w_a - w_b) delta}``.

    moments: ``[U, U]``, these means for all distinct ``w``
    mean: ``[U]``, the means ``E e^{-i w delta}``
    rows, columns: ``[n_a]`` and ``[n_b]``, the index of each row's ``w``
    pairs: the numbers of rotary pairs of ``y_a`` and of ``y_b``
    """

    moments: Tensor
    mean: Tensor
    rows: Tensor
    columns: Tensor
    pairs: tuple[int, int]

    def apply(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """``E[y_a y_b^T]`` around the mean over distances, ``[n_a, n_b]``.

        ``product = A cov(x) B^T``; ``left_mean`` and ``right_mean`` are ``A E[x]`` and ``B E[x]``,
        biases included. A softmax over positions sees only the variation of constant keys with
        distance.
        """
        moments, centered = self._factors()
        left, right = self.pairs
        means = torch.outer(_to_waves(left_mean, left), _to_waves(right_mean, right).conj())
        return self._from_waves(self._to_waves(product) * moments + means * centered)

    def adjoint(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices ``V`` and ``M`` of two gradients of ``sum(weight * apply(product, a, b))``.

        With respect to ``A`` in ``product = A cov B^T`` it is ``V B cov``, and with respect to
        ``a`` it is ``M b``.
        """
        moments, centered = self._factors()
        waves = self._to_waves(weight)
        of_rows = self._from_waves(waves * moments.conj())
        return of_rows, self._from_waves(waves * centered.conj())

    def _factors(self) -> tuple[Tensor, Tensor]:
        """The factor of each element, and the same minus the product of the means."""
        moments = self.moments[self.rows[:, None], self.columns]
        return moments, moments - torch.outer(self.mean[self.rows], self.mean[self.columns].conj())

    def _to_waves(self, matrix: Tensor) -> Tensor:
        return _to_waves(_to_waves(matrix, self.pairs[0]).mH, self.pairs[1]).mH

    def _from_waves(self, waves: Tensor) -> Tensor:
        return _from_waves(_from_waves(waves, self.pairs[0]).mH, self.pairs[1]).mH.real


def _to_waves(rows: Tensor, pairs: int) -> Tensor:
    """Half-split pairs ``x, y`` as ``(x + i y) / sqrt 2``, then as ``(x - i y) / sqrt 2``."""
    real = rows[:pairs]
    imaginary = 1j * rows[pairs : 2 * pairs]
    return torch.cat(
        [(real + imaginary) * 0.5**0.5, (real - imaginary) * 0.5**0.5, rows[2 * pairs :]]
    )


def _from_waves(waves: Tensor, pairs: int) -> Tensor:
    """The inverse of `_to_waves`."""
    wave = waves[:pairs]
    conjugate = waves[pairs : 2 * pairs]
    real = (wave + conjugate) * 0.5**0.5
    return torch.cat([real, (conjugate - wave) * (1j * 0.5**0.5), waves[2 * pairs :]])


def rotary_kernels(
    distances: Distances, sides: Sequence[tuple[Tensor, int]]
) -> list[tuple[Kernel, ...]]:
    """For every head, the kernel of the first of ``sides`` with each of them.

    A side is the frequencies of its pairs and the number of its rows without rotation.
    """
    speeds = [
        torch.cat([theta, -theta, theta.new_zeros(still)])
        for theta, still in ((theta.double(), still) for theta, still in sides)
    ]
    distinct = torch.unique(torch.cat([*speeds, speeds[0].new_zeros(1)]))
    indices = [torch.searchsorted(distinct, speed) for speed in speeds]
    result = []
    for moments in rotary_moments(distances, distinct):
        mean = moments[:, distinct == 0][:, 0]
        result.append(
            tuple(
                Kernel(
                    moments,
                    mean,
                    indices[0],
                    columns,
                    (len(sides[0][0]), len(theta)),
                )
                for columns, (theta, _) in zip(indices, sides, strict=True)
            )
        )
    return result


@dataclass(frozen=True)
class LatentProblem:
    """What the least squares of a layer minimize.

    layer: the layer to approximate
    covariance: ``[E, E]`` of the inputs
    mean: ``[E+1]`` of ``[x; 1]``
    mean_weight: ``[E] = covariance^-1 mean``, None if ``centered``
    kernels: for every head the kernels (cached rows, cached rows) and (cached rows, keys)
    centered: rows may include a constant, and value errors are measured around their mean;
        otherwise biases are not allowed, and the mean of the values is included
    query_weight: ``[H, D, D]``, the squared output error per error of a key
    value_weight: ``[G, D, D]``, the squared output error per error of a value
    """

    layer: LinearLayer
    covariance: Tensor
    mean: Tensor
    mean_weight: Tensor | None
    kernels: list[tuple[Kernel, ...]]
    centered: bool
    query_weight: Tensor
    value_weight: Tensor

    def value_moment(self, left: Tensor, right: Tensor) -> Tensor:
        """The second moment that weights value errors, ``E[l r^T]`` of ``l = left x~`` and ``r =
        right x~``.
        """
        product = left[:, :-1] @ self.covariance @ right[:, :-1].mT
        if self.centered:
            return product
        return product + torch.outer(left @ self.mean, right @ self.mean)


def alternate(
    layer: LinearLayer,
    queries: Tensor,
    moment: Tensor,
    rotary: Rotary,
    theta: Tensor,
    distances: Distances,
    factors: LatentFactors,
    *,
    centered: bool,
) -> LatentFactors:
    """Improve ``factors`` by `ALS_ROUNDS` of least squares for the readings, then the rows; solve
    the readings once more.

    ``queries [H, D, D]`` and ``moment [E+1, E+1]``: second moments of queries and of ``[x; 1]``.
    ``theta [P/2]``: angles of the rotary rows. ``distances``: between queries and keys.
    ``centered`` as in `LatentProblem`.
    """
    device = layer.keys.device
    cov = covariance(moment)
    values = layer.values[..., :-1]
    # A score error moves about as much output as the values vary: the output energy of an average
    # head.
    output = (layer.metric * (values @ cov @ values.mT)).sum() / len(layer.queries)
    cached = theta.to(device), factors.rank
    keys = rotary.theta.to(device), layer.keys.shape[1] - rotary.dims
    problem = LatentProblem(
        layer=layer,
        covariance=cov,
        mean=moment[-1],
        mean_weight=None if centered else torch.linalg.solve(cov, moment[-1, :-1]),
        kernels=rotary_kernels(distances, [cached, keys]),
        centered=centered,
        query_weight=queries * layer.scale**2 * output,
        value_weight=layer.metric * VALUE_WEIGHT,
    )
    # Rows in principal units keep the systems well conditioned without changing what heads read.
    for _ in range(ALS_ROUNDS):
        factors = _normalize_factors(
            problem, _solve_rows(problem, _solve_readings(problem, factors))
        )
    return _solve_readings(problem, factors)


def _solve_readings(problem: LatentProblem, factors: LatentFactors) -> LatentFactors:
    """The readings ``A_h [D, P + R]`` and ``B_g [D, R]`` that best fit the present rows.

    Let ``y`` be the cached rows and ``k`` the source's key, both as head ``h`` sees them, ``c`` the
    latent and ``v`` the value. The normal equations are

        A_h E[y y^T] = E[k y^T]        B_g E[c c^T] = E[v c^T]
    """
    layer = problem.layer
    latent = factors.rows[-factors.rank :]
    spread = factors.rows[:, :-1] @ problem.covariance
    mean = factors.rows @ problem.mean
    product = spread @ factors.rows[:, :-1].mT
    heads = []
    for head, (same, cross) in enumerate(problem.kernels):
        keys = layer.keys[head // layer.group]
        met = cross.apply(spread @ keys[:, :-1].mT, mean, keys @ problem.mean)  # E[y k^T]
        heads.append(_regress(factors.reading[head], same.apply(product, mean, mean), met.mT))
    gram = problem.value_moment(latent, latent)
    values = [
        _regress(reading, gram, problem.value_moment(value, latent))
        for reading, value in zip(factors.values, layer.values, strict=True)
    ]
    return replace(factors, reading=torch.stack(heads), values=torch.stack(values))


def _regress(present: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """``[n, f]`` with ``reading gram = cross``, damped toward ``present``; directions without
    energy do not change.
    """
    # Scale to a unit diagonal, so that one damping suits both rotary rows and weak latent channels.
    scale = gram.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    residual = ((cross - present @ gram) / scale).mT
    unit = gram / torch.outer(scale, scale)
    return present + damped_solve(unit, residual, ALS_DAMPING).mT / scale


def _solve_rows(problem: LatentProblem, factors: LatentFactors) -> LatentFactors:
    """The cached rows ``X = [L b]`` that best fit the present readings.

    With ``C = cov(x)`` and ``m = E[x]``, a change ``dL, db`` solves

        V dL C + M (dL m + db) m^T = P C + p m^T     (the derivative with respect to L)
        M (dL m + db) = p                            (with respect to b, if constants are allowed)

    ``V, M [n, n]`` are the costs of a change, ``P [n, E]`` and ``p [n]`` the unexplained remainder.
    If centered, the second equation eliminates the mean from the first: ``dL = V^-1 P``, and ``L m
    + b`` changes by ``M^-1 p``. Otherwise ``db = 0``. With ``u = dL m`` and ``c = C^-1 m``, the
    first equation times ``C^-1`` yields ``dL``, and multiplying ``dL`` by ``m`` yields an equation
    for ``u`` alone:

        dL = V^-1 (P + (p - M u) c^T)        (V + (m.c) M) u = P m + (m.c) p
    """
    layer = problem.layer
    rank = factors.rank
    linear = factors.rows[:, :-1]
    present = factors.rows @ problem.mean
    V = present.new_zeros(len(present), len(present))
    M = torch.zeros_like(V)
    p = torch.zeros_like(present)
    cross = present.new_zeros(len(layer.keys), len(present), layer.keys.shape[1])
    for head, (same, to_keys) in enumerate(problem.kernels):
        group = head // layer.group
        weighted = factors.reading[head].mT @ problem.query_weight[head]  # [n, D]
        of_rows, of_means = same.adjoint(weighted @ factors.reading[head])
        V += of_rows
        M += of_means
        of_keys, of_mean = to_keys.adjoint(weighted)
        cross[group] += of_keys
        p += of_mean @ (layer.keys[group] @ problem.mean)
    P = (cross @ layer.keys[..., :-1]).sum(0)
    weighted = factors.values.mT @ problem.value_weight  # [G, R, D]
    needed = (weighted @ factors.values).sum(0)
    V[-rank:, -rank:] += needed
    P[-rank:] += (weighted @ layer.values[..., :-1]).sum(0)
    if not problem.centered:
        M[-rank:, -rank:] += needed
        p[-rank:] += torch.einsum("grd,gde,e->r", weighted, layer.values, problem.mean)
    P -= V @ linear
    p -= M @ present
    # Damping is relative to the energy of each row; rows without energy do not change.
    energy = V.diagonal()
    damping = torch.diag(torch.where(energy > 0, energy * ALS_DAMPING, 1.0))
    V = V + damping
    mean = problem.mean[:-1]
    c = problem.mean_weight
    if c is None:
        moved = present + torch.linalg.solve(M + damping, p)
        linear = linear + torch.linalg.solve(V, P)
        return replace(factors, rows=torch.cat([linear, (moved - linear @ mean)[:, None]], 1))
    u = torch.linalg.solve(V + (mean @ c) * M, P @ mean + (mean @ c) * p)
    linear = linear + torch.linalg.solve(V, P + torch.outer(p - M @ u, c))
    return replace(factors, rows=torch.cat([linear, factors.rows[:, -1:]], 1))


def _normalize_factors(problem: LatentProblem, factors: LatentFactors) -> LatentFactors:
    """The same factors with rotary pairs at unit energy and uncorrelated latent channels, scaled by
    their importance.
    """
    rank = factors.rank
    rotary = factors.rows[:-rank]
    latent = factors.rows[-rank:]
    energy = (rotary[:, :-1] @ problem.covariance * rotary[:, :-1]).sum(1)
    energy = energy + (rotary @ problem.mean).square()
    unit = energy.view(2, -1).mean(0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0).repeat(2)
    # If constants are allowed, the latent's mean is zero.
    if problem.centered:
        latent = torch.cat([latent[:, :-1], -(latent[:, :-1] @ problem.mean[:-1])[:, None]], 1)
    moment = problem.value_moment(latent, latent)
    keys = factors.reading[..., -rank:]
    # [R, R]: the squared output per error of the latent, through values and through keys.
    through_values = (factors.values.mT @ problem.value_weight @ factors.values).sum(0)
    importance = (keys.mT @ problem.query_weight @ keys).sum(0) + through_values
    forth, back = _normalize_channels(moment, importance)
    reading = [factors.reading[..., :-rank] * unit, keys @ back]
    rows = torch.cat([rotary / unit[:, None], forth @ latent])
    return LatentFactors(rows, torch.cat(reading, -1), factors.values @ back)


def _normalize_channels(moment: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """``forth [R, R]`` to uncorrelated channels, sized by importance, of total energy one; and its
    inverse ``back``.
    """
    energy, axes = symmetric_eig(moment)
    used = energy > energy[0].clamp_min(torch.finfo(energy.dtype).tiny) * 1e-12
    root = torch.where(used, energy, 0.0).sqrt()
    counted = root[:, None] * (axes.mT @ importance @ axes) * root
    # Channels without energy come last and are zero in both results. Their number would be read
    # from the device.
    counted = counted - torch.diag(
        torch.where(used, 0.0, counted.diagonal().max().clamp_min(1e-300))
    )
    counts, turn = symmetric_eig(counted)
    size = counts.clamp_min(counts[0].clamp_min(1e-300) * 1e-12).sqrt()
    size = torch.where(used, size, 0.0)
    size = size / size.norm().clamp_min(torch.finfo(size.dtype).tiny)
    forth = (size[:, None] * turn.mT) @ (axes / torch.where(used, root, torch.inf)).mT
    back = torch.where(used, (axes * root) @ turn / size, 0.0)
    return forth, back
