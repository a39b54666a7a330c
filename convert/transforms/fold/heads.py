"""The best shared key head and value head of a group, as small matrices.

Rotary embedding multiplies pair ``l`` at position ``t`` by ``e^{i t theta_l}``, which commutes with multiplication by
any complex number and with nothing that mixes two pairs. Each member's key pair is therefore approximated by a complex
multiple of one shared pair, weighted by how strongly the queries that read it look at that pair. Unrotated dims and
values are free to mix: the members share the top real components of all their dims together, keys in the metric of the
queries, values in the metric ``W_o^T W_o`` of the output.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvfold.convert.transforms.linalg import metric_root, pair_matrices, pair_moment, symmetric_eig
from kvfold.convert.transforms.weights import AttentionWeights

WEAKEST_QUERY = 1e-6
"""Query weights are not taken below this share of the group's largest: dividing by them must stay harmless.

No query of a trained model came near it: 1e-9, 1e-6 and 1e-3 give the same loss to 1e-4 nats at 8 -> 2 heads
(recipes/benchmarks/bench_constants.py).
"""


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

    @property
    def member_queries(self) -> Tensor:
        """``[m, D, D]``: second moments of the queries that read each member, summed over its query heads."""
        return torch.unflatten(self.queries, 0, (len(self.keys), -1)).sum(1)


class Objective(Protocol):
    """The error that the shared heads of a group minimize: one key head and one value head, fitted apart.

    The default is `score_fit.Scores`. Another one needs no more than these two methods; `share_keys`, `share_dims` and
    `score_fit.fit_scores` are there to build on.
    """

    def key_head(self, group: GroupMoments) -> SharedHead:
        """The shared key head; ``decode [n, D, D]`` holds one map per query head."""

    def value_head(self, group: GroupMoments) -> SharedHead:
        """The shared value head; ``decode [m, D, D]`` holds one map per member."""


def share_keys(keys: Tensor, queries: Tensor, pairs: int) -> SharedHead:
    """One key head for ``m`` members from ``keys [m, D, m, D] = E[k k^T]`` and ``queries [m, D, D]``.

    ``queries[j]`` is the second moment of the queries that read member ``j``, summed over its query heads. The first
    ``2 * pairs`` dims rotate.
    """
    members, dims = queries.shape[:2]
    rotated = 2 * pairs
    encode = keys.new_zeros(members, dims, dims)
    decode = torch.zeros_like(encode)
    if pairs:
        square = queries.diagonal(dim1=1, dim2=2)
        energy = square[:, :pairs] + square[:, pairs:rotated]  # E|q_l|^2
        into, back = _share_pairs(pair_moment(keys, pairs), energy.mT)
        encode += pair_matrices(into.mT, dims)
        decode += pair_matrices(back.mT, dims)
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


def _share_pairs(moment: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Hermitian ``moment [pairs, m, m]``, query ``energy [pairs, m]`` -> complex encode, decode ``[pairs, m]``."""
    floor = WEAKEST_QUERY * energy.amax(1, keepdim=True)
    weight = energy.clamp(min=floor).clamp(min=torch.finfo(energy.dtype).tiny).sqrt()
    _, vectors = symmetric_eig(weight[:, :, None] * moment * weight[:, None, :])
    top = _fix_phase(vectors[..., 0])
    return top.conj() * weight, top / weight


def _fix_phase(vectors: Tensor) -> Tensor:
    """Eigenvectors have a free phase: turn each so that its largest entry is real and positive."""
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return vectors * (largest.conj() / largest.abs())


def balance(head: SharedHead, members: Tensor, blocks: list[Tensor]) -> SharedHead:
    """Rescales so that in every block of dims the shared rows have the mean norm of their members' rows.

    ``members [m, D, F]``; ``blocks`` are index tensors into ``D`` within which one factor may act (a rotary pair, the
    unrotated dims, a whole value head). Absent blocks (zero rows) are left alone.
    """
    merged = head.merge(members)
    factor = torch.ones(merged.shape[0], dtype=torch.float64, device=merged.device)
    for block in blocks:
        before = members[:, block].flatten(1).norm(dim=1).mean()
        after = merged[block].norm()
        if before > 0 and after > 0:
            factor[block] = before / after
    return head.rescale(factor)


def fold_constants(source: AttentionWeights, folded: AttentionWeights, mean: Tensor) -> AttentionWeights:
    """Makes up for what folding does to the constant part of the values, where the layer has biases to take it.

    Attention rows sum to 1, so a constant passes through attention unchanged. An output bias takes the values' bias
    exactly. With a bias on the values only, that bias is chosen by least squares so that the layer's output at the mean
    input ``mean [E]`` is what it was. ``source`` and ``folded`` order their heads alike. Beside sinks rows of attention
    sum to less than 1, and biases stay what the values' fit made them.
    """
    if source.v_bias is None or source.sinks is not None:
        return folded
    if source.o_bias is not None and folded.v_bias is not None:
        moved = _constant_output(source, source.v_bias.double()) - _constant_output(folded, folded.v_bias)
        return replace(folded, o_bias=source.o_bias.double() + moved)
    target = _constant_output(source, source.v.double() @ mean + source.v_bias.double())
    missing = target - _constant_output(folded, folded.v @ mean)
    columns = torch.unflatten(folded.o, 1, (folded.kv_heads, -1)).sum(2).flatten(1)  # [E, g * D]
    return replace(folded, v_bias=(torch.linalg.pinv(columns, rtol=1e-9) @ missing).reshape(folded.kv_heads, -1))


def _constant_output(weights: AttentionWeights, values: Tensor) -> Tensor:
    """The output ``[E]`` of constant values ``[G, D]``, without the output bias."""
    spread = values.repeat_interleave(weights.heads // weights.kv_heads, 0)
    return torch.einsum("ehd,hd->e", weights.o.double(), spread)
