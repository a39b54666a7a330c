"""Decoding over latents: ``latent_decode`` against float64, and the calls of ``latent_attention``
that reach it.

Without a CUDA device ``kernel_takes`` is replaced by its conditions on shapes; the kernel itself,
reached the same way, runs interpreted in test_decode_kernel.py and on a device in tests/gpu.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import precision
from helpers.attention import Case, assert_precise, exact_latent, naive_latent

from kvfold.attention import blocked, latent, latent_attention
from kvfold.attention.latent import latent_decode


def problem(dtype, slots, queries=1, batch=3):
    torch.manual_seed(1)
    sizes = (
        (batch, 4, queries, 48),
        (batch, 4, queries, 16),
        (batch, slots, 48),
        (batch, slots, 16),
    )
    return [torch.randn(size).to(dtype) for size in sizes]


def formula(inputs, mask, scale=0.2):
    """Every step in the dtype of ``inputs``, softmax in float32 at least, as eager attention in
    transformers.
    """
    query, rope, c, key = inputs
    scores = scale * (torch.cat([query, rope], -1) @ torch.cat([c, key], -1)[:, None].mT)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(c.dtype) @ c[:, None]


@pytest.mark.parametrize("budget", [1, 3000, 1 << 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_naive_formula(dtype, masked, budget, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", budget)
    inputs = problem(dtype, 300, queries=2)
    mask = None
    if masked:
        mask = torch.rand(3, 1, 2, 300) < 0.6
        mask[..., -1] = True
    expected = formula([x.double() for x in inputs], mask)
    naive = (formula(inputs, mask) - expected).abs().max()
    result = latent_decode(*inputs, 0.2, mask)
    assert result.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)
    else:
        assert (result - expected).abs().max() <= max(2 * naive, 4 * torch.finfo(dtype).eps)


def test_masks_of_numbers_or_of_each_head_and_strided_caches():
    query, rope, c, key = inputs = problem(torch.float32, 30)
    bias = torch.randn(3, 4, 1, 30)
    whole = torch.cat([c, key], -1)
    for mask in (bias, bias > 0):
        expected = formula([x.double() for x in inputs], mask).float()
        found = latent_decode(query, rope, whole[..., :48], whole[..., 48:], 0.2, mask)
        torch.testing.assert_close(found, expected, **precision.ACTIVATIONS)


def test_the_traced_operator_computes_the_same():
    inputs = problem(torch.float32, 40)
    compiled = torch.compile(
        lambda *some: latent_decode(*some, 0.2), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(*inputs), latent_decode(*inputs, 0.2))


B = 2
H = 4
S = 40
DN = 8
P = 6
R = 16
DV = 12
RAGGED = {
    "starts": torch.tensor([0, 7]),
    "lengths": torch.tensor([40, 33]),
    "offset": torch.tensor([39, 20]),
}


def step_problem(dtype=torch.float32, queries=1):
    torch.manual_seed(2)
    shapes = [(B, H, queries, DN), (B, H, queries, P), (B, S, R + P), (H, DN, R), (H, DV, R)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """The masks that the kernel was called with, where one query at a time is said to be its own."""
    masks = []

    def decode_latent(*inputs, mask):
        masks.append(mask)
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs[:4]]
        mask = None if mask is None else mask[:, None, None]
        return formula(wide, mask, inputs[4]).to(inputs[2].dtype)

    kernel = SimpleNamespace(decode_latent=decode_latent)
    monkeypatch.setitem(sys.modules, "kvfold.attention.kernel", kernel)
    monkeypatch.setattr(latent, "kernel_takes", lambda query, query_rope, mask: query.shape[2] == 1)
    return masks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "names", [(), ("starts",), ("lengths",), ("offset",), tuple(RAGGED)], ids=" ".join
)
def test_a_decoding_step_is_the_formula(calls, names, dtype):
    case = Case(**{name: RAGGED[name] for name in names})
    inputs = step_problem(dtype)
    with torch.no_grad():
        latent_attention(*inputs, absorbed=False, **case.options)
        assert calls == []
        result = latent_attention(*inputs, absorbed=True, **case.options)
    assert [mask is None for mask in calls] == [not names]
    assert_precise(result, naive_latent(*inputs, case, True), exact_latent(*inputs, case))


@torch.no_grad()
def test_other_calls_take_blocks(calls):
    latent_attention(*step_problem(queries=2), absorbed=True)
    latent_attention(*step_problem(), absorbed=True, window=5)
    with torch.enable_grad():
        latent_attention(*(x.requires_grad_() for x in step_problem()), absorbed=True)
    assert calls == []


@pytest.mark.skipif(not latent._HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cards_that_triton_does_not_support_take_blocks(capability, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda"), shape=(1, 4, 1, 16))
    assert latent.kernel_takes(query, query, None) is taken


@pytest.mark.parametrize(
    ("heads", "shared", "expected"),
    # the most of Hopper, A100 and cards like an RTX 3090
    [(1, 232448, (16, 64, 4)), (64, 166912, (64, 32, 8)), (32, 101376, (32, 32, 4))],
)
def test_the_kernel_takes_fewer_slots_at_once_where_shared_memory_is_less(heads, shared, expected):
    kernel = pytest.importorskip("kvfold.attention.kernel", exc_type=ImportError)
    assert kernel.choose_tile(heads, 512, 64, 2, shared) == kernel.Tile(*expected)
