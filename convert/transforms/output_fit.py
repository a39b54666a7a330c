"""The output projection of a converted layer, refitted to what the layer should add: one linear regression.

After a conversion the heads' mixed values differ from the source's in ways that are partly a linear function of what
they still hold. Sums over calibration tokens are all that is kept; nothing is trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.01  # pull towards the present projection, relative to each input's energy


@dataclass
class OutputFit:
    """Sums over tokens of ``[z; 1] [z; 1]^T`` and ``y [z; 1]^T``: ``z [H D]`` the heads' mixed values, ``y [E]`` the
    target.

    With the converted model's own inputs, and ``y`` the source's attention output plus what its residual stream is
    ahead (the residual that the attention is added to, source minus converted), later layers mend what earlier ones
    lost.
    """

    gram: Tensor
    cross: Tensor
    tokens: int = 0

    @staticmethod
    def empty(mixed: int, model_dim: int, device: torch.device | str = "cpu") -> "OutputFit":
        gram = torch.zeros(mixed + 1, mixed + 1, dtype=torch.float64, device=device)
        return OutputFit(gram, gram.new_zeros(model_dim, mixed + 1))

    def add(self, mixed: Tensor, target: Tensor) -> None:
        """``mixed [..., H D]`` before the output projection, ``target [..., E]`` after it."""
        rows = mixed.reshape(-1, mixed.shape[-1])
        rows = torch.nn.functional.pad(rows, (0, 1), value=1.0).double()
        self.gram += rows.mT @ rows
        self.cross += target.reshape(len(rows), -1).double().mT @ rows
        self.tokens += len(rows)

    def solve(
        self, o: Tensor, o_bias: Tensor | None, *, biased: bool, ridge: float = RIDGE
    ) -> tuple[Tensor, Tensor | None]:
        """``o [E, H, D]`` and its bias, refitted; ``biased``: whether there may be one.

        Raises ``ValueError`` without tokens.
        """
        if not self.tokens:
            raise ValueError("tokens: expected at least one token to fit to, found none")
        size = len(self.gram) - (not biased)
        bias = o.new_zeros(len(o)) if o_bias is None else o_bias
        present = torch.cat([o.flatten(1), bias[:, None]], 1).to(self.gram)
        gram, cross = self.gram[:size, :size], self.cross[:, :size] - present[:, size:] @ self.gram[size:, :size]
        pull = ridge * gram.diagonal().clone()
        pull[o[0].numel() :] = 0  # a constant is no risk
        pull = torch.where(gram.diagonal() > 0, pull, 1.0)
        fitted = torch.linalg.solve(gram + torch.diag(pull), (cross + present[:, :size] * pull).mT).mT
        weight = fitted[:, : o[0].numel()].reshape(o.shape).to(o).contiguous()
        return weight, fitted[:, -1].to(o).contiguous() if biased else o_bias
