"""Second moments of what a query sees of a key at distance ``delta``, over inputs and distances, without any text.

Seen from ``delta`` positions on, rotary rows ``A`` of an input ``x`` turn: ``y = cos(omega delta) A x + sin(omega
delta) J A x``, where ``J`` maps the real part of a pair to its imaginary part and that to minus the real one; still
rows have ``omega = 0``. For inputs and distances that are independent, ``E[y y^T]`` follows from ``E[x x^T]`` and the
distances that count (`distances`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import Distances, rotary_moments


@dataclass(frozen=True)
class RotaryRows:
    """The layout of ``n`` rows: the first ``half`` are real parts, the next ``half`` imaginary, the rest stand still.

    ``omega [n]`` radians per position.
    """

    omega: Tensor
    half: int

    @staticmethod
    def of(theta: Tensor, still: int) -> "RotaryRows":
        """Pairs at ``theta [half]`` and ``still`` rows without rotation."""
        return RotaryRows(torch.cat([theta, theta, theta.new_zeros(still)]), theta.numel())

    def turn(self, rows: Tensor) -> Tensor:
        """``J rows``, ``[n, ...]``."""
        half = self.half
        return torch.cat([rows[half : 2 * half], -rows[:half], torch.zeros_like(rows[2 * half :])])

    def unturn(self, rows: Tensor) -> Tensor:
        """``J^T rows``."""
        return -self.turn(rows)


@dataclass(frozen=True)
class WaveMoments:
    """Moments of ``cos(omega delta)`` (index 0) and ``sin(omega delta)`` (1) over the distances of every head.

    ``omega [U]`` ascending; ``second[p][q] [H, U, U]``: ``E[p(omega_a delta) q(omega_b delta)]``; ``mean[p] [H, U]``.
    """

    omega: Tensor
    second: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    mean: tuple[Tensor, Tensor]

    def index(self, rows: RotaryRows) -> Tensor:
        """The position of each row's frequency in ``omega``."""
        return torch.searchsorted(self.omega, rows.omega)


def wave_moments(distances: Distances, *layouts: RotaryRows) -> WaveMoments:
    """The moments of all frequencies that occur in ``layouts``, by the product formulas of cos and sin."""
    omega = torch.unique(torch.cat([rows.omega for rows in layouts]))
    count = len(omega)
    moments = rotary_moments(distances, torch.cat([omega, -omega, omega.new_zeros(1)]))
    minus, plus, mean = moments[:, :count, :count], moments[:, :count, count:-1], moments[:, :count, -1]
    cosine = (minus + plus).real / 2, (minus - plus).imag / 2  # with cos, with sin
    sine = -(minus + plus).imag / 2, (minus - plus).real / 2
    return WaveMoments(omega, (cosine, sine), (mean.real, -mean.imag))


class Term(NamedTuple):
    """One of the four products of cos and sin: which side turns (sin), and its moments ``[U, U]`` by frequency.

    ``covariance`` is ``moment`` without the product of the means: what a softmax over positions still sees of constant
    keys.
    """

    left_turns: bool
    right_turns: bool
    moment: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Kernel:
    """The second moment of rows ``a`` and ``b`` over the distances of one head, as a linear map of ``A cov(x) B^T``.

    ``rows [n_a]``, ``columns [n_b]``: where the frequencies of either side stand in the terms.
    """

    left: RotaryRows
    right: RotaryRows
    rows: Tensor
    columns: Tensor
    terms: tuple[Term, ...]

    def apply(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """``E[y_a y_b^T]`` about the mean over distances, ``[n_a, n_b]``.

        ``product = A cov(x) B^T``; ``left_mean``, ``right_mean``: ``A E[x]`` and ``B E[x]``, biases included.
        """
        means = torch.outer(left_mean, right_mean)
        result = torch.zeros_like(product)
        for term in self.terms:
            result += self._by_row(term.moment) * self._turned(term, product)
            result += self._by_row(term.covariance) * self._turned(term, means)
        return result

    def adjoint(self, weight: Tensor) -> Tensor:
        """The gradient of ``sum(weight * apply(A cov B^T, 0, 0))`` by ``A`` is ``adjoint(weight) B cov``."""
        return self._unturned([weight * self._by_row(term.moment) for term in self.terms])

    def mean_adjoint(self, weight: Tensor) -> Tensor:
        """The same for the means: the gradient of ``sum(weight * apply(0, a, b))`` by ``a`` is ``mean_adjoint b``."""
        return self._unturned([weight * self._by_row(term.covariance) for term in self.terms])

    def _by_row(self, moment: Tensor) -> Tensor:
        """``[U, U]`` by frequency -> ``[n_a, n_b]`` by row."""
        return moment[self.rows][:, self.columns]

    def _turned(self, term: Term, product: Tensor) -> Tensor:
        product = self.left.turn(product) if term.left_turns else product
        return self.right.turn(product.mT).mT if term.right_turns else product

    def _unturned(self, weights: list[Tensor]) -> Tensor:
        result = torch.zeros_like(weights[0])
        for term, weight in zip(self.terms, weights, strict=True):
            weight = self.right.unturn(weight.mT).mT if term.right_turns else weight
            result += self.left.unturn(weight) if term.left_turns else weight
        return result


def kernels(left: RotaryRows, right: RotaryRows, waves: WaveMoments) -> list[Kernel]:
    """One kernel per head of ``waves``, which hold the frequencies of both sides."""
    rows, columns = waves.index(left), waves.index(right)

    def term(head: int, p: int, q: int) -> Term:
        moment = waves.second[p][q][head]
        product = torch.outer(waves.mean[p][head], waves.mean[q][head])
        return Term(bool(p), bool(q), moment, moment - product)

    sides = ((0, 0), (0, 1), (1, 0), (1, 1))
    return [
        Kernel(left, right, rows, columns, tuple(term(head, p, q) for p, q in sides))
        for head in range(len(waves.mean[0]))
    ]
