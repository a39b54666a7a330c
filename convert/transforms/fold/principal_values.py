"""The best shared value head of a group: principal components of all members' values in the metric of the output."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.heads import share_dims
from kvfold.convert.transforms.fold.shared_head import SharedHead
from kvfold.convert.transforms.weights import AttentionWeights


def output_metric(output: Tensor, kv_heads: int) -> Tensor:
    """``W_o [E, H, D]`` -> ``[G, D, D]``: how much a change of each KV head's values moves the layer's output."""
    columns = torch.unflatten(output.double(), 1, (kv_heads, -1))  # [E, G, H/G, D]
    return torch.einsum("egrc,egrd->gcd", columns, columns)


def share_values(values: Tensor, metric: Tensor) -> SharedHead:
    """One value head for ``m`` members from ``values [m, D, m, D] = E[v v^T]`` and ``metric [m, D, D]``.

    Rotating the members onto each other and averaging (Procrustes) is the special case of equal weights.
    """
    return share_dims(values, metric)


def fold_constants(source: AttentionWeights, folded: AttentionWeights, mean: Tensor) -> AttentionWeights:
    """Makes up for what folding does to the constant part of the values, where the layer has biases to take it.

    Attention rows sum to 1, so a constant passes through attention unchanged. An output bias takes the values' bias
    exactly. With a bias on the values only, that bias is chosen by least squares so that the layer's output at the mean
    input ``mean [E]`` is what it was. ``source`` and ``folded`` order their heads alike.
    """
    if source.v_bias is None:
        return folded
    if source.o_bias is not None and folded.v_bias is not None:
        moved = _constant_output(source, source.v_bias.double()) - _constant_output(folded, folded.v_bias)
        return replace(folded, o_bias=source.o_bias.double() + moved)
    wanted = _constant_output(source, source.v.double() @ mean + source.v_bias.double())
    wanted = wanted - _constant_output(folded, folded.v @ mean)
    columns = torch.unflatten(folded.o, 1, (folded.kv_heads, -1)).sum(2).flatten(1)  # [E, g * D]
    return replace(folded, v_bias=(torch.linalg.pinv(columns, rtol=1e-9) @ wanted).reshape(folded.kv_heads, -1))


def _constant_output(weights: AttentionWeights, values: Tensor) -> Tensor:
    """The output ``[E]`` of constant values ``[G, D]``, without the output bias."""
    spread = values.repeat_interleave(weights.heads // weights.kv_heads, 0)
    return torch.einsum("ehd,hd->e", weights.o.double(), spread)
