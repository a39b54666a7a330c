"""The best shared key head of a group: per rotary pair a complex principal component, for unrotated dims real ones.

Rotary embedding multiplies pair ``l`` at position ``t`` by ``e^{i t theta_l}``, which commutes with multiplication by
any complex number and with nothing that mixes two pairs. Each member's key pair is therefore approximated by a complex
multiple of one shared pair, weighted by how strongly the queries that read it look at that pair; unrotated dims are
free to mix, so they share the top components of all members' dims together.
"""

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.shared_head import SharedHead
from kvfold.convert.transforms.linalg import metric_root, pair_matrices, pair_moment, symmetric_eig

WEAKEST_QUERY = 1e-6
"""Query weights are not taken below this share of the group's largest: dividing by them must stay harmless."""


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


def share_dims(keys: Tensor, queries: Tensor) -> SharedHead:
    """As `share_keys` for dims that do not rotate: real principal components in the metric of the queries.

    The same mathematics folds values, with the metric ``W_o^T W_o`` in the place of the queries.
    """
    members, dims = queries.shape[:2]
    root, inverse = metric_root(queries)
    stacked = torch.einsum("jab,jbkc,kdc->jakd", root, keys, root).reshape(members * dims, members * dims)
    _, vectors = symmetric_eig(stacked)
    basis = vectors[:, :dims].reshape(members, dims, dims)  # member, its dim, shared dim
    return SharedHead(basis.mT @ root, inverse @ basis)


def _share_pairs(moment: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Hermitian ``moment [pairs, m, m]``, query ``energy [pairs, m]`` -> complex encode, decode ``[pairs, m]``."""
    floor = WEAKEST_QUERY * energy.amax(1, keepdim=True)
    weight = energy.clamp(min=floor).clamp(min=torch.finfo(energy.dtype).tiny).sqrt()
    _, vectors = symmetric_eig(weight[:, :, None] * moment * weight[:, None, :])
    top = _anchor(vectors[..., 0])
    return top.conj() * weight, top / weight


def _anchor(vectors: Tensor) -> Tensor:
    """Eigenvectors have a free phase: turn each so that its largest entry is real and positive."""
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return vectors * (largest.conj() / largest.abs())
