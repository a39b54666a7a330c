"""The shared key and value heads of a group: their maps, the error that they minimize, and their
principal components.

Rotary embedding multiplies pair ``l`` at position ``t`` by ``e^{i t theta_l}``, which commutes with
multiplication by any complex number, but not with maps that mix two pairs. `share_keys` therefore
approximates the key pair of each head in the group by a complex multiple of one shared pair,
weighted by the energy of the queries that read it. Unrotated dims and values may mix: `share_dims`
uses the top real components of all heads' dims together, for keys in the metric of the queries, for
values in the metric ``W_o^T W_o`` of the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfold.convert.transforms.linalg import (
    compute_metric_roots,
    decompose_symmetric,
    multiply_pairs,
)

# The minimum query weight as a share of the group's largest: keys are divided by query weights.
# 1e-9, 1e-6 and 1e-3 have the same loss to 1e-4 nats on the reference MHA model at 8 -> 2 heads
# (measured by a script in git history, 2026-11-22).
WEAKEST_QUERY = 1e-6


@dataclass(frozen=True)
class SharedHead:
    """Linear maps between the ``m`` heads of a group and one shared head: ``shared = sum_j
    encode[j] @ head_j`` and ``head_j ~ decode[j] @ shared``; both ``[m, D, D]``.

    ``decode`` may contain several maps for each head of the group, in order: one for each query
    head that reads it. Queries that read head ``j`` become ``decode[j]^T q``; output columns become
    ``W_o decode[j]``.
    """

    encode: Tensor
    decode: Tensor

    def repeat_decode(self, times: int) -> "SharedHead":
        """Return the same shared head with each map in ``decode`` repeated ``times`` times, once
        for each query head that reads one of the heads.
        """
        return SharedHead(self.encode, self.decode.repeat_interleave(times, 0))


@dataclass(frozen=True)
class GroupMoments:
    """Second moments of the queries, keys and values of a group of ``m`` KV heads and the ``n``
    query heads that read them.

    ``keys, values [m, D, m, D]``: ``E[k k^T]``, ``E[v v^T]`` between all dims of all heads.
    ``queries [n, D, D]``: ``E[q q^T]``; queries ``j * n/m`` to ``(j + 1) * n/m - 1`` read head
    ``j``. Keys and queries are measured before rotation and include the rotary amplitude; their
    first ``2 * pairs`` dims rotate. ``phi [n, D, D]``: the average rotation over the mixture of
    distances (`score_fit.average_dim_rotations`). ``metric [m, D, D]``: the squared length of
    the layer's output per value (`linalg.compute_output_metric`). All have the dtype of the
    layer's products, float64 or, of wide layers, float32 (``phi`` is complex).
    """

    keys: Tensor
    queries: Tensor
    values: Tensor
    phi: Tensor
    metric: Tensor
    pairs: int

    @property
    def query_heads_per_kv_head(self) -> int:
        """The number of query heads that read each KV head, ``n / m``."""
        return len(self.queries) // len(self.keys)

    def select_heads(self, heads: Sequence[int] | Tensor) -> "GroupMoments":
        """Return the moments of the KV heads ``heads`` and of the query heads that read them."""
        device = self.keys.device
        chosen = torch.as_tensor(heads, device=device)
        repeat = self.query_heads_per_kv_head
        readers = (chosen[:, None] * repeat + torch.arange(repeat, device=device)).flatten()
        keys, values = (
            # All entries of the group at once: whole rows of heads would be copied first.
            moments[chosen[:, None], :, chosen].transpose(1, 2)
            for moments in (self.keys, self.values)
        )
        return GroupMoments(
            keys=keys,
            queries=self.queries[readers],
            values=values,
            phi=self.phi[readers],
            metric=self.metric[chosen],
            pairs=self.pairs,
        )


class Objective(Protocol):
    """The error that a fold minimizes: fits one shared key head and one shared value head to a
    group of heads, separately.

    The default is `score_fit.ScoreObjective`. Other objectives need only these two methods, and can
    build on `share_keys`, `share_dims` and `score_fit.fit_scores`.
    """

    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        """Return the best shared key head for ``group``; its ``decode [n, D, D]`` contains one map
        per query head.
        """

    def fit_value_head(self, group: GroupMoments) -> SharedHead:
        """Return the best shared value head for ``group``; its ``decode [m, D, D]`` contains one
        map per KV head of the group.
        """


def share_keys(keys: Tensor, queries: Tensor, pairs: int) -> SharedHead:
    """Return one shared key head for ``m`` heads: the query-weighted principal components of the
    keys with second moments ``keys [m, D, m, D]``.

    ``queries [m, D, D]``: the second moment of the queries that read each head, summed over its
    query heads. The first ``2 * pairs`` dims rotate: with ``s_j^2 = E|q_{j,l}|^2`` and ``u`` the
    top eigenvector of the covariance of ``s_j k_{j,l}`` over the heads, pair ``l`` becomes ``sum_j
    conj(u_j) s_j k_{j,l}``. The rest uses `share_dims`.
    """
    heads, dims = queries.shape[:2]
    rotated = 2 * pairs
    square = queries.diagonal(dim1=1, dim2=2)
    energy = (square[:, :pairs] + square[:, pairs:rotated]).mT  # E|q_l|^2, [pairs, m]
    floor = WEAKEST_QUERY * energy.amax(1, keepdim=True)
    weight = energy.clamp(min=floor).clamp(min=torch.finfo(energy.dtype).tiny).sqrt()
    # E[k_a conj(k_b)] of the complex pairs, [pairs, m, m].
    parts = keys[:, :rotated, :, :rotated].reshape(heads, 2, pairs, heads, 2, pairs)
    parts = torch.einsum("aipbjp->ijpab", parts)
    moment = torch.complex(parts[0, 0] + parts[1, 1], parts[1, 0] - parts[0, 1])
    _, vectors = decompose_symmetric(weight[:, :, None] * moment * weight[:, None, :])
    top = vectors[..., 0]
    # Eigenvectors have a free phase: make the largest entry real and positive for reproducible
    # results.
    largest = top.gather(1, top.abs().argmax(1, keepdim=True))
    top = top * (largest.conj() / largest.abs())
    identity = torch.eye(dims, dtype=keys.dtype, device=keys.device).repeat(heads, 1, 1)
    encode = multiply_pairs(identity, (top.conj() * weight).mT)
    decode = multiply_pairs(identity, (top / weight).mT)
    if rotated < dims:
        rest = slice(rotated, dims)
        shared = share_dims(keys[:, rest, :, rest], queries[:, rest, rest])
        encode[:, rest, rest], decode[:, rest, rest] = shared.encode, shared.decode
    return SharedHead(encode, decode)


def share_dims(moments: Tensor, metric: Tensor) -> SharedHead:
    """Return one shared head for values or unrotated key dims: the principal components of heads
    with second moments ``moments [m, D, m, D]``, weighted by ``metric [m, D, D]``.

    For unrotated key dims the metric is the second moment of the queries; for values it is
    `linalg.compute_output_metric`. Rotating the heads onto each other and averaging (Procrustes)
    is the special case of equal weights.
    """
    count, dims = metric.shape[:2]
    root, inverse = compute_metric_roots(metric)
    _, vectors = decompose_symmetric(apply_metric_root(moments, root))
    basis = vectors[:, :dims].reshape(count, dims, dims)  # head, its dim, shared dim
    return SharedHead(basis.mT @ root, inverse @ basis)


def apply_metric_root(moments: Tensor, root: Tensor) -> Tensor:
    """Return the second moments ``[m * D, m * D]`` of heads that are each multiplied by ``root [m,
    D, D]``, from their second ``moments [m, D, m, D]``.
    """
    half = (root @ moments.flatten(2)).flatten(0, 1)  # one side of the symmetric product
    return (root @ torch.unflatten(half.mT, 0, moments.shape[:2])).flatten(0, 1)


def merge_heads(encode: Tensor, projections: Tensor) -> Tensor:
    """Return the projections of the shared heads, ``[g, D, F]``: the ``projections [g * m, D, F]``
    of each group's heads, multiplied by ``encode [g, m, D, D]`` and summed.
    """
    joint = torch.unflatten(projections.flatten(0, 1), 0, (len(encode), -1))
    return encode.transpose(1, 2).flatten(2) @ joint
