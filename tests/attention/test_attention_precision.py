"""Property tests: fast paths against float64, with the error of the naive formula in the tested
dtype as the yardstick.

The rule is that of helpers/attention.py; errors are root mean squares over the result, of several
draws of the numbers, so that no error hangs on a handful of roundings.
"""

from dataclasses import replace

import pytest
import torch
from helpers.attention import Case, assert_precise, exact, naive, naive_latent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.attention import blocked, grouped_attention, latent_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCHES = {
    1: [40, 60],
    2: [20, 30],
    7: [6, 9],
    33: [1, 2, 3],
}  # enough rows for an error to be an average
DRAWS = 4
FEW = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def cases(draw, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> Case:
    causal = draw(st.booleans())
    spare = keys - queries
    offsets = torch.randint(max(spare, 0) + 1, (batch,))
    offset = draw(st.one_of(st.none(), st.integers(0, max(spare, 0)), st.just(offsets)))
    window = draw(st.none() | st.integers(1, keys + 2))
    if spare < 0:
        causal = False
        offset = None
        window = None
    bias = torch.randn(
        draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, keys
    )
    return Case(
        causal,
        offset,
        window,
        draw(st.sampled_from([None, torch.randint(keys, (batch,))])),
        draw(st.sampled_from([None, torch.randint(keys + 1, (batch,))])),
        draw(st.sampled_from([None, None, bias.to(dtype)])),
    )


@st.composite
def grouped_problems(draw) -> tuple[list[Tensor], Case]:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from(DTYPES))
    groups = draw(st.sampled_from([1, 2, 3]))
    share = draw(st.sampled_from([1, 2, 4]))
    queries = draw(st.sampled_from([1, 2, 7, 33]))
    prefix = draw(st.sampled_from([-1, 0, 0, 1, 40]))
    batch = draw(st.sampled_from(BATCHES[queries]))
    keys = max(1, queries + prefix)
    width = draw(st.sampled_from([8, 24]))
    value_width = draw(st.sampled_from([width, 16]))
    heads = groups * share
    shapes = [
        (batch, heads, queries, width),
        (batch, groups, keys, width),
        (batch, groups, keys, value_width),
    ]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    if draw(st.booleans()):  # as a projection's output comes
        tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    return tensors, draw(cases(batch, heads, queries, keys, dtype))


@st.composite
def latent_problems(draw) -> tuple[list[Tensor], Case]:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from(DTYPES))
    heads, queries, prefix = (
        draw(st.sampled_from(sizes)) for sizes in ([1, 4, 6], [1, 2, 7, 33], [0, 0, 1, 40])
    )
    batch = draw(st.sampled_from(BATCHES[queries]))
    rank = draw(st.sampled_from([8, 33]))
    rope = draw(st.sampled_from([0, 2, 8]))
    nope = draw(st.sampled_from([4, 16]))
    width = draw(st.sampled_from([nope + rope, 12]))
    shapes = [
        (batch, heads, queries, nope),
        (batch, heads, queries, rope),
        (batch, queries + prefix, rank + rope),
    ]
    tensors = [torch.randn(shape) for shape in (*shapes, (heads, nope, rank), (heads, width, rank))]
    tensors[3:] = [weight / rank**0.5 for weight in tensors[3:]]
    case = draw(cases(batch, heads, queries, queries + prefix, dtype))
    return [tensor.to(dtype) for tensor in tensors], replace(case, bias=None)


@pytest.fixture(
    params=[1 << 20, pytest.param(64, marks=pytest.mark.slow)], ids=["large blocks", "small blocks"]
)
def block_size(request, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", request.param)
    if request.param == 64:
        monkeypatch.setattr(blocked, "_FEWEST_ROWS", 3)
        monkeypatch.setattr(blocked, "_FEWEST_IN_STEP", 8)


def compare(fast, plain, wide_formula, tensors: list[Tensor], shape: tuple[int, ...]) -> None:
    """Hold ``fast`` and its gradients to the rule; ``wide_formula`` is given the same numbers in
    float64.
    """
    draws = []
    for draw in range(DRAWS):
        # other numbers in the same layout
        inputs = (
            [torch.randn_like(x) * x.square().mean().sqrt().nan_to_num() for x in tensors]
            if draw
            else tensors
        )
        probe = torch.randn(shape).to(tensors[0].dtype)
        wide = [tensor.double() for tensor in inputs]
        draws.append(
            [
                both_ways(*call, probe)
                for call in ((fast, inputs), (plain, inputs), (wide_formula, wide))
            ]
        )
    for part in range(len(tensors) + 1):  # the result, then the gradient of each tensor
        assert_precise(*(torch.stack([draw[way][part] for draw in draws]) for way in range(3)))


def both_ways(function, tensors: list[Tensor], probe: Tensor) -> list[Tensor]:
    """The result and its gradient with respect to every tensor."""
    leaves = [
        tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for tensor in tensors
    ]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, probe.to(result.dtype))]


@pytest.mark.usefixtures("block_size")
@FEW
@given(grouped_problems())
def test_grouped_attention_and_gradients_are_as_precise_as_the_naive_formula(problem):
    tensors, case = problem
    wide = replace(case, bias=None if case.bias is None else case.bias.double())
    compare(
        lambda *x: grouped_attention(*x, **case.options, bias=case.bias),
        lambda *x: naive(*x, case),
        lambda *x: naive(*x, wide),
        tensors,
        (*tensors[0].shape[:3], tensors[2].shape[3]),
    )


@pytest.mark.usefixtures("block_size")
@FEW
@given(latent_problems(), st.booleans())
def test_latent_attention_and_gradients_are_as_precise_as_the_naive_formula(problem, absorbed):
    tensors, case = problem
    compare(
        lambda *x: latent_attention(*x, absorbed=absorbed, **case.options),
        lambda *x: naive_latent(*x, case, absorbed),
        lambda *x: naive_latent(*x, case, False),
        tensors,
        (*tensors[0].shape[:3], tensors[4].shape[1]),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(grouped_problems())
def test_yardstick_is_the_reference(problem):
    """The naive formula above, in float64, is what the reference computes with its loops."""
    tensors, case = problem
    query, key, value = (tensor[:, :, :9].double() for tensor in tensors)
    case = replace(
        case, bias=None, offset=None, causal=case.causal and key.shape[2] >= query.shape[2]
    )
    case = replace(case, window=case.window if key.shape[2] >= query.shape[2] else None)
    torch.testing.assert_close(
        naive(query, key, value, case), exact(query, key, value, case), rtol=0, atol=1e-12
    )


@pytest.mark.slow
def test_the_operators_keep_their_contract_with_torch():
    """Fake kernels, autograd registration and schemas, checked by torch itself."""
    query = torch.randn(2, 1, 2, 5, 4, requires_grad=True)
    key = torch.randn(2, 1, 9, 4, requires_grad=True)
    value = torch.randn(2, 1, 9, 3, requires_grad=True)
    counts = (None, None, torch.tensor([9, 6]))
    arguments = (query, key, value, None, torch.randn(2), *counts, 0.5, 3.0, True, 4, 3, False)
    torch.library.opcheck(torch.ops.kvfold.blocked_attention.default, arguments)
