"""Latent attention fitted to a layer by alternating least squares, from statistics alone.

What heads read of a key is ``k`` turned by its distance; what they can read after conversion are the shared rotary
keys, turned, and the latent, which stands still. With the cached rows given, the best reading of each head is a linear
regression; with the readings given, so are the rows. Both are small, because inputs enter only by their second moments.

Errors of scores count by the queries that make them, errors of values by the output that they make; a score error moves
about as much output as the values vary. That is a linearisation: large errors saturate in the softmax, and counting
values ``VALUE_WEIGHT`` times was better on every split of a trained model, between 5 and 20 by little.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.kernels import Kernel, Turning, kernels
from kvfold.convert.transforms.latent.slots import mixed_profile, second_moment
from kvfold.convert.transforms.weights import LayerStatistics, Rotary

VALUE_WEIGHT = 10.0
UNIFORM = 0.1  # the share of distances at which attention does not look that the fit answers for
ROUNDS = 8
DAMPING = 1e-6  # pull towards the present solution, relative to each row's energy: directions no input takes stay


@dataclass(frozen=True)
class Layer:
    """Linear maps on ``[x; 1]`` of one layer: ``queries [H, D, E+1]``, ``keys [G, D, E+1]``, ``values [G, D, E+1]``.

    The rotary amplitude is in queries and keys. ``metric [G, D, D]``: what a value's length counts in the output.
    ``scale`` multiplies scores.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    metric: Tensor
    scale: float

    @property
    def group(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]


@dataclass(frozen=True)
class Fit:
    """What is cached, ``rows [P + R, E+1]`` of ``[x; 1]``, rotary rows first, and how it is read.

    ``reading [H, D, P + R]``: each head's keys, as its queries meet them; ``values [G, D, R]``.
    """

    rows: Tensor
    reading: Tensor
    values: Tensor


@dataclass(frozen=True)
class Problem:
    """A layer, second moments of its inputs, and for every head the kernels (cached, cached) and (cached, keys).

    ``covariance [E, E]`` and ``mean [E+1]`` of ``[x; 1]``. ``centred``: constants are free, values count as they vary;
    otherwise nothing may have a bias and values count whole.
    """

    layer: Layer
    covariance: Tensor
    mean: Tensor
    cached: Turning
    seen: tuple[tuple[Kernel, Kernel], ...]
    centred: bool
    toward_mean: Tensor  # [E]: cov^-1 mean
    query_weight: Tensor  # [H, D, D]: what a key's length counts, in output
    value_weight: Tensor  # [G, D, D]

    def spread(self, rows: Tensor) -> Tensor:
        """``rows cov``, ``[n, E]``, of ``rows [n, E+1]``."""
        return rows[..., :-1] @ self.covariance

    def counted(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """The second moment by which values count, from ``left cov right^T`` and the means."""
        return product if self.centred else product + torch.outer(left_mean, right_mean)


def make_problem(
    layer: Layer,
    queries: Tensor,
    statistics: LayerStatistics,
    rotary: Rotary,
    theta: Tensor,
    rank: int,
    *,
    centred: bool,
) -> Problem:
    """``queries [H, D, D]``: their second moment; ``theta [P/2]`` of the cached rotary rows; ``rank`` R."""
    device, dims = layer.keys.device, layer.keys.shape[1]
    moment = second_moment(statistics).to(device)
    mean = moment[-1]
    covariance = moment[:-1, :-1] - torch.outer(mean[:-1], mean[:-1])
    covariance = covariance + 1e-9 * covariance.diagonal().mean() * torch.eye(len(covariance), device=device)
    own = Turning.of(rotary.theta.double().to(device), dims - rotary.dims)
    cached = Turning.of(theta.double().to(device), rank)
    profile = mixed_profile(statistics, UNIFORM).to(device)
    seen = tuple(zip(kernels(cached, cached, profile), kernels(cached, own, profile), strict=True))
    spread = layer.values[..., :-1] @ covariance @ layer.values[..., :-1].mT
    output = (layer.metric * spread).sum() / len(layer.queries)  # an average head's output energy
    queries = queries * layer.scale**2 * output
    toward = mean[:-1] if centred else torch.linalg.solve(covariance, mean[:-1])  # only used where nothing is centred
    return Problem(layer, covariance, mean, cached, seen, centred, toward, queries, layer.metric * VALUE_WEIGHT)


def alternate(problem: Problem, fit: Fit, rounds: int = ROUNDS) -> Fit:
    """Least squares for the readings, then for the rows, ``rounds`` times; readings last. Rows in principal units."""
    for _ in range(rounds):
        fit = _principal(problem, _fit_rows(problem, _fit_readings(problem, fit)))
    return _fit_readings(problem, fit)


def _fit_readings(problem: Problem, fit: Fit) -> Fit:
    """Every head's best reading of its keys from what is cached, and the best reading of the values."""
    layer, rank = problem.layer, fit.values.shape[-1]
    spread, mean = problem.spread(fit.rows), fit.rows @ problem.mean
    product = spread @ fit.rows[:, :-1].mT
    heads = []
    for head, (same, cross) in enumerate(problem.seen):
        keys = layer.keys[head // layer.group]
        met = cross.apply(spread @ keys[:, :-1].mT, mean, keys @ problem.mean)
        heads.append(_regress(fit.reading[head], same.apply(product, mean, mean), met.mT))
    gram = problem.counted(product[-rank:, -rank:], mean[-rank:], mean[-rank:])
    values = [
        _regress(
            reading, gram, problem.counted(spread[-rank:] @ value[:, :-1].mT, mean[-rank:], value @ problem.mean).mT
        )
        for reading, value in zip(fit.values, layer.values, strict=True)
    ]
    return replace(fit, reading=torch.stack(heads), values=torch.stack(values))


def _regress(present: Tensor, gram: Tensor, met: Tensor) -> Tensor:
    """``[n, f]`` with ``reading gram = met``, damped towards ``present``; what has no energy stays as it is."""
    scale = gram.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    damped = gram / torch.outer(scale, scale) + DAMPING * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change: Tensor = torch.linalg.solve(damped, ((met - present @ gram) / scale).mT).mT / scale
    return present + change


@dataclass(frozen=True)
class _Normal:
    """Normal equations of the cached rows: ``varying rows = pull`` for inputs about their mean; ``moving`` for the
    mean.

    ``varying, moving [n, n]``; what is left to explain: ``pull [n, E]`` and ``mean_pull [n]``.
    """

    varying: Tensor
    moving: Tensor
    pull: Tensor
    mean_pull: Tensor


def _normal_equations(problem: Problem, fit: Fit) -> _Normal:
    layer, rank = problem.layer, fit.values.shape[-1]
    linear, mean = fit.rows[:, :-1], fit.rows @ problem.mean
    varying, moving = (mean.new_zeros(len(mean), len(mean)) for _ in range(2))
    mean_pull = torch.zeros_like(mean)
    met = mean.new_zeros(len(layer.keys), len(mean), layer.keys.shape[1])
    for head, (same, cross) in enumerate(problem.seen):
        keys, reading = layer.keys[head // layer.group], fit.reading[head]
        asked = reading.mT @ problem.query_weight[head]  # [n, D]
        varying += same.pull(asked @ reading, moving=False)
        moving += same.pull(asked @ reading, moving=True)
        met[head // layer.group] += cross.pull(asked, moving=False)
        mean_pull += cross.pull(asked, moving=True) @ (keys @ problem.mean)
    asked = fit.values.mT @ problem.value_weight  # [G, R, D]
    needed = (asked @ fit.values).sum(0)
    varying[-rank:, -rank:] += needed
    pull = (met @ layer.keys[..., :-1]).sum(0)
    pull[-rank:] += (asked @ layer.values[..., :-1]).sum(0)
    if not problem.centred:
        moving[-rank:, -rank:] += needed
        mean_pull[-rank:] += (asked @ (layer.values @ problem.mean)[..., None]).sum(0)[:, 0]
    return _Normal(varying, moving, pull - varying @ linear, mean_pull - moving @ mean)


def _fit_rows(problem: Problem, fit: Fit) -> Fit:
    """The best cached rows for the present readings; with ``centred`` their constants are free."""
    normal, linear, mean = _normal_equations(problem, fit), fit.rows[:, :-1], problem.mean[:-1]
    varying = _damped(normal.varying, normal.varying.diagonal())
    if problem.centred:
        linear = linear + torch.linalg.solve(varying, normal.pull)
        moving = _damped(normal.moving, normal.varying.diagonal())
        wanted = fit.rows @ problem.mean + torch.linalg.solve(moving, normal.mean_pull)
        return replace(fit, rows=torch.cat([linear, (wanted - linear @ mean)[:, None]], 1))
    toward = problem.toward_mean
    # Both equations couple through the mean of the change, which is found first.
    both = varying + (mean @ toward) * normal.moving
    change = torch.linalg.solve(both, normal.pull @ mean + (mean @ toward) * normal.mean_pull)
    rest = normal.pull + torch.outer(normal.mean_pull - normal.moving @ change, toward)
    linear = linear + torch.linalg.solve(varying, rest)
    return replace(fit, rows=torch.cat([linear, fit.rows[:, -1:]], 1))


def _damped(matrix: Tensor, energy: Tensor) -> Tensor:
    unit = torch.where(energy > 0, energy * DAMPING, 1.0)
    return matrix + torch.diag(unit)


def _principal(problem: Problem, fit: Fit) -> Fit:
    """The same fit, rotary pairs at unit energy, latent channels uncorrelated, each as strong as what is read from it.

    The latent's energies sum to one, and it has mean zero where constants are free.
    """
    rank, pairs = fit.values.shape[-1], problem.cached.half
    rotary, latent = fit.rows[: 2 * pairs], fit.rows[-rank:]
    energy = (problem.spread(rotary) * rotary[:, :-1]).sum(1) + (rotary @ problem.mean).square()
    unit = ((energy[:pairs] + energy[pairs:]) / 2).sqrt()
    unit = torch.where(unit > 0, unit, 1.0).repeat(2)
    if problem.centred:
        latent = torch.cat([latent[:, :-1], -(latent[:, :-1] @ problem.mean[:-1])[:, None]], 1)
    mean = latent @ problem.mean
    moment = problem.counted(problem.spread(latent) @ latent[:, :-1].mT, mean, mean)
    forth, back = _principal_units(moment, _importance(problem, fit))
    reading = torch.cat([fit.reading[..., : 2 * pairs] * unit, fit.reading[..., 2 * pairs :] @ back], -1)
    return Fit(torch.cat([rotary / unit[:, None], forth @ latent]), reading, fit.values @ back)


def _importance(problem: Problem, fit: Fit) -> Tensor:
    """``[R, R]``: what an error of the latent counts in the output."""
    rank = fit.values.shape[-1]
    read = fit.reading[..., -rank:]
    values = (fit.values.mT @ problem.value_weight @ fit.values).sum(0)
    return (read.mT @ problem.query_weight @ read).sum(0) + values


def _principal_units(moment: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """``forth`` and its inverse ``back [R, R]``: to channels without correlation, of energies as they count, sum one.

    Channels without energy are left out: zero in both.
    """
    energy, axes = torch.linalg.eigh((moment + moment.mT) / 2)
    used = energy > energy.max().clamp_min(torch.finfo(energy.dtype).tiny) * 1e-12
    root = energy[used].sqrt()
    axes = axes[:, used]
    weighed = root[:, None] * (axes.mT @ importance @ axes) * root
    counts, turn = torch.linalg.eigh((weighed + weighed.mT) / 2)
    counts, turn = counts.flip(0), turn.flip(1)
    size = counts.clamp_min(counts[0].clamp_min(1e-300) * 1e-12).sqrt()
    size = size / size.norm()
    forth = (size[:, None] * turn.mT) @ (axes / root).mT
    back = (axes * root) @ turn / size
    spare = len(moment) - len(root)
    return torch.nn.functional.pad(forth, (0, 0, 0, spare)), torch.nn.functional.pad(back, (0, spare))
