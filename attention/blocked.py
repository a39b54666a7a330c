"""Attention computed in blocks of queries, with gradients, for every kind of mask.

Shapes: ``query [B, G, M, T, D]`` (``M`` query heads share a key head), ``key [B, G, S, D]``,
``value [B, G, S, Dv]``, ``bias [1|B, 1|H, T, S]`` with ``H = G M``, ``sinks [H]``, result ``[B, G,
M, T, Dv]``:

    score  = scale * query . key + bias          softcap * tanh(score / softcap) before the bias
    weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink))
    result = sum of weight * value

A block combines some queries of some heads with all the keys that any of them sees, so the softmax
of each row is complete within one block and nothing has to be merged; memory is linear in ``S``.
For the backward pass, the weights are saved if there are few of them, and otherwise recomputed
block by block. Queries that see no key get zeros.

``AttentionScores`` is the part without values, also used for attention sums (``drift/profile.py``)
and for decoding over a latent cache (``latent.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvfold.attention.mask import Visibility

# Scores computed at once. On a CPU 2^20 take 4 MB in float32: smaller budgets are slower, 2^22 is
# up to a quarter faster for four times the memory. On a GPU 2^26 take 256 MB.
_CPU_SCORES = 1 << 20
_GPU_SCORES = 1 << 26
# Weights that a call saves for its backward pass: 64 MB in bfloat16. Recomputing them made training
# steps of 8 x 256 and 8 x 512 tokens up to a quarter slower; the limit is chosen, not measured.
_SAVED_WEIGHTS = 1 << 25
# Queries of a block: enough rows for fast matrix products, and few enough that causal blocks skip
# most later keys. Steps of 8 x 512 tokens, ms for 32, 64, 128, 256: MLA 242, 175, 168, 162, MQA 74,
# 78, 76, 94; 8 x 256: 73, 52, 49, 57 and 29, 23, 28, 36
# (one CPU core).
_FEWEST_ROWS = 32
_MOST_ROWS = 128
# Keys multiplied in bfloat16 on a CPU come in steps of at least this many; chosen, not measured.
_FEWEST_IN_STEP = 64


class ScoreBlock(NamedTuple):
    """A tile of the score matrix: a range of queries, the range of keys that they see, and ranges
    of sequences and key heads.
    """

    batch: slice
    groups: slice
    queries: slice
    keys: slice
    shape: tuple[int, ...]  # of the block's scores, [b, g, M, rows, width]

    def select_queries(self, tensor: Tensor) -> Tensor:
        """Select the block's queries from ``[B, G, M, T, D]``, as ``[b * g, M * rows, D]``."""
        part = tensor[self.batch, self.groups, :, self.queries]
        return widen_float16(part.flatten(2, 3).flatten(0, 1))

    def select_keys(self, tensor: Tensor) -> Tensor:
        """Select the block's keys or values from ``[B, G, S, D]``, as ``[b * g, width, D]``."""
        return widen_float16(tensor[self.batch, self.groups, self.keys].flatten(0, 1))

    def select_bias(self, bias: Tensor) -> Tensor:
        """Select the block's biases from ``bias [1|B, 1|H, T, S]``, as ``[1|b, 1|g, 1|M, rows,
        width]``.
        """
        members = 1 if bias.shape[1] == 1 else self.shape[2]
        bias = torch.unflatten(bias, 1, (-1, members))
        batch = self.batch if bias.shape[0] > 1 else slice(None)
        groups = self.groups if bias.shape[1] > 1 else slice(None)
        return bias[batch, groups, :, self.queries, self.keys]


@dataclass(frozen=True)
class AttentionScores:
    """The arguments of one attention call without its values; computes scores and softmax weights
    block by block.

    ``queries`` and ``keys`` contain parts whose products are added: one part, or two for a latent
    cache (latent and rotary key). ``bias`` is added to the scores; a boolean ``bias`` is a mask
    instead (True means visible), combined with ``rule``.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    scale: float
    rule: Visibility
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def split_into_blocks(self, buffers: int = 1) -> Iterator[ScoreBlock]:
        """Yield blocks that cover all pairs of a query and a key that it sees. Each has as many
        scores as fit the memory budget, at least those of one key head.

        ``buffers`` is the number of tensors as large as a block's scores that the caller needs at
        once.
        """
        batch, groups, members, queries, _ = self.queries[0].shape
        keys = self.keys[0].shape[2]
        # on a CPU scores should stay in its caches, a GPU needs enough of them to be busy
        budget = (_CPU_SCORES if self.queries[0].is_cpu else _GPU_SCORES) // buffers
        step = max(_FEWEST_ROWS, min(_MOST_ROWS, budget // max(1, members * keys)))
        # ranges of keys are widened to few widths; the mask hides the keys too many
        grain = _choose_key_step(self.keys[0])
        for first in range(0, queries, step):
            last = min(first + step, queries)
            low, high = self.rule.find_key_range(first, last, keys)
            if low == high:
                continue
            low = low // grain * grain
            high = min(keys, -(-high // grain) * grain)
            # all key heads of several sequences, or some key heads of one sequence
            pairs = max(1, budget // (members * (last - first) * (high - low)))
            sequences = max(1, min(batch, pairs // groups))
            heads = min(groups, pairs)
            for row, group in product(range(0, batch, sequences), range(0, groups, heads)):
                row_end = min(row + sequences, batch)
                group_end = min(group + heads, groups)
                yield ScoreBlock(
                    slice(row, row_end),
                    slice(group, group_end),
                    slice(first, last),
                    slice(low, high),
                    (row_end - row, group_end - group, members, last - first, high - low),
                )

    def compute_scores(self, block: ScoreBlock) -> Tensor:
        """Return ``scale * query . key`` for all pairs in a block, ``[b * g, M * rows, width]``."""
        first, *others = (
            multiply_keys(self.scale * block.select_queries(query), block.select_keys(key))
            for query, key in zip(self.queries, self.keys, strict=True)
        )
        for scores in others:
            first += scores
        return first

    def compute_weights(self, block: ScoreBlock) -> Tensor:
        """Return the attention weights (softmax of masked scores) of a block, ``[b * g, M * rows,
        width]``. The row of a query that sees no key is zero.
        """
        scores = self.compute_scores(block)
        maps = scores.view(block.shape)
        if self.softcap is not None:
            maps.div_(self.softcap).tanh_().mul_(self.softcap)
        seen = None if self.bias is None else block.select_bias(self.bias)
        if seen is not None and seen.dtype != torch.bool:
            maps += seen
            seen = None
        may_see_nothing = seen is not None or self.rule.padded
        low = block.keys.start
        if self.rule.causal or self.rule.padded:
            if self.rule.window is None and not may_see_nothing:
                # every query of the block sees all that comes before; the first one's own key,
                # which all see too, keeps the width even: 127 columns take four times as long as
                # 128 in bfloat16
                low = max(low, self.rule.offset + block.queries.start)
            ruled = self.rule.make_mask(block.queries, slice(low, block.keys.stop), maps.device)
            ruled = (ruled[block.batch] if ruled.shape[0] > 1 else ruled)[:, None, None]
            seen = ruled if seen is None else seen & ruled
        if seen is not None:
            # log(0) = -inf is added, because filling through a mask takes three times as long in
            # bfloat16
            maps[..., low - block.keys.start :] += seen.to(maps.dtype).log_()
        if self.sinks is None:
            torch.softmax(scores, -1, out=scores)
        else:
            sinks = self.sinks.to(maps.dtype).view(1, -1, maps.shape[2], 1, 1)[:, block.groups]
            column = sinks.expand(*maps.shape[:-1], 1)
            maps.copy_(torch.cat([maps, column], -1).softmax(-1)[..., :-1])
        if seen is not None and may_see_nothing:
            blind = ~seen.any(-1, keepdim=True)
            # mostly there are none, and filling costs as much as a softmax; on a GPU, asking would
            # wait for it
            if not blind.is_cpu or blind.any():
                maps.masked_fill_(blind, 0.0)
        return scores


def blocked_attention(scores: AttentionScores, value: Tensor) -> Tensor:
    """Return attention output ``[B, G, M, T, Dv]``: ``value [B, G, S, Dv]`` weighted by the softmax
    of ``scores``. Supports gradients.
    """
    if torch.compiler.is_compiling():
        # a graph of all blocks would take minutes to compile
        compute: Any = torch.compiler.disable(blocked_attention)  # type: ignore[no-untyped-call]
        traced: Tensor = compute(scores, value)
        return traced
    device = value.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # the products below choose their dtypes themselves
        with torch.autocast(device, enabled=False):
            return blocked_attention(scores, value)
    tensors = (value, *scores.queries, *scores.keys, scores.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        apply: Any = _BlockedAttention.apply
        result: Tensor = apply(scores, *tensors)
        return result
    # a call of the function above takes as long as a short decoding step
    return weigh_values(scores, value)


def weigh_values(
    scores: AttentionScores, value: Tensor, saved: list[Tensor] | None = None
) -> Tensor:
    """Return attention output ``[B, G, M, T, Dv]``: ``value [B, G, S, Dv]`` weighted by the softmax
    of ``scores``. Does not record gradients.

    The weights of all blocks are appended to ``saved``.
    """
    query = scores.queries[0]
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for block in scores.split_into_blocks():
        weights = scores.compute_weights(block)
        _write_block_rows(result, block, multiply_values(weights, block.select_keys(value)))
        if saved is not None:
            saved.append(weights)
        del weights  # before the next block's take as much
    return result


def _write_block_rows(result: Tensor, block: ScoreBlock, rows: Tensor) -> None:
    """Copy a block's results, ``rows [b * g, M * rows, D]``, into their part of ``result [B, G, M,
    T, D]``.
    """
    part = result[block.batch, block.groups, :, block.queries]
    part.copy_(rows.view(part.shape))


class _BlockedAttention(torch.autograd.Function):
    """The autograd function of `blocked_attention`; its backward pass saves few weights and
    recomputes many.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: AttentionScores,
        value: Tensor,
        query: Tensor,
        key: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return attention output ``[B, G, M, T, Dv]``; save the weights for the backward pass if
        there are few.
        """
        few = query[..., 0].numel() * key.shape[2] <= _SAVED_WEIGHTS
        saved: list[Tensor] = []
        result = weigh_values(scores, value, saved if few else None)
        ctx.save_for_backward(value, query, key, sinks, scores.bias, *saved)
        ctx.scores = replace(scores, queries=(), keys=(), bias=None, sinks=None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values, queries, keys and sinks, each accumulated over all blocks
        in float32 or wider.
        """
        value, query, key, sinks, bias, *saved = ctx.saved_tensors
        scores = replace(ctx.scores, queries=(query,), keys=(key,), bias=bias, sinks=sinks)
        wide = torch.promote_types(grad.dtype, torch.float32)
        query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
        key_grad = grad.new_zeros(key.shape, dtype=wide)
        value_grad = grad.new_zeros(value.shape, dtype=wide)
        sinks_grad = grad.new_zeros(query.shape[1:3], dtype=wide)
        with torch.autocast(grad.device.type, enabled=False):
            for index, block in enumerate(scores.split_into_blocks()):
                weights = saved[index] if saved else scores.compute_weights(block)
                grad_rows = block.select_queries(grad)
                block.select_keys(value_grad).add_(weights.mT @ grad_rows)
                change = multiply_keys(grad_rows, block.select_keys(value))
                if sinks is not None:
                    # a sink takes its share of each row and has no value
                    mean = (change * weights).sum(-1, keepdim=True, dtype=wide)
                    share = 1 - weights.sum(-1, keepdim=True, dtype=wide)
                    lost = (share * mean).view(*block.shape[:-1], 1)
                    sinks_grad[block.groups] -= lost.sum((0, 3, 4))
                # weight * (change - sum of weight * change), which holds too where a sink keeps
                # weights from summing to 1
                change = torch._softmax_backward_data(change, weights, -1, change.dtype)
                if scores.softcap is not None:
                    # derivative of softcap * tanh(x / softcap): 1 - tanh^2
                    capped = scores.compute_scores(block).div_(scores.softcap).tanh_()
                    change.addcmul_(change, capped.square_(), value=-1)
                change *= scores.scale
                _write_block_rows(
                    query_grad, block, multiply_values(change, block.select_keys(key))
                )
                block.select_keys(key_grad).add_(change.mT @ block.select_queries(query))
        return (
            None,
            value_grad.to(value.dtype),
            query_grad,
            key_grad.to(key.dtype),
            None if sinks is None else sinks_grad.flatten().to(sinks.dtype),
        )


# The matrix products of a block. For bfloat16 on a CPU, oneDNN compiles a program for every new
# shape (a millisecond and a megabyte each), and the number of keys changes at every decoding step:
# a multiple of ``_choose_key_step`` keys is multiplied in bfloat16 and the remainder in float32.
# Shapes: ``n`` matrices with ``r`` rows, ``w`` keys and ``d`` dims.


def _choose_key_step(keys: Tensor) -> int:
    """Return a number of which the count of keys in a matrix product must be a multiple, because
    bfloat16 products of a new shape are slow on a CPU: 1 for other dtypes and devices. Keys are
    ``[..., w, d]``.
    """
    if keys.dtype != torch.bfloat16 or not keys.is_cpu:
        return 1
    # at most 32 shapes for a context of any length
    return max(_FEWEST_IN_STEP, 1 << max(0, (keys.shape[-2] // 16).bit_length() - 1))


def widen_float16(tensor: Tensor) -> Tensor:
    """Return a float16 tensor on a CPU as float32, in which products are ten times faster there;
    other tensors unchanged.
    """
    return tensor.float() if tensor.dtype == torch.float16 and tensor.is_cpu else tensor


def multiply_keys(rows: Tensor, keys: Tensor) -> Tensor:
    """Return ``rows keys^T``, ``[n, r, w]``, for queries ``rows [n, r, d]`` and ``keys
    [n, w, d]``.
    """
    remainder = keys.shape[1] % _choose_key_step(keys)
    if not remainder:
        return torch.bmm(rows, keys.mT)
    even = torch.bmm(rows, keys[:, :-remainder].mT)
    rest = torch.bmm(rows.float(), keys[:, -remainder:].float().mT)
    return torch.cat([even, rest.to(even.dtype)], -1)


def multiply_values(weights: Tensor, values: Tensor) -> Tensor:
    """Return the matrix products ``[n, r, d]`` of ``weights [n, r, w]`` and ``values [n, w, d]``,
    as `torch.bmm`, but in steps of one width: on a CPU, oneDNN compiles a program for every new
    shape in bfloat16.
    """
    remainder = values.shape[1] % _choose_key_step(values)
    if not remainder:
        return torch.bmm(weights, values)
    rest = torch.bmm(weights[..., -remainder:].float(), values[:, -remainder:].float())
    # the larger part last: it is rounded to bfloat16 once
    return rest.add_(torch.bmm(weights[..., :-remainder].contiguous(), values[:, :-remainder]))
