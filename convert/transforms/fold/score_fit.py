"""The default objective of a fold: fits shared keys and queries to the scores of the heads.

The score of a query at position ``t`` and a key at ``s`` is ``q^T R(s - t) k``. Averaged over all
distances, different rotary pairs do not interact, and one complex principal component per pair is
the best shared key (`share_keys`). Real attention prefers short distances, at which slow pairs
hardly turn: there they act like unrotated dims, and one pair of the shared key can compensate for
the loss in another. So let queries and keys be arbitrary linear maps, ``q'_h = A_h q_h`` and ``k' =
sum_j B_j k_j``. With queries and keys independent and the distance ``delta`` drawn from ``p_h``
(`distances`), minimize

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

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import compute_rotary_moments, mix_distances
from kvfold.convert.transforms.fold.heads import (
    GroupMoments,
    Objective,
    SharedHead,
    share_dims,
    share_keys,
)
from kvfold.convert.transforms.linalg import average_rotations, solve_damped
from kvfold.convert.transforms.weights import Rotary

# Excess loss of the reference MHA model on held-out text in nats per token, 8 -> 2 heads
# (measured by a script in git history, 2026-11-22):

SCORE_ROUNDS = 10  # 0: 0.285, 3: 0.059, 10: 0.056, 30: 0.054

# 1e-9, 1e-6, 1e-3: 0.056 each; needed for heads that no query reads, whose systems are singular
SCORE_DAMPING = 1e-6


@dataclass(frozen=True)
class ScoreObjective(Objective):
    """The default objective of a fold: shared keys minimize the error of the attention scores,
    shared values that of the layer's output.
    """

    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        """Return the key head that the heads of ``group`` will share, with the least squared error
        of the attention scores. Its ``decode [n, D, D]`` has a map for each of ``n`` query heads.
        """
        return fit_scores(fit_principal_keys(group), group)

    def fit_value_head(self, group: GroupMoments) -> SharedHead:
        """Return the shared value head with the least squared error of the layer's output; ``decode
        [m, D, D]``.
        """
        return share_dims(group.values, group.metric)


SCORES = ScoreObjective()


def fit_principal_keys(group: GroupMoments) -> SharedHead:
    """Return the key head that the heads of ``group`` will share, in closed form (`share_keys`).
    Its ``decode [n, D, D]`` maps the shared key to what each of the ``n`` query heads reads.
    """
    queries_by_head = torch.unflatten(group.queries, 0, (len(group.keys), -1)).sum(1)
    return share_keys(group.keys, queries_by_head, group.pairs).repeat_decode(
        group.query_heads_per_kv_head
    )


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
