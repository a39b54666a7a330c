"""Property tests: fast paths against float64, with the error of the naive formula in the tested
dtype as the yardstick.

The rule is that of helpers/attention.py; errors are root mean squares over the result, of several
draws of the numbers, so that no error hangs on a handful of roundings.
"""

import pytest
import torch
from helpers.attention import Case, assert_precise, exact, naive, naive_latent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from

from kvfold.attention import blocked, grouped_attention, latent_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# enough rows for an error to be an average
BATCHES = {1: [40, 60], 2: [20, 30], 7: [6, 9], 33: [1, 2, 3]}
DRAWS = 4
FEW = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def cases(draw, batch, queries, keys):
    # some sequences see nothing
    slots = sampled_from([None, torch.randint(keys + 1, (batch,))])
    padding = {"starts": draw(slots), "lengths": draw(slots)}
    if keys < queries:
        return Case(causal=False, **padding)
    offset = draw(st.none() | st.integers(0, keys - queries))
    window = draw(st.none() | st.integers(1, keys + 2))
    return Case(
        causal=window is not None or draw(st.booleans()), offset=offset, window=window, **padding
    )


@st.composite
def grouped_problems(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(sampled_from(DTYPES))
    groups = draw(sampled_from([1, 2, 3]))
    heads = groups * draw(sampled_from([1, 2, 4]))
    queries = draw(sampled_from(list(BATCHES)))
    batch = draw(sampled_from(BATCHES[queries]))
    keys = max(1, queries + draw(sampled_from([-1, 0, 0, 1, 40])))
    width = draw(sampled_from([8, 24]))
    value_width = draw(sampled_from([width, 16]))
    query = torch.randn(batch, heads, queries, width)
    key = torch.randn(batch, groups, keys, width)
    value = torch.randn(batch, groups, keys, value_width)
    if draw(st.booleans()):
        # as a projection's output comes
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    return [x.to(dtype) for x in (query, key, value)], draw(cases(batch, queries, keys))


@st.composite
def latent_problems(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(sampled_from(DTYPES))
    heads = draw(sampled_from([1, 4, 6]))
    queries = draw(sampled_from(list(BATCHES)))
    batch = draw(sampled_from(BATCHES[queries]))
    keys = queries + draw(sampled_from([0, 0, 1, 40]))
    rank = draw(sampled_from([8, 33]))
    rope = draw(sampled_from([0, 2, 8]))
    # heads of four dims or fewer do not exist, and torch's kernel rounds them twice as much
    nope = draw(sampled_from([8, 16]))
    value_width = draw(sampled_from([nope + rope, 12]))
    tensors = [
        torch.randn(batch, heads, queries, nope),
        torch.randn(batch, heads, queries, rope),
        torch.randn(batch, keys, rank + rope),
        torch.randn(heads, nope, rank) / rank**0.5,
        torch.randn(heads, value_width, rank) / rank**0.5,
    ]
    return [tensor.to(dtype) for tensor in tensors], draw(cases(batch, queries, keys))


@pytest.fixture(params=[1 << 20, pytest.param(64, marks=pytest.mark.slow)])
def block_size(request, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", request.param)
    if request.param == 64:
        monkeypatch.setattr(blocked, "_FEWEST_ROWS", 3)
        monkeypatch.setattr(blocked, "_FEWEST_IN_STEP", 8)


def compare(fast, plain, wide_formula, tensors):
    """Hold ``fast`` and its gradients to the rule; ``wide_formula`` is given the same numbers in
    float64.
    """
    draws = []
    for _ in range(DRAWS):
        wide = [tensor.double() for tensor in tensors]
        with torch.no_grad():
            probe = torch.randn_like(fast(*tensors))
        calls = [(fast, tensors), (plain, tensors), (wide_formula, wide)]
        draws.append([differentiate(*call, probe) for call in calls])
        # other numbers in the same layout
        tensors = [torch.randn_like(x) * x.square().mean().sqrt().nan_to_num() for x in tensors]
    # the result, then the gradient of each tensor
    for part in range(len(tensors) + 1):
        assert_precise(*(torch.stack([draw[way][part] for draw in draws]) for way in range(3)))


def differentiate(function, tensors, probe):
    """The result and its gradient with respect to every tensor."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, probe.to(result.dtype))]


@pytest.mark.usefixtures("block_size")
@FEW
@given(grouped_problems())
def test_grouped_attention_and_gradients_are_as_precise_as_the_naive_formula(problem):
    tensors, case = problem
    compare(
        lambda *x: grouped_attention(*x, **vars(case), scale=0.3),
        lambda *x: naive(*x, case, 0.3),
        lambda *x: naive(*x, case, 0.3),
        tensors,
    )


@pytest.mark.usefixtures("block_size")
@FEW
@given(latent_problems(), st.booleans())
def test_latent_attention_and_gradients_are_as_precise_as_the_naive_formula(problem, absorbed):
    tensors, case = problem
    compare(
        lambda *x: latent_attention(*x, absorbed=absorbed, **vars(case)),
        lambda *x: naive_latent(*x, case, absorbed),
        lambda *x: naive_latent(*x, case, False),
        tensors,
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_yardstick_is_the_reference(data):
    """The naive formula above, in float64, is what the reference computes with its loops."""
    queries = data.draw(sampled_from([1, 9]))
    case = data.draw(cases(2, queries, 9))
    query = torch.randn(2, 4, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(
        naive(query, key, value, case), exact(query, key, value, case), rtol=0, atol=1e-12
    )
