"""Fits a shared key head and its queries to the members' scores, over the distances at which tokens meet.

The score of a query at position ``t`` and a key at ``s`` is ``q^T R(s - t) k``. Averaged over all distances, different
rotary pairs do not see each other, and one complex principal component per pair is the best shared key. Real attention
prefers short distances, at which slow pairs hardly turn: there they act like unrotated dims, and what one pair of the
shared key lacks, another may stand in for. So let queries and keys be arbitrary linear maps, ``q'_h = A_h q_h`` and
``k' = sum_j B_j k_j``, and minimise, with queries and keys independent and distance ``delta`` drawn from ``p_h``,

    sum_h  E | (A_h q_h)^T R(delta) (sum_j B_j k_j)  -  q_h^T R(delta) k_h |^2.

Given one side, the other is a linear least-squares problem of size ``D``; a few alternations suffice.
In the basis of complex pairs and their conjugates (unitary), rotation is diagonal, and averaging a moment over
distances multiplies its entries by the characteristic function ``phi_h(w_a - w_b) = E e^{-i (w_a - w_b) delta}``.
"""

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.shared_head import SharedHead
from kvfold.convert.transforms.weights import Rotary

ATTENTION_SHARE = 0.5
"""How much of ``p_h`` is the head's attention by distance, as measured. The rest falls off as ``1 / (1 + delta)`` over
the whole context: keys that a head does not attend to must keep their low scores, beyond the calibration's length too
(a fit for distances up to 256 alone was worth nothing at 512)."""

FARTHEST = 131072
"""Distances above count no more: each doubling of the context adds ever less."""

ROUNDS = 10
RIDGE = 1e-6
CHUNK = 4096
HALF = 0.5**0.5


def turning(profile: Tensor, context: int, rotary: Rotary, dims: int) -> Tensor:
    """Characteristic functions ``[H, D, D]``, complex, of the distances that count, in the basis of `_in_pairs`.

    ``profile [H, S]`` is attention by distance; ``context`` how far tokens may be apart at all.
    """
    theta = rotary.theta.double().to(profile.device)
    speed = torch.cat((theta, -theta, theta.new_zeros(dims - rotary.dims)))
    reach = max(profile.shape[1], min(context, FARTHEST))
    spread = 1 / (1 + torch.arange(reach, dtype=torch.float64, device=profile.device))
    spread = _characteristic(spread / spread.sum(), speed)
    seen = torch.stack([_characteristic(row, speed) for row in profile.double()])
    return ATTENTION_SHARE * seen + (1 - ATTENTION_SHARE) * spread


def _characteristic(weights: Tensor, speed: Tensor) -> Tensor:
    """``sum_delta weights[delta] e^{-i (speed_a - speed_b) delta}``, ``[D, D]``, in chunks of distances."""
    result = torch.zeros(len(speed), len(speed), dtype=torch.complex128, device=speed.device)
    for start in range(0, len(weights), CHUNK):
        part = weights[start : start + CHUNK]
        angle = -speed[:, None] * torch.arange(start, start + len(part), device=speed.device)
        turn = torch.polar(torch.ones_like(angle), angle)
        result += (turn * part) @ turn.mH
    return result


def fit_scores(
    start: SharedHead, keys: Tensor, queries: Tensor, turn: Tensor, pairs: int, rounds: int = ROUNDS
) -> SharedHead:
    """Improves ``start`` by alternating least squares.

    ``keys [m, D, m, D] = E[k k^T]`` of the members, ``queries [n, D, D] = E[q q^T]`` of the ``n`` query heads that read
    them (``n / m`` each, in order), ``turn [n, D, D]`` from `turning`; ``decode [n, D, D]`` has one map per query head.
    Where ``start`` is exact, it is returned as it is, up to rounding.
    """
    reads = _member_read(keys, queries)
    encode, absorb = start.encode, start.decode.mT
    for _ in range(rounds):
        shared = torch.einsum("jab,jbkc->akc", encode, keys)  # E[k' k_j^T]
        wanted = _averaged(shared.transpose(0, 1)[reads], turn, pairs)
        found = _averaged(torch.einsum("akc,kdc->ad", shared, encode), turn, pairs)
        absorb = _closer(absorb, found, wanted)
        asked = absorb @ queries
        wanted = _averaged(asked, turn.conj(), pairs)
        wanted = torch.zeros_like(encode).index_add_(0, reads, wanted)
        found = _averaged(asked @ absorb.mT, turn.conj(), pairs).sum(0)
        encode = _closer(encode, found, wanted)
    return SharedHead(encode, absorb.mT)


def score_losses(head: SharedHead, keys: Tensor, queries: Tensor, turn: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """The objective at ``head`` for each query head ``[n]``, and for scores of 0. Arguments as `fit_scores`."""
    reads = _member_read(keys, queries)
    shared = torch.einsum("jab,jbkc->akc", head.encode, keys)
    cross = _averaged(shared.transpose(0, 1)[reads], turn, pairs)
    found = _averaged(torch.einsum("akc,kdc->ad", shared, head.encode), turn, pairs)
    own = _averaged(keys.diagonal(dim1=0, dim2=2).permute(2, 0, 1)[reads], turn, pairs)
    asked = head.decode.mT @ queries
    total = (queries * own).sum((1, 2))
    return total - 2 * (asked * cross).sum((1, 2)) + ((asked @ head.decode) * found).sum((1, 2)), total


def _member_read(keys: Tensor, queries: Tensor) -> Tensor:
    """Which member each query head reads."""
    return torch.arange(len(queries), device=queries.device) // (len(queries) // len(keys))


def _averaged(moment: Tensor, turn: Tensor, pairs: int) -> Tensor:
    """``E_delta[R moment R^T]``, real: ``moment [..., D, D]`` with ``turn [..., D, D]``."""
    inner = _in_pairs(_in_pairs(moment, pairs).mT, pairs, conj=True).mT * turn
    return torch.real(_from_pairs(_from_pairs(inner, pairs).mT, pairs, conj=True).mT)


def _in_pairs(x: Tensor, pairs: int, conj: bool = False) -> Tensor:
    """Rows ``[..., D, n]``, half-split, to rows of complex pairs, their conjugates and unrotated dims: unitary.

    With ``conj`` the other way round, as the right side of a moment needs it.
    """
    low, high, rest = x[..., :pairs, :], x[..., pairs : 2 * pairs, :] * (-1j if conj else 1j), x[..., 2 * pairs :, :]
    return torch.cat((HALF * (low + high), HALF * (low - high), rest.to(high.dtype)), -2)


def _from_pairs(x: Tensor, pairs: int, conj: bool = False) -> Tensor:
    """Undoes `_in_pairs`."""
    one, other, rest = x[..., :pairs, :], x[..., pairs : 2 * pairs, :], x[..., 2 * pairs :, :]
    return torch.cat((HALF * (one + other), (1j if conj else -1j) * HALF * (one - other), rest), -2)


def _closer(old: Tensor, found: Tensor, wanted: Tensor) -> Tensor:
    """Solves ``found @ new = wanted``, held at ``old`` where ``found`` says nothing."""
    level = found.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, level, 1.0)[..., None, None]
    held = RIDGE * level * torch.eye(found.shape[-1], dtype=found.dtype, device=found.device)
    step: Tensor = torch.linalg.solve(found + held, wanted - found @ old)
    return old + step
