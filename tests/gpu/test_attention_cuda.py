"""The attention package on a CUDA device, in every dtype, against the float64 reference.

The rule is that of the CPU tests: the error is at most twice that of the naive formula in the same dtype, on the same
device.
"""

import pytest
import torch
from torch import Tensor, nn

from kvfold.attention import GroupedAttention, LatentAttention, grouped_attention, latent_attention, rotary_frequencies
from kvfold.attention.reference import whole as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
B, H, G, T, S, D = 2, 4, 2, 9, 40, 64
R, P, DN, DV = 96, 32, 64, 48


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def device() -> str:
    torch.manual_seed(0)
    return "cuda"


pytestmark = pytest.mark.gpu
COUNTS = {"starts": torch.tensor([0, 7])}, {"lengths": torch.tensor([40, 33])}, {"offset": torch.tensor([31, 20])}
MASKS = [{}, {"causal": False}, {"window": 5}, {"window": 5, "causal": False}, *COUNTS]


def normal(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def on(device: str, options: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def masks_of(options: dict, row: int, queries: int, keys: int) -> reference.Masks:
    """The reference's masks for one sequence of the batch."""
    own = {name: int(value[row]) if isinstance(value, Tensor) else value for name, value in options.items()}
    placed = own.get("causal", True) or own.get("window") is not None
    return reference.Masks(
        own.get("causal", True),
        own.get("offset", keys - queries if placed else 0),
        own.get("window"),
        own.get("starts", 0),
        own.get("lengths"),
    )


def exact_heads(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Tensor:
    rows = []
    for row, (q, k, v) in enumerate(zip(query.cpu().double(), key.cpu().double(), value.cpu().double(), strict=True)):
        rows.append(reference.grouped_query_heads(q, k, v, masks_of(options, row, query.shape[2], key.shape[2])))
    return torch.stack(rows)


def naive(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Tensor:
    """The formula in the tensors' own dtype; the mask is taken from the reference, score by score."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    shape = query.shape[2], key.shape[2]
    zeros = torch.zeros(shape)
    mask = torch.stack([masks_of(options, row, *shape).apply(zeros, 0) for row in range(len(query))]).to(query)
    score = query @ key.mT * query.shape[-1] ** -0.5 + mask[:, None]
    return score.softmax(-1).nan_to_num() @ value


def error(found: Tensor, exact: Tensor) -> float:
    return (found.detach().cpu().double() - exact).square().mean().sqrt().item()


def assert_precise(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    assert found.dtype == plain.dtype
    limit = 2 * max(error(plain, exact), error(exact.to(found.dtype), exact))
    assert error(found, exact) <= limit, f"{error(found, exact):.3e} > {limit:.3e}"


@pytest.mark.parametrize("options", MASKS, ids=lambda options: ", ".join(options) or "causal")
@pytest.mark.parametrize("queries", [1, T, S])
@pytest.mark.parametrize("groups", [H, G, 1])
def test_grouped_attention(device, dtype, groups, queries, options):
    if queries == S and isinstance(options.get("offset"), Tensor):
        options = {"offset": torch.zeros(B, dtype=torch.long)}
    query = normal(B, H, queries, D, dtype=dtype, device=device)
    key, value = (normal(B, groups, S, D, dtype=dtype, device=device) for _ in range(2))
    found = grouped_attention(query, key, value, **on(device, options))
    assert_precise(found, naive(query, key, value, options), exact_heads(query, key, value, options))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 5}], ids=["causal", "both ways", "window"])
def test_gradients_of_grouped_attention(device, dtype, options):
    shapes = [(B, H, S, D), (B, G, S, D), (B, G, S, D)]
    leaves = [normal(*shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    probe = normal(B, H, S, D, dtype=dtype, device=device)
    found = torch.autograd.grad(grouped_attention(*leaves, **options), leaves, probe)
    plain = torch.autograd.grad(naive(*leaves, options), leaves, probe)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(naive(*wide, options), wide, probe.cpu().double())
    for triple in zip(found, plain, exact, strict=True):
        assert_precise(*triple)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("queries", [1, T])
@pytest.mark.parametrize(
    "options", MASKS[:1] + MASKS[2:3] + MASKS[4:], ids=lambda options: ", ".join(options) or "causal"
)
def test_latent_attention(device, dtype, absorbed, queries, options):
    make = {"dtype": dtype, "device": device}
    nope, rope = normal(B, H, queries, DN, **make), normal(B, H, queries, P, **make)
    latent = normal(B, S, R + P, **make)
    up_key, up_value = (normal(H, width, R, **make) / R**0.5 for width in (DN, DV))
    found = latent_attention(nope, rope, latent, up_key, up_value, absorbed=absorbed, **on(device, options))
    c, shared = latent[:, None, :, :R], latent[:, None, :, R:]
    if absorbed:
        scaled = torch.cat([nope @ up_key, rope], -1) * ((R + P) / (DN + P)) ** 0.5
        plain = naive(scaled, latent[:, None], latent[:, None, :, :R], options) @ up_value.mT
    else:
        key = torch.cat([c @ up_key.mT, shared.expand(-1, H, -1, -1)], -1)
        plain = naive(torch.cat([nope, rope], -1), key, c @ up_value.mT, options)
    w = reference.LatentWeights(*[torch.empty(0)] * 4, up_key.cpu().double(), up_value.cpu().double(), torch.empty(0))
    exact = torch.stack(
        [
            reference.latent_heads(q, r, slots[:, :R], slots[:, R:], w, masks_of(options, row, queries, S), None)
            for row, (q, r, slots) in enumerate(
                zip(nope.cpu().double(), rope.cpu().double(), latent.cpu().double(), strict=True)
            )
        ]
    )
    assert_precise(found, plain, exact)


def modules() -> list[nn.Module]:
    model, heads = 64, 4

    def linear(inner: int, outer: int) -> nn.Linear:
        return nn.Linear(inner, outer, bias=False)

    return [
        *(
            GroupedAttention(
                query=linear(model, heads * 16),
                key=linear(model, groups * 16),
                value=linear(model, groups * 16),
                output=linear(heads * 16, model),
                heads=heads,
                kv_heads=groups,
                head_dim=16,
                frequencies=rotary_frequencies(16),
            )
            for groups in (4, 2, 1)
        ),
        LatentAttention(
            query=linear(model, heads * 24),
            down=linear(model, 40),
            up=linear(32, heads * 32),
            output=linear(heads * 16, model),
            heads=heads,
            kv_rank=32,
            rope_dim=8,
            nope_dim=16,
            value_dim=16,
            frequencies=rotary_frequencies(8),
        ),
    ]


@pytest.mark.parametrize("index", range(4), ids=["mha", "gqa", "mqa", "mla"])
@torch.no_grad()
def test_modules_cached_as_precise_as_uncached(device, dtype, index):
    module = modules()[index]
    exact = module.double()(x := torch.randn(B, 24, 64).double())
    module = module.to(device, dtype)
    x = x.to(device, dtype)
    cache = module.new_cache(B, 24, growing=False, dtype=dtype, device=device)
    parts = [module(x[:, :20], cache=cache), *(module(x[:, t : t + 1], cache=cache) for t in range(20, 24))]
    assert_precise(torch.cat(parts, 1), module(x), exact)
    assert cache.nbytes == cache.allocated_bytes == sum(buffer.nbytes for buffer in cache.buffers)


@pytest.mark.parametrize("index", range(4), ids=["mha", "gqa", "mqa", "mla"])
def test_modules_compile_whole(device, dtype, index):
    module = modules()[index].to(device, dtype)
    x = normal(B, 24, 64, dtype=dtype, device=device)
    exact = modules()[index].double()
    exact.load_state_dict({name: weight.cpu().double() for name, weight in module.state_dict().items()})
    found = torch.compile(module, fullgraph=True)(x)
    assert_precise(found, module(x), exact(x.cpu().double()).detach())
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    torch._dynamo.reset()


def test_peak_memory_at_16k_is_far_below_a_score_matrix(device):
    query, key, value = (normal(1, 2, 16384, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for options in ({}, {"window": 1024}, {"starts": torch.tensor([100], device=device)}):
        grouped_attention(query, key, value, **options)
    grouped_attention(query[:, :, 8192:], key, value)
    scores = 2 * 16384**2 * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 2
