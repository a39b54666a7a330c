"""The shared key and value head of a group: their maps, the error they minimize, and principal components.

A fold replaces the ``m`` key/value heads of a group by one. `SharedHead` holds the maps to and from it, `GroupMoments`
the second moments a fit works from, and an `Objective` says which error is minimized.

Rotary embedding multiplies pair ``l`` at position ``t`` by ``e^{i t theta_l}``, which commutes with multiplication by
any complex number and with nothing that mixes two pairs. `share_keys` therefore approximates each member's key pair by
a complex multiple of one shared pair, weighted by the energy of the queries that read it. Unrotated dims and values may
mix: `share_dims` takes the top real components of all members' dims together, keys in the metric of the queries, values
in the metric ``W_o^T W_o`` of the output.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfold.convert.transforms.linalg import metric_root, pair_matrices, pair_moment, symmetric_eig

# Query weights are at least this share of the group's largest: keys are divided by them. 1e-9, 1e-6 and 1e-3 give the
# same loss to 1e-4 nats on the reference MHA model at 8 -> 2 heads (recipes/benchmarks/bench_constants.py).
WEAKEST_QUERY = 1e-6


@dataclass(frozen=True)
class SharedHead:
    """``shared = sum_j encode[j] @ member_j`` and ``member_j ~ decode[j] @ shared``; both ``[m, D, D]``.

    ``decode`` may hold several maps for each member, in order: one for each query head that reads it. Queries that read
    member ``j`` become ``decode[j]^T q``, output columns ``W_o decode[j]``.
    """

    encode: Tensor
    decode: Tensor

    def repeat_decode(self, times: int) -> "SharedHead":
        """The same fold with ``decode`` repeated for each of the ``times`` query heads that read a member."""
        return SharedHead(self.encode, self.decode.repeat_interleave(times, 0))


@dataclass(frozen=True)
class GroupMoments:
    """Second moments of ``m`` KV heads that are to share, and of the ``n`` query heads that read them.

    ``keys, values [m, D, m, D]``: ``E[k k^T]``, ``E[v v^T]`` between all dims of all members. ``queries [n, D, D]``:
    ``E[q q^T]``; queries ``j * n/m`` to ``(j + 1) * n/m`` read member ``j``. Keys and queries are taken before they
    rotate, with the rotary amplitude; their first ``2 * pairs`` dims rotate. ``phi [n, D, D]``: the average rotation
    over the distances that count (`score_fit.distance_moments`). ``metric [m, D, D]``: the squared length of the
    layer's output per value (`linalg.output_metric`). All float64 (``phi`` complex).
    """

    keys: Tensor
    queries: Tensor
    values: Tensor
    phi: Tensor
    metric: Tensor
    pairs: int

    @property
    def readers(self) -> int:
        """Query heads per member, ``n / m``."""
        return len(self.queries) // len(self.keys)


class Objective(Protocol):
    """The error that the shared heads of a group minimize: one key head and one value head, fitted separately.

    The default is `score_fit.Scores`. Another one needs only these two methods; `share_keys`, `share_dims` and
    `score_fit.fit_scores` are there to build on.
    """

    def key_head(self, group: GroupMoments) -> SharedHead:
        """The shared key head; ``decode [n, D, D]`` holds one map per query head."""

    def value_head(self, group: GroupMoments) -> SharedHead:
        """The shared value head; ``decode [m, D, D]`` holds one map per member."""


def share_keys(keys: Tensor, queries: Tensor, pairs: int) -> SharedHead:
    """One key head for ``m`` members, principal components of ``keys [m, D, m, D] = E[k k^T]`` weighted by the queries.

    ``queries [m, D, D]``: the second moment of the queries that read each member, summed over its query heads. The
    first ``2 * pairs`` dims rotate: with ``s_j^2 = E|q_{j,l}|^2`` and ``u`` the top eigenvector of the covariance of
    ``s_j k_{j,l}`` over the members, pair ``l`` is shared as ``sum_j conj(u_j) s_j k_{j,l}``. The rest is `share_dims`.
    """
    members, dims = queries.shape[:2]
    rotated = 2 * pairs
    encode = keys.new_zeros(members, dims, dims)
    decode = torch.zeros_like(encode)
    if pairs:
        square = queries.diagonal(dim1=1, dim2=2)
        energy = (square[:, :pairs] + square[:, pairs:rotated]).mT  # E|q_l|^2, [pairs, m]
        floor = WEAKEST_QUERY * energy.amax(1, keepdim=True)
        weight = energy.clamp(min=floor).clamp(min=torch.finfo(energy.dtype).tiny).sqrt()
        _, vectors = symmetric_eig(weight[:, :, None] * pair_moment(keys, pairs) * weight[:, None, :])
        top = vectors[..., 0]
        # Eigenvectors have a free phase: the largest entry is made real and positive, so that results are reproducible.
        largest = top.gather(1, top.abs().argmax(1, keepdim=True))
        top = top * (largest.conj() / largest.abs())
        encode += pair_matrices((top.conj() * weight).mT, dims)
        decode += pair_matrices((top / weight).mT, dims)
    if rotated < dims:
        rest = slice(rotated, dims)
        shared = share_dims(keys[:, rest, :, rest], queries[:, rest, rest])
        encode[:, rest, rest], decode[:, rest, rest] = shared.encode, shared.decode
    return SharedHead(encode, decode)


def share_dims(members: Tensor, metric: Tensor) -> SharedHead:
    """One head for dims that may mix: principal components of ``members [m, D, m, D]`` in their ``metric [m, D, D]``.

    For unrotated key dims the metric is the second moment of the queries, for values `linalg.output_metric`. Rotating
    the members onto each other and averaging (Procrustes) is the special case of equal weights.
    """
    count, dims = metric.shape[:2]
    root, inverse = metric_root(metric)
    stacked = torch.einsum("jab,jbkc,kdc->jakd", root, members, root).reshape(count * dims, count * dims)
    _, vectors = symmetric_eig(stacked)
    basis = vectors[:, :dims].reshape(count, dims, dims)  # member, its dim, shared dim
    return SharedHead(basis.mT @ root, inverse @ basis)
