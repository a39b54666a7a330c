"""Attention in blocks of queries, for every mask: memory linear in ``S``, with gradients, opaque to torch.compile.

Shapes: ``query [B, G, M, T, D]`` (``M`` query heads share a key head), ``key [B, G, S, D]``, ``value [B, G, S, Dv]``,
``bias [1|B, 1|H, T, S]`` with ``H = G M``, result ``[B, G, M, T, Dv]``. A block is some queries of some heads against
all the keys that any of them sees, so a row's softmax is complete in one block and nothing has to be merged; the
backward pass makes each block's weights again instead of keeping them. Two registered operators, so that a traced
graph holds one node whatever the number of blocks. Queries that see no key give zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.mask import Visibility
from kvfold.attention.products import add_spread, compiles_shapes, fast, is_slow, mix, row_products, shape_step

# Scores held at once. On a CPU 2^20 take 4 MB in float32: smaller budgets are slower, 2^22 is up to a quarter faster
# for four times the memory (recipes/benchmarks/bench_attention.py --budgets). On a GPU 2^26 take 256 MB.
_CPU_SCORES = 1 << 20
_GPU_SCORES = 1 << 26
# Queries of a block: enough rows for fast matrix products, and few enough that causal blocks skip most later keys.
_FEWEST_ROWS = 32
_MOST_ROWS = 256


@dataclass(frozen=True)
class _Block:
    """Queries ``first .. last - 1`` against keys ``low .. high - 1``, for some sequences and some key heads."""

    batch: slice
    groups: slice
    first: int
    last: int
    low: int
    high: int

    @property
    def scores(self) -> int:
        """Scores of the block per query head of a group: sequences x key heads x rows x width."""
        pairs: int = (self.batch.stop - self.batch.start) * (self.groups.stop - self.groups.start)
        return pairs * (self.last - self.first) * (self.high - self.low)

    def rows(self, tensor: Tensor) -> Tensor:
        """``[B, G, M, T, D]`` -> ``[n, M * rows, D]``."""
        return fast(tensor[self.batch, self.groups, :, self.first : self.last].flatten(2, 3).flatten(0, 1))

    def keys(self, tensor: Tensor) -> Tensor:
        """``[B, G, S, D]`` -> ``[n, width, D]``, a view when the heads can be walked in one stride."""
        return fast(tensor[self.batch, self.groups, self.low : self.high].flatten(0, 1))


@dataclass(frozen=True)
class _Problem:
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float
    rule: Visibility

    def blocks(self) -> Iterator[_Block]:
        """All blocks with keys to see; each keeps to the budget of scores unless one key head alone exceeds it."""
        batch, groups, members, queries, _ = self.query.shape
        budget = _CPU_SCORES if self.query.device.type == "cpu" else _GPU_SCORES
        widened = self.key.shape[-1] if is_slow(self.key) else 0  # float32 copies of keys count like scores
        step = self._rows_at_once(budget)
        for first in range(0, queries, step):
            last = min(first + step, queries)
            low, high = self._key_range(first, last)
            if low == high:
                continue
            pairs = max(1, budget // (max(members * (last - first), widened) * (high - low)))
            for part in _parts(batch, groups, pairs, self.one_stride()):
                yield _Block(*part, first, last, low, high)

    def _rows_at_once(self, budget: int) -> int:
        """Queries of a block: as many as the budget allows for one key head, within the bounds above."""
        members, keys, window = self.query.shape[2], self.key.shape[2], self.rule.window
        width = keys if window is None else min(keys, 2 * window + _FEWEST_ROWS)
        return max(_FEWEST_ROWS, min(_MOST_ROWS, budget // max(1, members * width)))

    def _key_range(self, first: int, last: int) -> tuple[int, int]:
        """The keys ``low .. high - 1`` that queries ``first .. last - 1`` may see.

        Where every width costs a compilation, the range is widened to multiples of ``shape_step``; the mask hides the
        keys that are too many.
        """
        keys = self.key.shape[2]
        low, high = self.rule.key_range(first, last, keys)
        if low == high or not compiles_shapes(self.key):
            return low, high
        step = shape_step(keys)
        return low // step * step, min(keys, -(-high // step) * step)

    def one_stride(self) -> bool:
        """Whether sequences and heads of keys and values flatten to one dim without a copy."""
        groups = self.key.shape[1]
        return groups == 1 or all(part.stride(0) == groups * part.stride(1) for part in (self.key, self.value))

    def weights(self, block: _Block, scratch: Tensor) -> Tensor:
        """``softmax(scale * query key^T + bias)`` over the visible keys, ``[n, M * rows, width]``, in ``scratch``."""
        rows, keys = block.rows(self.query), block.keys(self.key)
        shape = (*rows.shape[:2], keys.shape[1])
        scores = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        row_products(rows, keys, self.scale, scores)
        parts = self.unflatten(scores, block)
        if self.bias is not None:
            parts += self.bias_of(block)
        blind = self.mask(parts, block)
        torch.softmax(scores, -1, out=scores)
        if blind is not None:
            parts.masked_fill_(blind, 0.0)
        return scores

    def unflatten(self, scores: Tensor, block: _Block) -> Tensor:
        """``[n, M * rows, width]`` -> ``[b, g, M, rows, width]``."""
        groups = block.groups.stop - block.groups.start
        members, rows = self.query.shape[2], block.last - block.first
        return scores.view(-1, groups, members, rows, scores.shape[-1])

    def bias_of(self, block: _Block, bias: Tensor | None = None) -> Tensor:
        """The part of ``bias`` (or of a tensor shaped like it) that a block adds: ``[1|b, 1|g, 1|M, rows, width]``."""
        bias = self.bias if bias is None else bias
        assert bias is not None
        members = self.query.shape[2]
        bias = bias[:, :, None] if bias.shape[1] == 1 else torch.unflatten(bias, 1, (-1, members))
        bias = bias if bias.shape[0] == 1 else bias[block.batch]
        bias = bias if bias.shape[1] == 1 else bias[:, block.groups]
        return bias[..., block.first : block.last, block.low : block.high]

    def mask(self, parts: Tensor, block: _Block) -> Tensor | None:
        """Set hidden keys to ``-inf`` in ``parts``; return which rows see nothing, or None where all see a key."""
        rule, low = self.rule, block.low
        if rule.window is None and not rule.ragged:
            if not rule.causal:
                return None
            assert isinstance(rule.offset, int)
            low = max(low, rule.offset + block.first + 1)  # every query of the block sees all that comes before
        seen = rule.block(block.first, block.last, low, block.high, parts.device)
        seen = seen[block.batch] if seen.shape[0] > 1 else seen
        hidden = ~seen[:, None, None]
        parts[..., low - block.low :].masked_fill_(hidden, -torch.inf)
        return hidden.all(-1, keepdim=True) if rule.ragged else None

    def scratch(self) -> Tensor:
        """Room for the scores of the largest block."""
        largest = max((block.scores for block in self.blocks()), default=0)
        return fast(self.query.new_empty(0)).new_empty(self.query.shape[2] * largest)


def _parts(batch: int, groups: int, pairs: int, one_stride: bool) -> Iterator[tuple[slice, slice]]:
    """Sequences and key heads in parts of at most ``pairs`` pairs: all heads of several sequences, or some of one."""
    if pairs >= 2 * groups and one_stride:
        count = min(batch, pairs // groups)
        for start in range(0, batch, count):
            yield slice(start, min(start + count, batch)), slice(0, groups)
        return
    count = min(groups, pairs)
    for sequence in range(batch):
        for start in range(0, groups, count):
            yield slice(sequence, sequence + 1), slice(start, min(start + count, groups))


def _forward(problem: _Problem) -> Tensor:
    result = problem.query.new_zeros(*problem.query.shape[:-1], problem.value.shape[-1])
    scratch = problem.scratch()
    for block in problem.blocks():
        weights = problem.weights(block, scratch)
        z = mix(weights, block.keys(problem.value))
        part = result[block.batch, block.groups, :, block.first : block.last]
        part.copy_(z.view(part.shape))
    return result


def _backward(problem: _Problem, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias (empty without one); sums over blocks in at least float32."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    query_grad = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    key_grad = torch.zeros(problem.key.shape, dtype=wide, device=grad.device)
    value_grad = torch.zeros(problem.value.shape, dtype=wide, device=grad.device)
    bias_grad = grad.new_zeros(0 if problem.bias is None else problem.bias.shape, dtype=wide)
    scratch, other = problem.scratch(), problem.scratch()
    for block in problem.blocks():
        weights = problem.weights(block, scratch)
        rows, out = block.rows(problem.query), block.rows(grad)
        add_spread(block.keys(value_grad), weights, out)
        change = other[: weights.numel()].view(weights.shape)
        row_products(out, block.keys(problem.value), 1.0, change)
        change -= (change * weights).sum(-1, keepdim=True)
        change *= weights
        if problem.bias is not None:
            part = problem.bias_of(block, bias_grad)
            part += problem.unflatten(change, block).sum_to_size(part.shape)
        part = query_grad[block.batch, block.groups, :, block.first : block.last]
        part.copy_((mix(change, block.keys(problem.key)) * problem.scale).view(part.shape))
        add_spread(block.keys(key_grad), change, rows, problem.scale)
    like = problem.query.dtype
    return query_grad, key_grad.to(like), value_grad.to(like), bias_grad.to(like)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    offset: int,
    offsets: Tensor | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> _Problem:
    rule = Visibility(causal, offset if offsets is None else offsets, window, starts, lengths)
    return _Problem(query, key, value, bias, scale, rule)


@torch.library.custom_op("kvfold::blocked_attention", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    offset: int,
    offsets: Tensor | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    return _forward(_problem(query, key, value, bias, scale, causal, offset, offsets, window, starts, lengths))


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("kvfold::blocked_attention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    offset: int,
    offsets: Tensor | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = _problem(query, key, value, bias, scale, causal, offset, offsets, window, starts, lengths)
    return _backward(problem, grad)


@_backward_operator.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_grad = query.new_empty(0 if bias is None else bias.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), bias_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, bias, scale, causal, offset, offsets, window, starts, lengths = inputs
    ctx.save_for_backward(query, key, value, bias, offsets, starts, lengths)
    ctx.plain = scale, causal, offset, window


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bias, offsets, starts, lengths = ctx.saved_tensors
    scale, causal, offset, window = ctx.plain
    grads = _backward_operator(grad, query, key, value, bias, scale, causal, offset, offsets, window, starts, lengths)
    return (*grads[:3], None if bias is None else grads[3], *([None] * 7))


_operator.register_autograd(_differentiate, setup_context=_save)


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: Visibility, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention under ``rule``; shapes as at the top of this file."""
    offset, offsets = (0, rule.offset) if isinstance(rule.offset, Tensor) else (rule.offset, None)
    result: Tensor = _operator(
        query, key, value, bias, scale, rule.causal, offset, offsets, rule.window, rule.starts, rule.lengths
    )
    return result
