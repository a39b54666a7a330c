"""Second moments of rotary rows as a query sees them at a random distance ``delta``, over inputs
and distances.

From ``delta`` positions away, rotary rows ``A`` of an input ``x`` appear rotated: ``y = cos(omega
delta) A x + sin(omega delta) J A x``, where ``J`` maps the real part of a pair to its imaginary
part and the imaginary part to minus the real one; rows without rotation have ``omega = 0``. If
inputs and distances are independent, ``E[y y^T]`` follows from ``E[x x^T]`` and the mixture of
distances (`distances`), without any text.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import Distances, rotary_moments


@dataclass(frozen=True)
class RotaryRows:
    """The layout of ``n`` rows: the first ``half`` are real parts, the next ``half`` imaginary, the
    rest do not rotate.

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
class Side:
    """Rows as one head sees them: their layout, the indices ``places [n]`` of their frequencies,
    and mean rotations.

    ``cosine`` and ``sine [n]``: the means of ``cos(omega delta)`` and ``sin(omega delta)`` over the
    distances.
    """

    layout: RotaryRows
    places: Tensor
    cosine: Tensor
    sine: Tensor

    def mean(self, rows: Tensor) -> Tensor:
        """The mean of ``rows [n]`` over the distances."""
        return self.cosine * rows + self.sine * self.layout.turn(rows)

    def mean_adjoint(self, rows: Tensor) -> Tensor:
        """The transpose of `mean`, of every column of ``rows [n, m]``."""
        return self.cosine[:, None] * rows - self.layout.turn(self.sine[:, None] * rows)


@dataclass(frozen=True)
class Kernel:
    """The second moment of rows ``a`` and ``b`` over the distances of one head, as a linear map of
    ``A cov(x) B^T``.

    ``terms``: the four products of cos and sin. Each contains flags for a turned left and right
    side (sin) and its moments ``[U, U]`` by frequency.
    """

    left: Side
    right: Side
    terms: tuple[tuple[bool, bool, Tensor], ...]

    def _moments(self) -> Iterator[tuple[bool, bool, Tensor]]:
        """The terms with their moments by row, ``[n_a, n_b]``; a turned side has no rows but those
        that rotate.
        """
        for left_turns, right_turns, moment in self.terms:
            rows = self.left.places[: 2 * self.left.layout.half if left_turns else None]
            columns = self.right.places[: 2 * self.right.layout.half if right_turns else None]
            yield left_turns, right_turns, moment[rows][:, columns]

    def apply(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """``E[y_a y_b^T]`` around the mean over distances, ``[n_a, n_b]``.

        ``product = A cov(x) B^T``; ``left_mean`` and ``right_mean`` are ``A E[x]`` and ``B E[x]``,
        biases included. A softmax over positions sees only the variation of constant keys with
        distance.
        """
        whole = product + torch.outer(left_mean, right_mean)
        result = torch.zeros_like(product)
        for left_turns, right_turns, moment in self._moments():
            height, width = moment.shape
            part = whole[:height, :width]
            part = self.left.layout.turn(part) if left_turns else part
            part = self.right.layout.turn(part.mT).mT if right_turns else part
            result[:height, :width] += moment * part
        return result - torch.outer(self.left.mean(left_mean), self.right.mean(right_mean))

    def adjoint(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices ``V`` and ``M`` of two gradients of ``sum(weight * apply(product, a, b))``.

        With respect to ``A`` in ``product = A cov B^T`` it is ``V B cov``, and with respect to
        ``a`` it is ``M b``.
        """
        result = torch.zeros_like(weight)
        for left_turns, right_turns, moment in self._moments():
            height, width = moment.shape
            part = weight[:height, :width] * moment
            part = -self.right.layout.turn(part.mT).mT if right_turns else part
            result[:height, :width] += -self.left.layout.turn(part) if left_turns else part
        return result, result - self.left.mean_adjoint(self.right.mean_adjoint(weight.mT).mT)


def kernels(
    distances: Distances, cached: RotaryRows, source: RotaryRows
) -> tuple[tuple[Kernel, Kernel], ...]:
    """The kernels (cached, cached) and (cached, source) of every head."""
    omega = torch.unique(torch.cat([cached.omega, source.omega]))
    count = len(omega)
    moments = rotary_moments(distances, torch.cat([omega, -omega, omega.new_zeros(1)]))
    minus = moments[:, :count, :count]
    plus = moments[:, :count, count:-1]
    mean = moments[:, :count, -1]
    # Moments of cos(omega delta), index 0, and sin(omega delta), index 1, by their product
    # formulas.
    cosine = (minus + plus).real / 2, (minus - plus).imag / 2
    sine = -(minus + plus).imag / 2, (minus - plus).real / 2
    means = mean.real, -mean.imag
    result = []
    for head in range(len(moments)):
        pairs = itertools.product((0, 1), repeat=2)
        terms = tuple((bool(p), bool(q), (cosine, sine)[p][q][head]) for p, q in pairs)
        sides = []
        for layout in (cached, source):
            places = torch.searchsorted(omega, layout.omega)
            sides.append(Side(layout, places, *(each[head][places] for each in means)))
        result.append((Kernel(sides[0], sides[0], terms), Kernel(sides[0], sides[1], terms)))
    return tuple(result)
