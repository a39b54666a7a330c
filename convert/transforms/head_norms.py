"""Linear maps that replace norms on queries and keys, for attention layouts that do not support
such norms.

A norm divides by a number that depends on the token and the head, ``norm(W x) = gain * W x / d(x) +
bias``. If the result must be a linear function of the input, the closest one over the calibration
text is the least-squares solution

    L = argmin E|norm(W x) - L x|^2 + ridge |L - L_0|^2,       L_0 = gain * W * E[d] / E[d^2]

The ridge pulls ``L`` toward ``L_0``, the projection divided by one number per head, more strongly
for shorter text. Both are exact if ``d`` does not vary. If it varies, most of the variation follows
the input: the share of the energy of ``norm(W x)`` that ``L`` misses is far below the square of the
divisors' coefficient of variation.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.linalg import append_bias, compute_input_moment, split_bias
from kvfold.convert.transforms.weights import (
    AttentionWeights,
    HeadNorm,
    LayerStatistics,
    TensorDataclass,
)

# ``ridge``, in units of ``E|x|^2 / tokens``. Squared error of the keys on held-out text after 128,
# 512, 2048 and 8192 tokens, layer 1 of the shipped model with norms put in (the projection over one
# number: 0.112): 1e-9: 0.100, 0.042, 0.019, 0.016; 0.03: 0.053, 0.026, 0.019, 0.016; 0.3: 0.044,
# 0.030, 0.023, 0.019 (measured by a script in git history, 2026-11-23).
SHRINK = 0.03


@dataclass(frozen=True)
class LinearizedNorm(TensorDataclass):
    """The linear map that approximates a projection followed by a norm, and the parts it is made
    of.

    rows: ``[n, D, F]`` (``F = E + 1``, bias last)
    divisor: ``[n]``, what the norm divides each head by (1 without a norm)
    gain: ``[n, D]``, the norm's weight
    constant: ``[n, D]``, the norm's bias
    norm: the norm
    """

    rows: Tensor
    divisor: Tensor
    gain: Tensor
    constant: Tensor
    norm: HeadNorm | None

    @property
    def affine(self) -> Tensor:
        """The map ``rows`` plus the norm's bias, ``[n, D, F]``: it maps inputs ``[x; 1]`` to
        queries or keys as they are after an average norm.
        """
        if self.norm is None:
            return self.rows
        return torch.cat((self.rows[..., :-1], self.rows[..., -1:] + self.constant[..., None]), -1)


def linearize_norm(
    rows: Tensor, norm: HeadNorm | None, moment: Tensor, divisor: Tensor | None = None
) -> LinearizedNorm:
    """Return the average linear map of a projection ``rows [n, D, F]`` followed by ``norm``: the
    projection divided by one number per head.

    ``divisor [n]`` is by default the root mean square for inputs with the second moment ``moment
    [F, F]``.
    """
    gain = rows.new_ones(rows.shape[:2])
    constant = torch.zeros_like(gain)
    if norm is None:
        return LinearizedNorm(rows, gain[:, 0], gain, constant, None)
    gain = norm.weight.to(rows) + norm.offset
    if norm.bias is not None:
        constant = norm.bias.to(rows)
    rows = subtract_mean(rows, norm)
    if divisor is None:
        divisor = compute_divisors(rows, norm, moment)
    rows = rows * (gain / divisor[:, None])[..., None]
    return LinearizedNorm(rows, divisor, gain, constant, norm)


def has_norms(weights: AttentionWeights) -> bool:
    """True if queries or keys are normalized per head."""
    return weights.q_norm is not None or weights.k_norm is not None


def project_with_norms(weights: AttentionWeights, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return normalized queries and keys ``[N, H + G, D]`` for ``inputs [N, E]``, queries first,
    and the numbers by which the norms divide, ``[N, H + G]``.

    They are not rotated and have the dtype of ``inputs``. Divisors are 1 for queries or keys
    without a norm.
    """
    results = []
    divisors = []
    sides = (
        (weights.q, weights.q_bias, weights.q_norm),
        (weights.k, weights.k_bias, weights.k_norm),
    )
    for weight, bias, norm in sides:
        rows = weight.to(inputs) @ inputs.mT  # [n, D, N]
        if bias is not None:
            rows += bias.to(rows)[..., None]
        divisor = rows.new_ones(len(rows), len(inputs))
        if norm is not None:
            rows = subtract_mean(rows, norm)
            divisor = _compute_root_mean_squares(rows.square().mean(1), norm)
            rows = rows / divisor[:, None] * (norm.weight.to(rows) + norm.offset)[..., None]
            if norm.bias is not None:
                rows += norm.bias.to(rows)[..., None]
        results.append(rows)
        divisors.append(divisor)
    return torch.cat(results).movedim(-1, 0), torch.cat(divisors).mT


def linearize_norms(
    weights: AttentionWeights, statistics: LayerStatistics, *, key_constant: bool = False
) -> AttentionWeights:
    """Return the layer without norms on queries and keys: their projections become the linear maps
    closest to the normalized ones.

    With statistics that contain no text (`make_blank_statistics`) this is the projection divided by
    one number per head. A map includes a constant if the source has a bias. ``key_constant`` adds a
    constant to keys in any case: a constant key shifts all scores of a query by the same amount, so
    it costs nothing if the layout supports one. Layers without norms are returned unchanged.
    """
    if not has_norms(weights):
        return weights
    q, q_bias = _fit_linear_map(
        weights.q, weights.q_bias, weights.q_norm, statistics, slice(weights.heads)
    )
    keys = slice(weights.heads, None)
    k, k_bias = _fit_linear_map(
        weights.k, weights.k_bias, weights.k_norm, statistics, keys, key_constant
    )
    return replace(weights, q=q, k=k, q_bias=q_bias, k_bias=k_bias, q_norm=None, k_norm=None)


def linearize_norms_by_divisors(
    weights: AttentionWeights, statistics: LayerStatistics, *, key_constant: bool = False
) -> tuple[AttentionWeights, Tensor | None]:
    """Return the layer without norms, whose key projections are divided by one number per head, and
    these numbers ``[G]`` (None without norms). Queries are linearized by `linearize_norms`.

    The keys, which must have a norm if queries do, are exact up to one factor per token and head.
    """
    if not has_norms(weights):
        return weights, None
    assert weights.k_norm is not None
    rows = append_bias(weights.k, weights.k_bias)
    keys = _divide_by_constant(rows, weights.k_norm, statistics, slice(weights.heads, None))
    linear = linearize_norms(replace(weights, k_norm=None), statistics, key_constant=key_constant)
    k, k_bias = split_bias(keys.affine, linear.k_bias is not None)
    return replace(linear, k=k, k_bias=k_bias), keys.divisor


def _fit_linear_map(
    weight: Tensor,
    bias: Tensor | None,
    norm: HeadNorm | None,
    statistics: LayerStatistics,
    heads: slice,
    constant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the weight ``[n, D, E]`` and the bias ``[n, D]`` of the linear map closest to the
    projection ``weight [n, D, E]`` plus ``bias [n, D]`` followed by ``norm``; those of the
    projection if it is None.

    ``heads`` selects these heads in the statistics. Without ``bias`` and ``constant`` there is no
    bias.
    """
    rows = append_bias(weight, bias)
    constant = constant or bias is not None
    if norm is None:
        return split_bias(rows, constant)
    start = _divide_by_constant(rows, norm, statistics, heads).affine
    if not constant:
        start[..., -1] = 0
    if statistics.normed is None:
        return split_bias(start, constant)
    moment = compute_input_moment(statistics, ridge=0.0)
    residual = statistics.normed[heads] - start @ moment
    # The fewer tokens, the stronger the pull toward L_0.
    ridge = SHRINK * statistics.gram.trace() / max(statistics.tokens, 1)
    moment[:-1, :-1].diagonal().add_(ridge)
    size = len(moment) if constant else len(moment) - 1
    start[..., :size] += torch.linalg.solve(moment[:size, :size], residual[..., :size], left=False)
    return split_bias(start, constant)


def _divide_by_constant(
    rows: Tensor, norm: HeadNorm, statistics: LayerStatistics, heads: slice
) -> LinearizedNorm:
    """Return the projection ``rows [n, D, E+1]`` followed by ``norm``, approximated by division by
    one number per head.

    Without text, this is the root mean square for uncorrelated inputs.
    """
    divisor = None
    if statistics.divisors is not None:
        mean, square = statistics.divisors[heads].unbind(-1)
        divisor = square / mean
    return linearize_norm(rows, norm, compute_input_moment(statistics), divisor)


def subtract_mean(rows: Tensor, norm: HeadNorm) -> Tensor:
    """Return ``rows [n, D, F]`` minus the mean over dims that a layer norm removes; unchanged for
    RMS norms.
    """
    if norm.kind == "rms":
        return rows
    return rows - rows.mean((0, 1) if norm.extent == "flat" else (1,), keepdim=True)


def compute_divisors(rows: Tensor, norm: HeadNorm, moment: Tensor) -> Tensor:
    """Return the root mean squares ``[n]`` by which ``norm`` divides the heads with projections
    ``rows [n, D, F]``, from the second moment ``[F, F]`` of the inputs ``[x; 1]``. The rows are
    centered.
    """
    return _compute_root_mean_squares(((rows @ moment) * rows).sum(-1).mean(-1), norm)


def _compute_root_mean_squares(square: Tensor, norm: HeadNorm) -> Tensor:
    """Return the numbers by which ``norm`` divides, from the mean squares ``square [n, ...]`` of
    the heads.
    """
    if norm.extent == "flat":
        square = square.mean(0, keepdim=True).expand_as(square)
    return (square + norm.eps).sqrt()
