"""Attention computed in blocks of queries, with gradients, for every kind of mask.

Shapes: ``query [B, G, M, T, D]`` (``M`` query heads share a key head), ``key [B, G, S, D]``,
``value [B, G, S, Dv]``, ``bias [1|B, 1|H, T, S]`` with ``H = G M``, ``sinks [H]``, result ``[B, G,
M, T, Dv]``:

    score  = scale * query . key + bias          softcap * tanh(score / softcap) before the bias
    weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink))
    result = sum of weight * value

A block combines some queries of some heads with all the keys that any of them sees, so the softmax
of each row is complete within one block and nothing has to be merged; memory is linear in ``S``.
For the backward pass, the weights are kept if there are few of them, and otherwise recomputed block
by block. Queries that see no key get zeros.

``AttentionScores`` is the part without values, also used for attention sums and the divergence
between two attentions (``drift/profile.py``) and for decoding over a latent cache (``latent.py``).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.attention.mask import Visibility

# Scores computed at once. On a CPU 2^20 take 4 MB in float32: smaller budgets are slower, 2^22 is
# up to a quarter faster for four times the memory (recipes/benchmarks/bench_attention.py
# --budgets). On a GPU 2^26 take 256 MB.
_CPU_SCORES = 1 << 20
_GPU_SCORES = 1 << 26
# Weights that a call keeps for its backward pass: 64 MB in bfloat16, of which causal calls use
# half. Recomputing them made training steps of 8 x 256 and 8 x 512 tokens up to a quarter slower
# (bench_refine_constants.py --attention); the limit is chosen, not measured.
_KEPT_WEIGHTS = 1 << 25
# Queries of a block: enough rows for fast matrix products, and few enough that causal blocks skip
# most later keys. Steps of 8 x 512 tokens, ms for 32, 64, 128, 256: MLA 242, 175, 168, 162, MQA 74,
# 78, 76, 94; 8 x 256: 73, 52, 49, 57 and 29, 23, 28, 36
# (bench_refine_constants.py --attention, one CPU core).
_FEWEST_ROWS = 32
_MOST_ROWS = 128
# Keys multiplied in bfloat16 on a CPU come in steps of at least this many; chosen, not measured.
_FEWEST_IN_STEP = 64


class Block(NamedTuple):
    """Some queries and the keys that they see, for some sequences and key heads."""

    batch: slice
    groups: slice
    queries: slice
    keys: slice
    shape: tuple[int, ...]  # of the block's scores, [b, g, M, rows, width]
    whole: bool  # all queries of all heads and all keys, as in short decoding steps

    def query_rows(self, tensor: Tensor) -> Tensor:
        """The block's part of queries ``[B, G, M, T, D]``, as ``[b * g, M * rows, D]``."""
        # slices would cost as much as the products of a short decoding step
        part = tensor if self.whole else tensor[self.batch, self.groups, :, self.queries]
        members, rows, width = part.shape[2:]
        return _widen_float16(part.reshape(-1, members * rows, width))

    def key_rows(self, tensor: Tensor) -> Tensor:
        """The block's part of keys ``[B, G, S, D]``, as ``[b * g, width, D]``; a view if one
        stride covers all heads.
        """
        part = tensor if self.whole else tensor[self.batch, self.groups, self.keys]
        return _widen_float16(part.flatten(0, 1))

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape of the block's scores as matrices: ``[b * g, M * rows, width]``."""
        batch, groups, members, rows, width = self.shape
        return batch * groups, members * rows, width

    @property
    def size(self) -> int:
        """Number of the block's scores."""
        return math.prod(self.shape)


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

    def blocks(self, *others: Tensor, buffers: int = 1) -> Iterator[Block]:
        """Yield the blocks that see at least one key, each with as many scores as fit the budget,
        or one key head's.

        ``others`` are further tensors ``[B, G, S, ...]`` of which the caller reads each block's
        part. ``buffers`` is the number of tensors as large as a block's scores that the caller
        needs at once.
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
        widened = sum(key.shape[-1] for key in self.keys) if _is_slow(self.keys[0]) else 0
        one_stride = groups == 1 or all(
            x.stride(0) == groups * x.stride(1) for x in (*self.keys, *others)
        )
        # where every width costs a compilation ranges are widened to few widths; the mask hides the
        # keys too many
        grain = _key_step(self.keys[0], keys)
        for first in range(0, queries, step):
            last = min(first + step, queries)
            low, high = self._key_range(first, last)
            if low == high:
                continue
            low = low // grain * grain
            high = min(keys, -(-high // grain) * grain)
            rows = members * (last - first)
            pairs = max(1, budget // (max(rows, widened) * (high - low)))
            # a block has all key heads of several sequences, or some key heads of one sequence
            if one_stride and pairs >= groups * min(2, batch):
                sequences = min(batch, pairs // groups)
                heads = groups
            else:
                sequences = 1
                heads = min(groups, pairs)
            whole = (
                one_stride
                and (sequences, heads) == (batch, groups)
                and (low, high, last - first) == (0, keys, queries)
            )
            for row, group in product(range(0, batch, sequences), range(0, groups, heads)):
                row_end = min(row + sequences, batch)
                group_end = min(group + heads, groups)
                shape = (
                    row_end - row,
                    group_end - group,
                    members,
                    last - first,
                    high - low,
                )
                yield Block(
                    slice(row, row_end),
                    slice(group, group_end),
                    slice(first, last),
                    slice(low, high),
                    shape,
                    whole,
                )

    def _key_range(self, first: int, last: int) -> tuple[int, int]:
        low, high = self.rule.key_range(first, last, self.keys[0].shape[2])
        bias = self.bias
        if bias is None or bias.dtype != torch.bool or not bias.is_cpu:
            return low, high
        # masks from models are mostly causal: what a whole block hides is never multiplied
        seen = bias[..., first:last, low:high].any((0, 1, 2)).nonzero()
        if not len(seen):
            return low, low
        return low + int(seen[0]), low + int(seen[-1]) + 1

    def allocate(self, count: int) -> Tensor:
        """Memory for ``count`` scores; blocks computed one after the other can share it."""
        query = self.queries[0]
        return query.new_empty(count, dtype=torch.float32 if _is_slow(query) else query.dtype)

    def products(self, block: Block, memory: Tensor) -> Tensor:
        """Compute ``scale * query . key`` for a block in ``memory``: ``[b * g, M * rows,
        width]``.
        """
        memory = memory if block.whole else memory[: block.size]
        scores = memory.view(block.matrix_shape)
        for part, (query, key) in enumerate(zip(self.queries, self.keys, strict=True)):
            _multiply_keys(
                block.query_rows(query),
                block.key_rows(key),
                self.scale,
                scores,
                add=part > 0,
            )
        return scores

    def masked(self, block: Block, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the scores of a block in ``memory``: ``[b * g, M * rows, width]``, ``-inf`` where
        hidden.

        Also returns a boolean tensor that marks the rows that see no key, or None if every row sees
        a key.
        """
        scores = self.products(block, memory)
        rule = self.rule
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        seen = None if self.bias is None else self.bias_part(self.bias, block)
        if seen is None and not rule.hides_keys:
            return scores, None
        maps = scores.view(block.shape)
        if seen is not None and seen.dtype != torch.bool:
            maps += seen
            seen = None
        may_see_nothing = seen is not None or rule.ragged
        low = block.keys.start
        if rule.hides_keys:
            if rule.window is None and not may_see_nothing:
                assert isinstance(rule.offset, int)
                # every query of the block sees all that comes before; the first one's own key,
                # which all see too, keeps the width even: 127 columns take four times as long as
                # 128 in bfloat16
                low = max(low, rule.offset + block.queries.start)
            ruled = rule.block(block.queries, slice(low, block.keys.stop), maps.device)
            ruled = (ruled[block.batch] if ruled.shape[0] > 1 else ruled)[:, None, None]
            seen = ruled if seen is None else seen & ruled
        if seen is None:
            return scores, None
        # log(0) = -inf is added, because filling through a mask takes three times as long in
        # bfloat16
        maps[..., low - block.keys.start :] += seen.to(maps.dtype).log_()
        if not may_see_nothing:
            return scores, None
        blind = ~seen.any(-1, keepdim=True)
        # mostly there are none, and filling costs as much as a softmax; on a GPU, asking would wait
        # for it
        return scores, None if blind.is_cpu and not blind.any() else blind

    def weights(self, block: Block, memory: Tensor) -> Tensor:
        """Compute the weights of a block in ``memory``: ``[b * g, M * rows, width]``; zeros if a
        query sees no key.
        """
        scores, blind = self.masked(block, memory)
        if self.sinks is None:
            torch.softmax(scores, -1, out=scores)
        else:
            maps = scores.view(block.shape)
            # exp(s) / (sum exp(s) + exp(sink)) without a column for the sink: softmax times the
            # keys' share of the sum
            wide = maps.to(torch.promote_types(maps.dtype, torch.float32))
            sinks = self.sinks.to(wide.dtype).view(1, -1, block.shape[2], 1, 1)
            share = torch.sigmoid(wide.logsumexp(-1, keepdim=True) - sinks[:, block.groups])
            maps.copy_(wide.softmax(-1) * share)
        if blind is not None:
            scores.view(block.shape).masked_fill_(blind, 0.0)
        return scores

    def bias_part(self, bias: Tensor, block: Block) -> Tensor:
        """A block's part of ``bias`` (or of a tensor with its shape): ``[1|b, 1|g, 1|M, rows,
        width]``.
        """
        members = 1 if bias.shape[1] == 1 else block.shape[2]
        bias = torch.unflatten(bias, 1, (-1, members))
        bias = bias if bias.shape[0] == 1 else bias[block.batch]
        bias = bias if bias.shape[1] == 1 else bias[:, block.groups]
        return bias[..., block.queries, block.keys]


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
    if bias is not None and bias.dtype == torch.bool and bias.stride(0) == 0:
        # a mask that was expanded to all sequences is read once
        bias = bias[:1]
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        # the products below choose their dtypes themselves
        with torch.autocast(device, enabled=False):
            return blocked_attention(query, key, value, rule, scale, bias, softcap, sinks)
    tensors = (query, key, value, bias, sinks)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if learns or torch.compiler.is_compiling():
        offsets = rule.offset if isinstance(rule.offset, Tensor) else None
        offset = rule.offset if isinstance(rule.offset, int) else 0
        counts = (offsets, rule.starts, rule.lengths)
        numbers = (scale, softcap, rule.causal, offset, rule.window, learns)
        result: Tensor = _operator(*tensors, *counts, *numbers)[0]
        return result
    # calling an operator takes longer than a short decoding step
    return weigh_values(
        AttentionScores((query,), (key,), scale, rule, bias, softcap, sinks),
        value,
    )


def weigh_values(scores: AttentionScores, value: Tensor, kept: Tensor | None = None) -> Tensor:
    """``value [B, G, S, Dv]`` weighted by the softmax of ``scores``: ``[B, G, M, T, Dv]``. No
    gradients.

    ``kept`` is filled with the weights of all blocks, one after the other.
    """
    blocks = list(scores.blocks(value))
    memory = scores.allocate(largest_size(blocks)) if kept is None else kept
    query = scores.queries[0]
    if len(blocks) == 1 and blocks[0].whole:
        z = _multiply_values(scores.weights(blocks[0], memory), blocks[0].key_rows(value))
        z = z if z.dtype == query.dtype else z.to(query.dtype)
        return z.view(*query.shape[:-1], -1)
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for block in blocks:
        _store_rows(result, block, scores.weights(block, memory), value)
        if kept is not None:
            memory = memory[block.size :]
    return result


def largest_size(blocks: Iterable[Block]) -> int:
    """Number of scores of the largest block."""
    return max([0, *(block.size for block in blocks)])


def _store_rows(
    result: Tensor,
    block: Block,
    weights: Tensor,
    values: Tensor,
    scale: float = 1.0,
) -> None:
    """Write ``scale * weights values`` to the block's rows of ``result [B, G, M, T, D]``."""
    rows = result[block.batch, block.groups, :, block.queries]
    rows.copy_(_multiply_values(weights, block.key_rows(values), scale).view(rows.shape))


# A traced graph contains one operator for any number of blocks, forward and backward: tracing
# blocks one by one would take minutes. Operators take tensors and plain numbers, so the rule is
# spelled out; ``offsets`` are those of each sequence.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? offsets, Tensor?"
    " starts, Tensor? lengths, float scale, float? softcap, bool causal, SymInt offset, SymInt?"
    " window, bool learns"
)
_TENSORS = 8  # of the arguments, at their beginning


def _scores(*arguments: Any) -> AttentionScores:
    """The scores that an operator's arguments describe."""
    query, key, _, bias, sinks, offsets, starts, lengths = arguments[:_TENSORS]
    scale, softcap, causal, offset, window, _ = arguments[_TENSORS:]
    rule = Visibility(causal, offset if offsets is None else offsets, window, starts, lengths)
    return AttentionScores((query,), (key,), scale, rule, bias, softcap, sinks)


@torch.library.custom_op(
    "kvfold::blocked_attention",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The attention output, and the weights of all blocks saved for the backward pass (empty if it
    recomputes them).
    """
    # pages that no block writes are never touched and take no memory
    kept = _allocate_kept(*arguments)
    return weigh_values(_scores(*arguments), arguments[2], kept if kept.numel() else None), kept


def _allocate_kept(*arguments: Any) -> Tensor:
    count = math.prod(arguments[0].shape[:-1]) * arguments[1].shape[2]
    learns = arguments[-1]
    return _scores(*arguments).allocate(count if learns and count <= _KEPT_WEIGHTS else 0)


@_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, _, value = arguments[:3]
    return query.new_empty(*query.shape[:-1], value.shape[-1]), _allocate_kept(*arguments)


@torch.library.custom_op(
    "kvfold::blocked_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor kept, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(grad: Tensor, kept: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias and sinks; empty if there is nothing to learn."""
    with torch.autocast(grad.device.type, enabled=False):
        return _gradients(_scores(*arguments), arguments[2], grad, kept)


@_backward_operator.register_fake
def _(grad: Tensor, kept: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    tensors = arguments[:5]
    return tuple(grad.new_empty(0 if x is None else x.shape) for x in tensors)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])
    ctx.numbers = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    # zeros for the weights' gradient would cost as much as a product
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    kept, *tensors = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * (_TENSORS + len(ctx.numbers))
    if grad is not None:
        computed = _backward_operator(grad, kept, *tensors, *ctx.numbers)
        for index, needed in enumerate(ctx.needs_input_grad[: len(computed)]):
            grads[index] = computed[index] if needed else None
    return tuple(grads)


_operator.register_autograd(_differentiate, setup_context=_save_inputs)


def _gradients(
    scores: AttentionScores, value: Tensor, grad: Tensor, kept: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias and sinks, summed in at least float32.

    ``kept`` contains the weights of all blocks, one after the other, or is empty.
    """
    (query,) = scores.queries
    (key,) = scores.keys
    bias = scores.bias
    sinks = scores.sinks
    # keys and values collect gradients from many blocks: their sums need more digits than the
    # result
    wide = torch.promote_types(grad.dtype, torch.float32)
    query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
    key_grad = torch.zeros(key.shape, dtype=wide, device=grad.device)
    value_grad = torch.zeros(value.shape, dtype=wide, device=grad.device)
    bias_grad = grad.new_zeros(0 if bias is None else bias.shape, dtype=wide)
    sinks_grad = grad.new_zeros(0 if sinks is None else query.shape[1:3], dtype=wide)
    blocks = list(scores.blocks(value))
    memory = scores.allocate(largest_size(blocks))
    change_memory = torch.empty_like(memory)
    for block in blocks:
        rows = block.query_rows(query)
        grad_rows = block.query_rows(grad)
        if kept.numel():
            weights = kept[: block.size].view(block.matrix_shape)
            kept = kept[block.size :]
        else:
            # keeping them would take memory quadratic in the length
            weights = scores.weights(block, memory)
        block.key_rows(value_grad).add_(weights.mT @ grad_rows)
        change = change_memory[: block.size].view(block.matrix_shape)
        _multiply_keys(grad_rows, block.key_rows(value), 1.0, change)
        # a sink takes its share of each row and has no value
        if sinks is not None:
            mean = (change * weights).sum(-1, keepdim=True, dtype=wide)
            share = 1 - weights.sum(-1, keepdim=True, dtype=wide)
            lost = (share * mean).view(*block.shape[:-1], 1)
            sinks_grad[block.groups] -= lost.sum((0, 3, 4))
        # weight * (change - sum of weight * change), which holds too where a sink keeps weights
        # from summing to 1
        change = torch._softmax_backward_data(change, weights, -1, change.dtype)
        if bias is not None and bias.dtype != torch.bool:
            part = scores.bias_part(bias_grad, block)
            part += change.view(block.shape).sum_to_size(part.shape)
        if scores.softcap is not None:
            # derivative of softcap * tanh(x / softcap): 1 - tanh^2
            capped = scores.products(block, memory).div_(scores.softcap).tanh_()
            change.addcmul_(change, capped.square_(), value=-1)
        _store_rows(query_grad, block, change, key, scores.scale)
        block.key_rows(key_grad).add_(change.mT @ rows, alpha=scores.scale)
    summed = (key_grad, value_grad, bias_grad, sinks_grad.flatten())
    return query_grad, *(total.to(query.dtype) for total in summed)


# The matrix products of a block, in the form that is fastest on a CPU; float32, float64 and GPUs
# are not affected. Float16 products are ten times slower there than float32 products, so the
# matrices are widened. For bfloat16, oneDNN compiles a program for every new shape (a millisecond
# and a megabyte each), and the number of keys changes at every decoding step: a multiple of
# ``_key_step`` keys is multiplied in bfloat16 and the remainder in float32. Shapes: ``n`` matrices
# with ``r`` rows, ``w`` keys and ``d`` dims.


def _is_slow(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def _widen_float16(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_slow(tensor) else tensor


def _even_width(tensor: Tensor) -> int:
    """Number of the keys ``[n, w, d]`` to multiply in their own dtype."""
    return tensor.shape[1] - tensor.shape[1] % _key_step(tensor, tensor.shape[1])


def _key_step(tensor: Tensor, keys: int) -> int:
    """Step for splitting ``keys`` keys; 1 where a new shape costs nothing, otherwise a power of
    two.
    """
    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return 1
    # at most 32 shapes for a context of any length
    return max(_FEWEST_IN_STEP, 1 << max(0, (keys // 16).bit_length() - 1))


def _multiply_keys(
    rows: Tensor, keys: Tensor, scale: float, out: Tensor, add: bool = False
) -> None:
    """Write ``scale * rows keys^T`` to ``out``, or add it to ``out`` if ``add`` is true.

    ``rows [n, r, d]``, ``keys [n, w, d]``, ``out [n, r, w]``.
    """
    even = _even_width(keys)
    if even == keys.shape[1]:
        torch.baddbmm(out, rows, keys.mT, beta=int(add), alpha=scale, out=out)
        return
    if even:
        product_out = out[..., :even]
        product_out.copy_(
            torch.baddbmm(product_out, rows, keys[:, :even].mT, beta=int(add), alpha=scale)
        )
    rest = torch.bmm(rows.float(), keys[:, even:].float().mT).mul_(scale)
    out[..., even:] = rest.add_(out[..., even:]) if add else rest


def _multiply_values(weights: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * weights values``: ``[n, r, w]``, ``[n, w, d]`` -> ``[n, r, d]``, in the ``values``
    dtype or wider.
    """
    even = _even_width(values)
    if even == values.shape[1]:
        result = torch.bmm(weights, values)
    else:
        result = torch.bmm(weights[..., even:].float(), values[:, even:].float())
        # the larger part last: it is rounded to bfloat16 once
        if even:
            result.add_(torch.bmm(weights[..., :even].contiguous(), values[:, :even]))
    return result if scale == 1 else result.mul_(scale)
