"""The output projection that fits what its heads really give, in closed form."""

import torch
from torch import Tensor

RIDGE = 0.1
"""Pull towards the present projection, relative to the mean energy of the heads' dims.

It keeps the directions that the calibration text hardly visits, which other text may.
"""


def fit_output(present: Tensor, gram: Tensor, missing: Tensor) -> Tensor:
    """``W [E, n]`` with the least ``E|target - W z|^2 + RIDGE e |W - present|^2``, ``e`` the mean energy of ``z [n]``.

    ``gram [n, n] = E[z z^T]`` and ``missing [E, n] = E[(target - present z) z^T]``, float64. The solution is

        W = present + missing (gram + RIDGE e I)^-1
    """
    energy = gram.diagonal().mean()
    energy = torch.where(energy > 0, energy, 1.0)
    damped = gram + RIDGE * energy * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change: Tensor = torch.linalg.solve(damped, missing.mT).mT
    return present + change
