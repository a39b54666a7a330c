"""The shared key and value heads of a group: their maps, the error that they minimize, their
principal components, and the least squares that fit shared keys to the scores.

Rotary embedding multiplies pair ``l`` at position ``t`` by ``e^{i t theta_l}``, which commutes with
multiplication by any complex number, but not with maps that mix two pairs. `share_keys` therefore
approximates the key pair of each head in the group by a complex multiple of one shared pair,
weighted by the energy of the queries that read it. Unrotated dims and values may mix: `share_dims`
uses the top real components of all heads' dims together, for keys in the metric of the queries, for
values in the metric ``W_o^T W_o`` of the output.

The score of a query at position ``t`` and a key at ``s`` is ``q^T R(s - t) k``. Averaged over all
distances, different rotary pairs do not interact, and `share_keys` gives the best shared key. Real
attention prefers short distances, at which slow pairs hardly turn: there they act like unrotated
dims, and one pair of the shared key can compensate for the loss in another. So let queries and keys
be arbitrary linear maps, ``q'_h = A_h q_h`` and ``k' = sum_j B_j k_j``. With queries and keys
independent and the distance ``delta`` drawn from ``p_h`` (`distances`), minimize (`fit_scores`)

    sum_h  E | (A_h q_h)^T R(delta) (sum_j B_j k_j)  -  q_h^T R(delta) k_h |^2.

With second moments ``Q_h = E[q_h q_h^T]`` and ``K_ij = E[k_i k_j^T]`` and the average over
distances ``<M>_h = E[R(delta) M R(delta)^T]``, either side with the other fixed is a least-squares
problem of size ``D``:

    <sum_ij B_i K_ij B_j^T>_h A_h   = <sum_j B_j K_jh>_h                  (one per query head)
    sum_h <A_h Q_h A_h^T>_-h B_j    = sum over the query heads h of head j of <A_h Q_h>_-h

where ``<M>_-h`` turns the opposite way. In the unitary basis ``U`` of complex pairs and conjugates
rotation is diagonal, so ``<M>_h = U^H ((U M U^H) * phi_h) U`` with ``phi_h`` from
`average_dim_rotations` (`linalg.average_rotations`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import compute_rotary_moments, mix_distances
from kvfold.convert.transforms.linalg import (
    average_rotations,
    compute_metric_roots,
    decompose_symmetric,
    multiply_pairs,
    solve_damped,
)
from kvfold.convert.transforms.weights import Rotary

# The minimum query weight as a share of the group's largest: keys are divided by query weights.
# 1e-9, 1e-6 and 1e-3 have the same loss to 1e-4 nats on the reference MHA model at 8 -> 2 heads
# (measured by a script in git history, 2026-11-22).
WEAKEST_QUERY = 1e-6

# Excess loss of the reference MHA model on held-out text in nats per token, 8 -> 2 heads
# (measured by a script in git history, 2026-11-22):

SCORE_ROUNDS = 10  # 0: 0.285, 3: 0.059, 10: 0.056, 30: 0.054

# 1e-9, 1e-6, 1e-3: 0.056 each; needed for heads that no query reads, whose systems are singular
SCORE_DAMPING = 1e-6


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


@dataclass(frozen=True)
class GroupMoments:
    """Second moments of the queries, keys and values of a group of ``m`` KV heads and the ``n``
    query heads that read them.

    ``keys, values [m, D, m, D]``: ``E[k k^T]``, ``E[v v^T]`` between all dims of all heads.
    ``queries [n, D, D]``: ``E[q q^T]``; queries ``j * n/m`` to ``(j + 1) * n/m - 1`` read head
    ``j``. Keys and queries are measured before rotation and include the rotary amplitude; their
    first ``2 * pairs`` dims rotate. ``phi [n, D, D]``: the average rotation over the mixture of
    distances (`average_dim_rotations`). ``metric [m, D, D]``: the squared length of
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

    The default is `ScoreObjective`. Other objectives need only these two methods, and can
    build on `share_keys`, `share_dims` and `fit_scores`.
    """

    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        """Return the best shared key head for ``group``; its ``decode [n, D, D]`` contains one map
        per query head.
        """

    def fit_value_head(self, group: GroupMoments) -> SharedHead:
        """Return the best shared value head for ``group``; its ``decode [m, D, D]`` contains one
        map per KV head of the group.
        """


@dataclass(frozen=True)
class ScoreObjective(Objective):
    """The default objective of a fold: shared keys minimize the error of the attention scores,
    shared values that of the layer's output.
    """

    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        """Return the key head that the heads of ``group`` will share, with the least squared error
        of the attention scores. Its ``decode [n, D, D]`` has a map for each of ``n`` query heads.
        """
        return fit_scores(share_keys(group), group)

    def fit_value_head(self, group: GroupMoments) -> SharedHead:
        """Return the shared value head with the least squared error of the layer's output; ``decode
        [m, D, D]``.
        """
        return share_dims(group.values, group.metric)


SCORES = ScoreObjective()


def share_keys(group: GroupMoments) -> SharedHead:
    """Return the key head that the ``m`` heads of ``group`` will share, in closed form: the
    query-weighted principal components of their keys. Its ``decode [n, D, D]`` maps the shared key
    to what each of the ``n`` query heads reads.

    Dims of rotary pairs: with ``s_j^2 = E|q_{j,l}|^2``, summed over the queries that read head
    ``j``, and ``u`` the top eigenvector of the covariance of ``s_j k_{j,l}`` over the heads, pair
    ``l`` becomes ``sum_j conj(u_j) s_j k_{j,l}``. The rest uses `share_dims`.
    """
    keys = group.keys
    pairs = group.pairs
    queries = torch.unflatten(group.queries, 0, (len(keys), -1)).sum(1)  # [m, D, D]
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
    return SharedHead(encode, decode.repeat_interleave(group.query_heads_per_kv_head, 0))


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


def fit_scores(start: SharedHead, group: GroupMoments, rounds: int = SCORE_ROUNDS) -> SharedHead:
    """Return the shared key head ``start`` improved by ``rounds`` of alternating least squares on
    the attention scores.

    Without rotation ``start`` is already optimal and is returned. If it is exact, it stays exact,
    up to rounding.
    """
    if not group.pairs:
        return start
    phi = group.phi.conj()
    # B_j and A_h
    encode = start.encode
    query_maps = start.decode.mT
    for _ in range(rounds):
        gram, cross = _average_shared_keys(encode, group)
        query_maps = query_maps + solve_damped(gram, cross - gram @ query_maps, SCORE_DAMPING)
        # The mirrored problem: the conjugate of phi turns the other way.
        weighted = query_maps @ group.queries  # A_h Q_h
        gram = average_rotations(weighted @ query_maps.mT, phi, group.pairs).sum(0)
        cross = torch.unflatten(
            average_rotations(weighted, phi, group.pairs), 0, (len(encode), -1)
        ).sum(1)
        encode = encode + solve_damped(gram, cross - gram @ encode, SCORE_DAMPING)
    return SharedHead(encode, query_maps.mT)


def _average_shared_keys(encode: Tensor, group: GroupMoments) -> tuple[Tensor, Tensor]:
    """Return the second moments of the shared keys, ``<E[k' k'^T]>_h``, and theirs with the
    heads' keys, ``<E[k' k_j^T]>_h``, averaged over distances: both ``[n, D, D]``.
    """
    joint = encode.transpose(0, 1).flatten(1)  # [D, m D]
    product = joint @ group.keys.flatten(2).flatten(0, 1)
    gram = average_rotations(product @ joint.mT, group.phi, group.pairs)
    shared = torch.unflatten(product, 1, (len(encode), -1)).transpose(0, 1)
    return gram, average_rotations(
        shared.repeat_interleave(group.query_heads_per_kv_head, 0), group.phi, group.pairs
    )


def compute_score_errors_and_energies(
    head: SharedHead, group: GroupMoments
) -> tuple[Tensor, Tensor]:
    """Return the squared score error of the shared key ``head`` for each query head, ``[n]``, and
    the error if all scores were zero, ``[n]``.
    """
    gram, cross = _average_shared_keys(head.encode, group)
    own = (
        group.keys.diagonal(dim1=0, dim2=2)
        .permute(2, 0, 1)
        .repeat_interleave(group.query_heads_per_kv_head, 0)
    )
    total = (group.queries * average_rotations(own, group.phi, group.pairs)).sum((1, 2))
    weighted = head.decode.mT @ group.queries
    return (
        total - 2 * (weighted * cross).sum((1, 2)) + ((weighted @ head.decode) * gram).sum((1, 2)),
        total,
    )


def average_dim_rotations(profile: Tensor, context: int, rotary: Rotary, dims: int) -> Tensor:
    """Return the average rotations ``E e^{-i (w_a - w_b) delta}`` of a head's dims with angular
    speeds ``w``, ``[H, D, D]``, over distances ``delta`` drawn from the attention ``profile [H,
    S]`` mixed with distances up to ``context``.
    """
    theta = rotary.theta.double()
    speed = torch.cat((theta, -theta, theta.new_zeros(dims - rotary.dims)))
    return compute_rotary_moments(mix_distances(profile, context), speed)
