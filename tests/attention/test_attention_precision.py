"""Property tests: fast paths against float64, with the error of the naive formula in the tested dtype as the yardstick.

The rule: the error against float64 is at most twice that of the formula written out naively in the tested dtype, or
twice the rounding of the exact result to that dtype where the naive formula was luckier than that. Errors are root mean
squares over the result, of several draws of the numbers, so that no error hangs on a handful of roundings.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.attention import blocked, grouped_attention, latent_attention, products
from kvfold.attention.reference import whole as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCHES = {1: [40, 60], 2: [20, 30], 7: [6, 9], 33: [1, 2, 3]}  # enough rows for an error to be an average
DRAWS = 4
FEW = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """Mask arguments of one call; offset ``None`` means ``S - T``."""

    causal: bool
    offset: int | Tensor | None
    window: int | None
    starts: Tensor | None
    lengths: Tensor | None
    bias: Tensor | None

    def options(self) -> dict:
        return dict(vars(self))


def see(case: Case, batch: int, queries: int, keys: int) -> Tensor:
    """The mask as a matrix ``[B, T, S]``, straight from its definition."""
    offset = case.offset
    if offset is None:
        offset = keys - queries if case.causal or case.window else 0
    place = torch.as_tensor(offset).expand(batch)[:, None, None] + torch.arange(queries)[None, :, None]
    key = torch.arange(keys)
    seen = key <= place if case.causal else torch.ones(batch, queries, keys, dtype=torch.bool)
    if case.window is not None:
        seen = seen & ((place - key).abs() < case.window)
    if case.starts is not None:
        seen = seen & (key >= case.starts[:, None, None])
    if case.lengths is not None:
        seen = seen & (key < case.lengths[:, None, None])
    return seen[:, None]


def naive(query: Tensor, key: Tensor, value: Tensor, case: Case, scale: float | None = None) -> Tensor:
    """Matrix product, mask, softmax, matrix product, every step in the inputs' dtype."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    score = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    score = score if case.bias is None else score + case.bias
    seen = see(case, query.shape[0], query.shape[2], key.shape[2])
    some = seen.any(-1, keepdim=True)
    # rows that see nothing are kept finite, for their gradients' sake, and cut away after the softmax
    weights = score.masked_fill(~seen & some, -torch.inf).softmax(-1)
    return torch.where(some, weights, 0.0) @ value


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).square().mean().sqrt().item()


def assert_precise(draws: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Each draw: what the fast path found, the naive formula in the same dtype, and the exact result in float64."""
    found, plain, exact = (torch.stack(tensors) for tensors in zip(*draws, strict=True))
    assert found.dtype == plain.dtype
    assert found.shape == exact.shape
    if found.numel() == 0:
        return
    limit = 2 * max(error(plain, exact), error(exact.to(found.dtype), exact))
    size = error(found, exact)
    assert size <= limit, f"{size:.3e} > {limit:.3e} in {found.dtype} {list(found.shape)}"


@st.composite
def cases(draw, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> Case:
    causal = draw(st.booleans())
    spare = keys - queries
    offsets = torch.randint(max(spare, 0) + 1, (batch,))
    offset = draw(st.one_of(st.none(), st.integers(0, max(spare, 0)), st.just(offsets)))
    window = draw(st.none() | st.integers(1, keys + 2))
    if spare < 0:
        causal, offset, window = False, None, None
    bias = torch.randn(draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, keys)
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
    groups, share = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    queries, prefix = draw(st.sampled_from([1, 2, 7, 33])), draw(st.sampled_from([-1, 0, 0, 1, 40]))
    batch = draw(st.sampled_from(BATCHES[queries]))
    keys = max(1, queries + prefix)
    width = draw(st.sampled_from([8, 24]))
    value_width = draw(st.sampled_from([width, 16]))
    heads = groups * share
    shapes = [(batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, value_width)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    if draw(st.booleans()):  # as a projection's output comes
        tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    return tensors, draw(cases(batch, heads, queries, keys, dtype))


@st.composite
def latent_problems(draw) -> tuple[list[Tensor], Case]:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from(DTYPES))
    heads, queries, prefix = (draw(st.sampled_from(sizes)) for sizes in ([1, 4, 6], [1, 2, 7, 33], [0, 0, 1, 40]))
    batch = draw(st.sampled_from(BATCHES[queries]))
    rank, rope, nope = draw(st.sampled_from([8, 33])), draw(st.sampled_from([0, 2, 8])), draw(st.sampled_from([4, 16]))
    width = draw(st.sampled_from([nope + rope, 12]))
    shapes = [
        (batch, heads, queries, nope),
        (batch, heads, queries, rope),
        (batch, queries + prefix, rank + rope),
        (heads, nope, rank),
        (heads, width, rank),
    ]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[3:] = [weight / rank**0.5 for weight in tensors[3:]]
    case = draw(cases(batch, heads, queries, queries + prefix, dtype))
    return [tensor.to(dtype) for tensor in tensors], replace(case, bias=None)


def naive_latent(
    nope: Tensor, rope: Tensor, latent: Tensor, up_key: Tensor, up_value: Tensor, case: Case, absorbed: bool
) -> Tensor:
    rank, scale = up_key.shape[-1], (nope.shape[-1] + rope.shape[-1]) ** -0.5
    if absorbed:
        query = torch.cat([nope @ up_key, rope], -1)
        return naive(query, latent[:, None], latent[:, None, :, :rank], case, scale) @ up_value.mT
    c, shared = latent[:, None, :, :rank], latent[:, None, :, rank:]
    key, value = (torch.einsum("bsr,hdr->bhsd", c[:, 0], up) for up in (up_key, up_value))
    key = torch.cat([key, shared.expand(-1, nope.shape[1], -1, -1)], -1)
    return naive(torch.cat([nope, rope], -1), key, value, case, scale)


@pytest.fixture(params=[1 << 20, 64], ids=["large blocks", "small blocks"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", request.param)
    if request.param == 64:
        monkeypatch.setattr(blocked, "_FEWEST_ROWS", 3)
        monkeypatch.setattr(products, "_FEWEST", 8)


def fresh(tensors: list[Tensor], draw: int) -> list[Tensor]:
    """Other numbers in the same layout; draw 0 is the one given."""
    if draw == 0:
        return tensors
    return [torch.randn_like(tensor) * tensor.square().mean().sqrt().nan_to_num() for tensor in tensors]


def compare(fast, plain, exact, tensors: list[Tensor], shape: tuple[int, ...]) -> None:
    """Hold ``fast`` and its gradients to the rule; ``exact`` is given the same numbers in float64."""
    draws = []
    for draw in range(DRAWS):
        inputs = fresh(tensors, draw)
        probe = torch.randn(shape).to(tensors[0].dtype)
        wide = [tensor.double() for tensor in inputs]
        draws.append([both_ways(*call, probe) for call in ((fast, inputs), (plain, inputs), (exact, wide))])
    for part in range(len(tensors) + 1):  # the result, then the gradient of each tensor
        assert_precise([tuple(way[part] for way in draw) for draw in draws])


def both_ways(function, tensors: list[Tensor], probe: Tensor) -> list[Tensor]:
    """The result and its gradient with respect to every tensor."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, probe.to(result.dtype))]


@pytest.mark.usefixtures("block_size")
@FEW
@given(grouped_problems())
def test_grouped_attention_and_gradients_are_as_precise_as_the_naive_formula(problem):
    tensors, case = problem
    wide = replace(case, bias=None if case.bias is None else case.bias.double())
    compare(
        lambda *x: grouped_attention(*x, **case.options()),
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
    options = {name: value for name, value in case.options().items() if name != "bias"}
    compare(
        lambda *x: latent_attention(*x, absorbed=absorbed, **options),
        lambda *x: naive_latent(*x, case, absorbed),
        lambda *x: naive_latent(*x, case, False),
        tensors,
        (*tensors[0].shape[:3], tensors[4].shape[1]),
    )


@FEW
@given(latent_problems())
def test_absorbed_equals_explicit(problem):
    tensors, case = problem
    tensors = [tensor.double() for tensor in tensors]
    options = {name: value for name, value in case.options().items() if name != "bias"}
    one, other = (latent_attention(*tensors, absorbed=absorbed, **options) for absorbed in (True, False))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(grouped_problems())
def test_yardstick_is_the_reference(problem):
    """The naive formula above, in float64, is what reference.py computes with its loops."""
    tensors, case = problem
    query, key, value = (tensor[:, :, :9].double() for tensor in tensors)
    case = replace(case, bias=None, offset=None, causal=case.causal and key.shape[2] >= query.shape[2])
    case = replace(case, window=case.window if key.shape[2] >= query.shape[2] else None)
    found = naive(query, key, value, case)
    for row in range(len(query)):
        masks = reference.Masks(
            case.causal,
            max(0, key.shape[2] - query.shape[2]),
            case.window,
            0 if case.starts is None else int(case.starts[row]),
            key.shape[2] if case.lengths is None else int(case.lengths[row]),
        )
        exact = reference.grouped_query_heads(query[row], key[row], value[row], masks)
        torch.testing.assert_close(found[row], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_gradcheck_of_the_blocked_operator(queries):
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, queries, 3).double(), torch.randn(2, 2, 9, 3).double()
    value, bias = torch.randn(2, 2, 9, 2).double(), torch.randn(1, 4, queries, 9).double()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    starts = torch.tensor([0, 4])
    assert torch.autograd.gradcheck(
        lambda q, k, v, b: grouped_attention(q, k, v, bias=b, window=4, starts=starts), leaves
    )


def test_the_operators_keep_their_contract_with_torch():
    """Fake kernels, autograd registration and schemas, checked by torch itself."""
    query, key = torch.randn(2, 1, 2, 5, 4, requires_grad=True), torch.randn(2, 1, 9, 4, requires_grad=True)
    value = torch.randn(2, 1, 9, 3, requires_grad=True)
    arguments = (query, key, value, None, 0.5, True, 4, None, 3, None, torch.tensor([9, 6]))
    torch.library.opcheck(torch.ops.kvfold.blocked_attention.default, arguments)
