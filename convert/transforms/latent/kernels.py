"""Second moments of what a query sees of a key at distance ``delta``, over inputs and distances, without any text.

Seen from ``delta`` positions on, rotary rows ``A`` of an input ``x`` turn: ``y = cos(omega delta) A x + sin(omega
delta) J A x``, where ``J`` maps the real part of a pair to its imaginary part and that to minus the real one; still
rows have ``omega = 0``. For inputs and distances that are independent, ``E[y y^T]`` follows from ``E[x x^T]`` and the
distance profile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turning:
    """``n`` rows: the first ``half`` are real parts, the next ``half`` imaginary ones, the rest stand still.

    ``omega [n]`` radians per position.
    """

    omega: Tensor
    half: int

    @staticmethod
    def of(theta: Tensor, still: int) -> "Turning":
        """Pairs at ``theta [half]`` and ``still`` rows without rotation."""
        return Turning(torch.cat([theta, theta, theta.new_zeros(still)]), theta.numel())

    def turn(self, rows: Tensor) -> Tensor:
        """``J rows``, ``[n, ...]``."""
        half = self.half
        return torch.cat([rows[half : 2 * half], -rows[:half], torch.zeros_like(rows[2 * half :])])

    def unturn(self, rows: Tensor) -> Tensor:
        """``J^T rows``."""
        return -self.turn(rows)


@dataclass(frozen=True)
class Kernel:
    """How rows ``a`` and ``b`` go together over the distances of one head.

    ``terms``: for each of cos and sin on either side, ``E[p(omega_a delta) q(omega_b delta)]`` (``whole [n_a, n_b]``),
    and the same without the product of the means (``moving``): what a softmax over positions still sees of constant
    keys.
    """

    left: Turning
    right: Turning
    terms: tuple[tuple[bool, bool, Tensor, Tensor], ...]

    def apply(self, product: Tensor, left_mean: Tensor, right_mean: Tensor) -> Tensor:
        """``E[y_a y_b^T]`` centred, ``[n_a, n_b]``.

        ``product = A cov(x) B^T``; ``left_mean``, ``right_mean``: ``A E[x]`` and ``B E[x]``, biases included.
        """
        means = torch.outer(left_mean, right_mean)
        return torch.stack(
            [
                whole * self._sides(p, q, product) + moving * self._sides(p, q, means)
                for p, q, whole, moving in self.terms
            ]
        ).sum(0)

    def pull(self, weight: Tensor, *, moving: bool) -> Tensor:
        """The adjoint on the left, ``sum P^T (weight * kernel) Q``, ``[n_a, n_b]``: a map on the right's rows."""
        found = []
        for p, q, whole, shifted in self.terms:
            mixed = weight * (shifted if moving else whole)
            mixed = self.right.unturn(mixed.mT).mT if q else mixed
            found.append(self.left.unturn(mixed) if p else mixed)
        return torch.stack(found).sum(0)

    def _sides(self, left: bool, right: bool, product: Tensor) -> Tensor:
        product = self.left.turn(product) if left else product
        return self.right.turn(product.mT).mT if right else product


def kernels(left: Turning, right: Turning, profile: Tensor) -> Iterator[Kernel]:
    """One kernel per head of ``profile [H, S]``, the weight of every distance."""
    omega, index = torch.unique(torch.cat([left.omega, right.omega]), return_inverse=True)
    rows, columns = index[: len(left.omega)], index[len(left.omega) :]
    angle = torch.arange(profile.shape[1], dtype=torch.float64, device=profile.device)[:, None] * omega
    waves = (angle.cos(), angle.sin())
    for weight in profile:
        terms = []
        for p, q in ((False, False), (False, True), (True, False), (True, True)):
            both = waves[p].mT @ (weight[:, None] * waves[q])
            moving = both - torch.outer(weight @ waves[p], weight @ waves[q])
            terms.append((p, q, both[rows][:, columns], moving[rows][:, columns]))
        yield Kernel(left, right, tuple(terms))
