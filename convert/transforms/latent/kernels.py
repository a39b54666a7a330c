"""Second moments of rotary rows as a query sees them at a random distance ``delta``, over inputs and distances.

From ``delta`` positions away, rotary rows ``A`` of an input ``x`` appear rotated: ``y = cos(omega delta) A x +
sin(omega delta) J A x``, where ``J`` maps the real part of a pair to its imaginary part and the imaginary part to minus
the real one; rows without rotation have ``omega = 0``. If inputs and distances are independent, ``E[y y^T]`` follows
from ``E[x x^T]`` and the mixture of distances (`distances`), without any text.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import Distances, rotary_moments


@dataclass(frozen=True)
class RotaryRows:
    """The layout of ``n`` rows: the first ``half`` are real parts, the next ``half`` imaginary, the rest do not rotate.

    ``omega [n]``: radians per position.
    """

    omega: Tensor
    half: int

    @staticmethod
    def of(theta: Tensor, still: int) -> "RotaryRows":
        """The layout for pairs at ``theta [half]`` followed by ``still`` rows without rotation."""
        return RotaryRows(torch.cat([theta, theta, theta.new_zeros(still)]), theta.numel())

    def turn(self, rows: Tensor) -> Tensor:
        """Return ``J rows`` for ``rows [n, ...]``; ``J^T rows`` is its negative."""
        half = self.half
        return torch.cat([rows[half : 2 * half], -rows[:half], torch.zeros_like(rows[2 * half :])])


@dataclass(frozen=True)
class Kernel:
    """The second moment of rows ``a`` and ``b`` over the distances of one head, as a linear map of ``A cov(x) B^T``.

    ``terms``: the four products of cos and sin. Each contains flags for a turned left and right side (sin), its moments
    ``[U, U]`` by frequency, and its covariances, which exclude the product of the means: a softmax over positions sees
    only the variation of constant keys with distance. ``rows [n_a]``, ``columns [n_b]``: frequency indices of the two
    sides.
    """

    left: RotaryRows
    right: RotaryRows
    rows: Tensor
    columns: Tensor
    terms: tuple[tuple[bool, bool, Tensor, Tensor], ...]

    def apply(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """``E[y_a y_b^T]`` around the mean over distances, ``[n_a, n_b]``.

        ``product = A cov(x) B^T``; ``left_mean`` and ``right_mean`` are ``A E[x]`` and ``B E[x]``, biases included.
        """
        means = torch.outer(left_mean, right_mean)
        result = torch.zeros_like(product)
        for left_turns, right_turns, *weights in self.terms:
            for weight, part in zip(weights, (product, means), strict=True):
                part = self.left.turn(part) if left_turns else part
                part = self.right.turn(part.mT).mT if right_turns else part
                result += weight[self.rows][:, self.columns] * part
        return result

    def adjoint(self, weight: Tensor, *, means: bool = False) -> Tensor:
        """The gradient of ``sum(weight * apply(A cov B^T, 0, 0))`` with respect to ``A`` is ``adjoint(weight) B cov``.

        ``means=True``: for ``sum(weight * apply(0, a, b))`` and ``a``, the gradient is ``adjoint(weight, means=True)
        b``.
        """
        result = torch.zeros_like(weight)
        for left_turns, right_turns, moment, covariance in self.terms:
            part = weight * (covariance if means else moment)[self.rows][:, self.columns]
            part = -self.right.turn(part.mT).mT if right_turns else part
            result += -self.left.turn(part) if left_turns else part
        return result


def kernels(distances: Distances, cached: RotaryRows, source: RotaryRows) -> tuple[tuple[Kernel, Kernel], ...]:
    """The kernels (cached, cached) and (cached, source) of every head."""
    omega = torch.unique(torch.cat([cached.omega, source.omega]))
    count = len(omega)
    moments = rotary_moments(distances, torch.cat([omega, -omega, omega.new_zeros(1)]))
    minus, plus, mean = moments[:, :count, :count], moments[:, :count, count:-1], moments[:, :count, -1]
    # Moments of cos(omega delta), index 0, and sin(omega delta), index 1, by their product formulas.
    cosine = (minus + plus).real / 2, (minus - plus).imag / 2
    sine = -(minus + plus).imag / 2, (minus - plus).real / 2
    means = mean.real, -mean.imag
    rows, columns = (torch.searchsorted(omega, side.omega) for side in (cached, source))
    result = []
    for head in range(len(moments)):
        terms = []
        for p, q in itertools.product((0, 1), repeat=2):
            moment = (cosine, sine)[p][q][head]
            terms.append((bool(p), bool(q), moment, moment - torch.outer(means[p][head], means[q][head])))
        same = Kernel(cached, cached, rows, rows, tuple(terms))
        result.append((same, Kernel(cached, source, rows, columns, tuple(terms))))
    return tuple(result)
