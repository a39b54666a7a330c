"""The fold of one group of key/value heads as small matrices, whatever found them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedHead:
    """``shared = sum_j encode[j] @ member_j`` and ``member_j ~ decode[j] @ shared``; both ``[m, D, D]``.

    ``decode`` may hold several maps for each member, in order: one for each query head that reads it. Queries that read
    member ``j`` become ``decode[j]^T q``, output columns ``W_o decode[j]``.
    """

    encode: Tensor
    decode: Tensor

    def merge(self, members: Tensor) -> Tensor:
        """Rows of the members ``[m, D, F]`` -> rows of the shared head ``[D, F]``."""
        return torch.einsum("jab,jbf->af", self.encode, members)

    def rescale(self, factor: Tensor) -> "SharedHead":
        """The same fold with the shared head's dims multiplied by ``factor [D]``, undone in ``decode``."""
        return SharedHead(factor[:, None] * self.encode, self.decode / factor)

    def without(self, amplitude: Tensor) -> "SharedHead":
        """The same fold of keys for members that lack the factors ``amplitude [D]`` they (and queries) had here."""
        change = amplitude / amplitude[:, None]
        return SharedHead(self.encode * change, self.decode / change)

    def repeat_decode(self, times: int) -> "SharedHead":
        """The same fold with ``decode`` written out for each of the ``times`` query heads that read a member."""
        return SharedHead(self.encode, self.decode.repeat_interleave(times, 0))


def balance(head: SharedHead, members: Tensor, blocks: list[Tensor]) -> SharedHead:
    """Rescales so that in every block of dims the shared rows have the mean norm of their members' rows.

    ``members [m, D, F]``; ``blocks`` are index tensors into ``D`` within which one factor may act (a rotary pair, the
    unrotated dims, a whole value head). Absent blocks (zero rows) are left alone.
    """
    merged = head.merge(members)
    factor = torch.ones(merged.shape[0], dtype=torch.float64, device=merged.device)
    for block in blocks:
        wanted = members[:, block].flatten(1).norm(dim=1).mean()
        found = merged[block].norm()
        if wanted > 0 and found > 0:
            factor[block] = wanted / found
    return head.rescale(factor)
