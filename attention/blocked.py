"""Attention computed in blocks of queries, with gradients, for every kind of mask.

Shapes: ``query [B, G, M, T, D]`` (``M`` query heads share a key head), ``key [B, G, S, D]``,
``value [B, G, S, Dv]``, ``bias [1|B, 1|H, T, S]`` with ``H = G M``, ``sinks [H]``, result ``[B, G,
M, T, Dv]``:

    score  = softcap * tanh(scale * query . key / softcap) + bias      without a softcap: scale *
    query . key + bias weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink))
    result = sum of weight * value

A block combines some queries of some heads with all the keys that any of them sees, so the softmax
of each row is complete within one block and nothing has to be merged; memory is linear in ``S``.
For the backward pass, the weights are kept if there are few of them, and otherwise recomputed block
by block. Queries that see no key get zeros.

``blocked_attention`` wraps this in a pair of registered operators, so that a traced graph contains
one node for any number of blocks. ``AttentionScores`` is the part without values, also used for
attention sums and the divergence between two attentions (``drift/profile.py``) and for decoding
over a latent cache (``latent.py``).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.mask import Visibility
from kvfold.attention.products import (
    FEWEST_IN_STEP,
    add_spread,
    fast,
    is_slow,
    mix,
    row_products,
    shape_step,
)

# Scores kept at once. On a CPU 2^20 take 4 MB in float32: smaller budgets are slower, 2^22 is up to
# a quarter faster for four times the memory (recipes/benchmarks/bench_attention.py --budgets). On a
# GPU 2^26 take 256 MB.
_CPU_SCORES = 1 << 20
_GPU_SCORES = 1 << 26
# Weights that a call keeps for its backward pass, 32 MB in bfloat16. Recomputing them made training
# steps of 8 x 256 and 8 x 512 tokens up to a quarter slower (bench_refine_constants.py
# --attention); the limit is chosen, not measured.
_KEPT_WEIGHTS = 1 << 24
# Queries of a block: enough rows for fast matrix products, and few enough that causal blocks skip
# most later keys. Steps of 8 x 512 tokens, ms for 32, 64, 128, 256: MLA 242, 175, 168, 162, MQA 74,
# 78, 76, 94; 8 x 256: 73, 52, 49, 57 and 29, 23, 28, 36
# (bench_refine_constants.py --attention, one CPU core).
_FEWEST_ROWS = 32
_MOST_ROWS = 128


@dataclass(frozen=True)
class QueryBlock:
    """Queries ``first .. last - 1`` and keys ``low .. high - 1`` for some of the sequences and key
    heads.
    """

    batch: slice
    groups: slice
    first: int
    last: int
    low: int
    high: int
    # all queries of all heads against all keys, as in short decoding steps: nothing is sliced
    whole: bool = False

    def rows(self, tensor: Tensor) -> Tensor:
        """The block's part of queries ``[B, G, M, T, D]``, as ``[n, M * rows, D]``."""
        part = tensor if self.whole else tensor[self.batch, self.groups, :, self.first : self.last]
        batch, groups, members, rows, width = part.shape
        return fast(part.reshape(batch * groups, members * rows, width))

    def keys(self, tensor: Tensor) -> Tensor:
        """The block's part of keys ``[B, G, S, D]``, as ``[n, width, D]``; a view if one stride
        covers all heads.
        """
        part = tensor if self.whole else tensor[self.batch, self.groups, self.low : self.high]
        return fast(part.flatten(0, 1))


@dataclass(frozen=True)
class AttentionScores:
    """Scores of one call and their softmax, computed block by block; names and shapes as at the top
    of this file.

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

    def blocks(self, *others: Tensor, buffers: int = 1) -> Iterator[QueryBlock]:
        """Yield the blocks that see at least one key, each with as many scores as fit the budget,
        or one key head's.

        ``others`` are further tensors ``[B, G, S, ...]`` of which the caller reads each block's
        part; they count toward the budget. ``buffers`` is the number of tensors as large as a
        block's scores that the caller keeps at once.
        """
        batch, groups, members, queries, _ = self.queries[0].shape
        keys = self.keys[0].shape[2]
        window = self.rule.window
        # on a CPU scores should stay in its caches, a GPU needs enough of them to be busy
        budget = (_CPU_SCORES if self.queries[0].is_cpu else _GPU_SCORES) // buffers
        # a window bounds what a block sees, so that more queries fit into the budget
        width = keys if window is None else min(keys, 2 * window + _FEWEST_ROWS)
        step = max(_FEWEST_ROWS, min(_MOST_ROWS, budget // max(1, members * width)))
        # float32 copies of keys count like scores
        widened = sum(key.shape[-1] for key in self.keys) if is_slow(self.keys[0]) else 0
        one_stride = groups == 1 or all(
            x.stride(0) == groups * x.stride(1) for x in (*self.keys, *others)
        )
        # where every width costs a compilation ranges are widened to few widths; the mask hides the
        # keys too many
        grain = shape_step(self.keys[0], keys)
        for first in range(0, queries, step):
            last = min(first + step, queries)
            low, high = self.rule.key_range(first, last, keys)
            if self.bias is not None and self.bias.dtype == torch.bool and self.bias.is_cpu:
                # masks from models are mostly causal: what a whole block hides is never multiplied
                columns = self.bias[..., first:last, low:high].any((0, 1, 2)).nonzero()
                low, high = (
                    (low + int(columns[0]), low + int(columns[-1]) + 1)
                    if len(columns)
                    else (low, low)
                )
            if low == high:
                continue
            low = low // grain * grain
            high = min(keys, -(-high // grain) * grain)
            pairs = max(1, budget // (max(members * (last - first), widened) * (high - low)))
            # short decoding steps are one such block, and slices cost as much as their products
            whole = (
                pairs >= batch * groups
                and one_stride
                and (low, high, last - first) == (0, keys, queries)
            )
            if whole:
                yield self.whole()
                return
            # a block has all key heads of several sequences, or some key heads of one sequence
            together = one_stride and (pairs >= 2 * groups or pairs >= batch * groups)
            sequences, heads = (
                (min(batch, pairs // groups), groups) if together else (1, min(groups, pairs))
            )
            for row, group in product(range(0, batch, sequences), range(0, groups, heads)):
                part = (
                    slice(row, min(row + sequences, batch)),
                    slice(group, min(group + heads, groups)),
                )
                yield QueryBlock(*part, first, last, low, high)

    def whole(self) -> QueryBlock:
        """All queries of all heads against all keys, as one block, for callers that need complete
        maps.
        """
        batch, groups, _, queries, _ = self.queries[0].shape
        return QueryBlock(
            slice(0, batch), slice(0, groups), 0, queries, 0, self.keys[0].shape[2], True
        )

    def room(self, blocks: Iterable[QueryBlock]) -> Tensor:
        """Allocate memory for the scores of the largest block, which all blocks share."""
        query = self.queries[0]
        largest = max(map(self.size, blocks), default=0)
        return query.new_empty(largest, dtype=torch.float32 if is_slow(query) else query.dtype)

    def size(self, block: QueryBlock) -> int:
        """Number of scores in a block."""
        pairs: int = (block.batch.stop - block.batch.start) * (
            block.groups.stop - block.groups.start
        )
        return (
            pairs * self.queries[0].shape[2] * (block.last - block.first) * (block.high - block.low)
        )

    def masked(self, block: QueryBlock, room: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the scores of a block in ``room``: ``[n, M * rows, width]``, ``-inf`` where
        hidden.

        Also returns a boolean tensor that marks the rows that see no key, or None if every row sees
        a key.
        """
        scores = self.products(block, room)
        rule = self.rule
        low = block.low
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        parts = self.unflatten(scores, block)
        seen = None if self.bias is None else self.part_of(self.bias, block)
        if seen is not None and seen.dtype != torch.bool:
            parts += seen
            seen = None
        # a row may then see nothing
        sparse = seen is not None or rule.ragged
        if rule.causal or rule.window is not None or rule.ragged:
            if rule.window is None and not sparse:
                assert isinstance(rule.offset, int)
                # every query of the block sees all that comes before; the first one's own key,
                # which all see too, keeps the width even: 127 columns take four times as long as
                # 128 in bfloat16
                low = max(low, rule.offset + block.first)
            ruled = rule.block(block.first, block.last, low, block.high, parts.device)
            ruled = (ruled[block.batch] if ruled.shape[0] > 1 else ruled)[:, None, None]
            seen = ruled if seen is None else seen & ruled
        if seen is None:
            return scores, None
        # log(0) = -inf is added, because filling through a mask takes three times as long in
        # bfloat16
        parts[..., low - block.low :] += seen.to(parts.dtype).log_()
        blind = ~seen.any(-1, keepdim=True) if sparse else None
        # mostly there are none, and filling costs as much as a softmax; on a GPU, asking would wait
        # for it
        return scores, None if blind is None or (blind.is_cpu and not blind.any()) else blind

    def weights(self, block: QueryBlock, room: Tensor) -> Tensor:
        """Compute the weights of a block in ``room``: ``[n, M * rows, width]``; zeros if a query
        sees no key.
        """
        scores, blind = self.masked(block, room)
        if self.sinks is None:
            torch.softmax(scores, -1, out=scores)
        else:
            # exp(s) / (sum exp(s) + exp(sink)) without a column for the sink: softmax times the
            # keys' share of the sum
            wide = self.unflatten(
                scores.to(torch.promote_types(scores.dtype, torch.float32)), block
            )
            sink = self.sinks.to(wide.dtype).view(1, self.keys[0].shape[1], -1, 1, 1)[
                :, block.groups
            ]
            share = torch.sigmoid(wide.logsumexp(-1, keepdim=True) - sink)
            scores.copy_((wide.softmax(-1) * share).view(scores.shape))
        if blind is not None:
            self.unflatten(scores, block).masked_fill_(blind, 0.0)
        return scores

    def unflatten(self, scores: Tensor, block: QueryBlock) -> Tensor:
        """``[n, M * rows, width]`` -> ``[b, g, M, rows, width]``."""
        groups = block.groups.stop - block.groups.start
        members = self.queries[0].shape[2]
        rows = block.last - block.first
        return scores.view(-1, groups, members, rows, scores.shape[-1])

    def part_of(self, bias: Tensor, block: QueryBlock) -> Tensor:
        """A block's part of ``bias`` (or of a tensor with its shape): ``[1|b, 1|g, 1|M, rows,
        width]``.
        """
        members = self.queries[0].shape[2]
        bias = bias[:, :, None] if bias.shape[1] == 1 else torch.unflatten(bias, 1, (-1, members))
        bias = bias if bias.shape[0] == 1 else bias[block.batch]
        bias = bias if bias.shape[1] == 1 else bias[:, block.groups]
        return bias[..., block.first : block.last, block.low : block.high]

    def products(self, block: QueryBlock, room: Tensor) -> Tensor:
        """Compute ``scale * query . key`` for a block in ``room``: ``[n, M * rows, width]``."""
        rows = [block.rows(query) for query in self.queries]
        size = self.size(block)
        count, height, _ = rows[0].shape
        scores = (room if room.numel() == size else room[:size]).view(count, height, -1)
        for part, key in enumerate(self.keys):
            row_products(rows[part], block.keys(key), self.scale, scores, add=part > 0)
        return scores


def weighted_values(scores: AttentionScores, value: Tensor, kept: Tensor | None = None) -> Tensor:
    """``value [B, G, S, Dv]`` weighted by the softmax of ``scores``: ``[B, G, M, T, Dv]``. No
    gradients.

    If ``kept`` is given, it is filled with the weights of all blocks, in order.
    """
    query = scores.queries[0]
    blocks = list(scores.blocks(value))
    room = scores.room(blocks) if kept is None else kept
    if len(blocks) == 1 and blocks[0].whole:
        z = mix(scores.weights(blocks[0], room), blocks[0].keys(value))
        z = z if z.dtype == query.dtype else z.to(query.dtype)
        return z.view(*query.shape[:-1], -1)
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for block in blocks:
        weights = scores.weights(block, room)
        room = room if kept is None else room[scores.size(block) :]
        z = mix(weights, block.keys(value))
        part = result[block.batch, block.groups, :, block.first : block.last]
        part.copy_(z.view(part.shape))
    return result


def _gradients(
    scores: AttentionScores, value: Tensor, grad: Tensor, kept: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias and sinks, the last two empty if absent; summed in at
    least float32.

    ``kept`` contains the weights of all blocks, or is empty.
    """
    (query,), (key,), bias, sinks = scores.queries, scores.keys, scores.bias, scores.sinks
    # keys and values collect gradients from many blocks: their sums need more digits than the
    # result
    wide = torch.promote_types(grad.dtype, torch.float32)
    query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
    key_grad = torch.zeros(key.shape, dtype=wide, device=grad.device)
    value_grad = torch.zeros(value.shape, dtype=wide, device=grad.device)
    bias_grad = grad.new_zeros(0 if bias is None else bias.shape, dtype=wide)
    sinks_grad = grad.new_zeros(query.shape[1:3], dtype=wide)
    blocks = list(scores.blocks(value))
    room = scores.room(blocks)
    other = scores.room(blocks)
    for block in blocks:
        rows = block.rows(query)
        out = block.rows(grad)
        if kept.numel():
            weights = kept[: scores.size(block)].view(*rows.shape[:2], -1)
            kept = kept[scores.size(block) :]
        else:
            # recomputed, because keeping them would take memory quadratic in the length
            weights = scores.weights(block, room)
        add_spread(block.keys(value_grad), weights, out)
        change = other[: weights.numel()].view(weights.shape)
        row_products(out, block.keys(value), 1.0, change)
        # a sink takes its share of each row and has no value
        if sinks is not None:
            mean = (change * weights).sum(-1, keepdim=True, dtype=wide)
            taken = 1 - weights.sum(-1, keepdim=True, dtype=wide)
            sinks_grad[block.groups] -= scores.unflatten(taken * mean, block).sum((0, 3, 4))
        # weight * (change - sum of weight * change), which holds too where a sink keeps weights
        # from summing to 1
        change = torch._softmax_backward_data(change, weights, -1, change.dtype)
        if bias is not None and bias.dtype != torch.bool:
            part = scores.part_of(bias_grad, block)
            part += scores.unflatten(change, block).sum_to_size(part.shape)
        if scores.softcap is not None:
            # derivative of softcap * tanh(x / softcap): 1 - tanh^2
            change.addcmul_(
                change,
                scores.products(block, room).div_(scores.softcap).tanh_().square_(),
                value=-1,
            )
        part = query_grad[block.batch, block.groups, :, block.first : block.last]
        part.copy_(mix(change, block.keys(key), scores.scale).view(part.shape))
        add_spread(block.keys(key_grad), change, rows, scores.scale)
    like = query.dtype
    summed = (sinks_grad.flatten() if sinks is not None else sinks_grad.new_zeros(0)).to(like)
    return query_grad, key_grad.to(like), value_grad.to(like), bias_grad.to(like), summed


# Operators take tensors and plain numbers, so the rule is spelled out. ``offsets``: the offset of
# each sequence.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? offsets, Tensor?"
    " starts, Tensor? lengths, float scale, float? softcap, bool causal, SymInt offset, SymInt?"
    " window, bool keeps"
)
# the first of the arguments, which autograd saves
_TENSORS = 8


def _unpack(arguments: tuple[Any, ...]) -> tuple[AttentionScores, Tensor]:
    (
        query,
        key,
        value,
        bias,
        sinks,
        offsets,
        starts,
        lengths,
        scale,
        softcap,
        causal,
        offset,
        window,
        _,
    ) = arguments
    rule = Visibility(causal, offset if offsets is None else offsets, window, starts, lengths)
    return AttentionScores((query,), (key,), scale, rule, bias, softcap, sinks), value


@torch.library.custom_op(
    "kvfold::blocked_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the result, and the weights of all blocks for the backward pass (empty if they will be
    recomputed).
    """
    # pages that no block writes are never touched and take no memory
    kept = _room_for_all(*arguments)
    return weighted_values(*_unpack(arguments), kept if kept.numel() else None), kept


def _room_for_all(*arguments: Any) -> Tensor:
    query, key, *_, keeps = arguments
    rule = _unpack(arguments)[0].rule
    queries = query.shape[3]
    width = key.shape[2]
    if rule.causal and not isinstance(rule.offset, Tensor):
        # a causal block ends with its last query, rounded up to a step of widths: about half of all
        # scores
        width = min(width, rule.offset + (queries + _MOST_ROWS) // 2 + width // 16 + FEWEST_IN_STEP)
    count = query[..., 0].numel() * width
    return fast(query.new_empty(0)).new_empty(count if keeps and count <= _KEPT_WEIGHTS else 0)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:-1], value.shape[-1]), _room_for_all(
        query, key, value, *rest
    )


@torch.library.custom_op(
    "kvfold::blocked_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor kept, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(grad: Tensor, kept: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast(grad.device.type, enabled=False):
        return _gradients(*_unpack(arguments), grad, kept)


@_backward_operator.register_fake
def _(
    grad: Tensor, kept: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    optional = [query.new_empty(0 if tensor is None else tensor.shape) for tensor in rest[:2]]
    return (*(query.new_empty(tensor.shape) for tensor in (query, key, value)), *optional)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])
    ctx.plain = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    # zeros for the weights' gradient would cost as much as a product
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (_TENSORS + len(ctx.plain))
    kept, *tensors = ctx.saved_tensors
    grads = _backward_operator(grad, kept, *tensors, *ctx.plain)
    bias, sinks = tensors[3:5]
    bias_grad = None if bias is None or bias.dtype == torch.bool else grads[3]
    return (
        *grads[:3],
        bias_grad,
        None if sinks is None else grads[4],
        *([None] * (3 + len(ctx.plain))),
    )


_operator.register_autograd(_differentiate, setup_context=_save)


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visibility,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention under the mask ``rule``; formula and shapes as at the top of this file."""
    shapes_only = query.device.type == "meta"
    if not shapes_only and torch.is_autocast_enabled(query.device.type):
        # products below choose their dtypes themselves
        with torch.autocast(query.device.type, enabled=False):
            return blocked_attention(query, key, value, rule, scale, bias, softcap, sinks)
    if bias is not None and bias.dtype == torch.bool and bias.stride(0) == 0:
        # a mask that was expanded to all sequences is read once
        bias = bias[:1]
    tensors = (query, key, value, bias, sinks)
    # weights are kept only where a backward pass may follow
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not (learns or shapes_only or torch.compiler.is_compiling()):
        # calling an operator takes longer than a short decoding step
        return weighted_values(
            AttentionScores((query,), (key,), scale, rule, bias, softcap, sinks), value
        )
    # operators take numbers or tensors, not either
    offset, offsets = (0, rule.offset) if isinstance(rule.offset, Tensor) else (rule.offset, None)
    counts = (offsets, rule.starts, rule.lengths)
    result: Tensor = _operator(
        *tensors, *counts, scale, softcap, rule.causal, offset, rule.window, learns
    )[0]
    return result
