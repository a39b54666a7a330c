"""Modules against the float64 reference: whole layers, with and without caches, gradients, masks of
a batch.
"""

from functools import partial

import pytest
import torch
from helpers import precision
from torch import Tensor, nn

from kvfold.attention import GroupedAttention, LatentAttention, reference, rotary_frequencies

E = 12
H = 4
G = 2
D = 6
DV = 5
T = 7
R = 9
P = 4
DN = 6


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def grouped_weights(groups: int = G) -> reference.GroupedProjections:
    sizes = [
        (H, D, E),
        (groups, D, E),
        (groups, DV, E),
        (E, H, DV),
        (H, D),
        (groups, D),
        (groups, DV),
        (E,),
    ]
    return reference.GroupedProjections(*(random(*size, seed=i) for i, size in enumerate(sizes)))


def grouped_module(w: reference.GroupedProjections, **options) -> GroupedAttention:
    return GroupedAttention(
        query=linear(w.query.flatten(0, 1), w.query_bias.flatten()),
        key=linear(w.key.flatten(0, 1), w.key_bias.flatten()),
        value=linear(w.value.flatten(0, 1), w.value_bias.flatten()),
        output=linear(w.output.flatten(1), w.output_bias),
        heads=H,
        kv_heads=w.key.shape[0],
        head_dim=D,
        value_dim=DV,
        **options,
    )


def latent_weights(query_rank: int | None = None) -> reference.LatentProjections:
    inner = query_rank or E
    sizes = [(H, DN, inner), (H, P, inner), (R, E), (P, E), (H, DN, R), (H, DV, R), (E, H, DV)]
    down = None if query_rank is None else random(query_rank, E, seed=9)
    return reference.LatentProjections(
        *(random(*size, seed=i) / 2 for i, size in enumerate(sizes)), query_down=down
    )


def latent_module(w: reference.LatentProjections, **options) -> LatentAttention:
    query: nn.Module = linear(torch.cat([w.query_nope, w.query_rope], 1).flatten(0, 1))
    if w.query_down is not None:
        query = nn.Sequential(linear(w.query_down), query)
    return LatentAttention(
        query=query,
        down=linear(torch.cat([w.latent, w.rope_key])),
        up=linear(torch.cat([w.up_key, w.up_value], 1).flatten(0, 1)),
        output=linear(w.output.flatten(1)),
        heads=H,
        kv_rank=R,
        rope_dim=P,
        nope_dim=DN,
        value_dim=DV,
        frequencies=rotary_frequencies(P),
        **options,
    )


@pytest.mark.parametrize(("groups", "layout"), [(4, "half"), (2, "interleaved"), (1, "half")])
def test_grouped_module_equals_reference(groups, layout):
    w = grouped_weights(groups)
    x = random(2, T, E)
    rope = partial(
        reference.rotate, frequencies=rotary_frequencies(4), interleaved=layout == "interleaved"
    )
    module = grouped_module(w, frequencies=rotary_frequencies(4), layout=layout)
    expected = torch.stack([reference.grouped_query_attention(row, w, rotary=rope) for row in x])
    torch.testing.assert_close(module(x), expected, **precision.EXACT)


@pytest.mark.parametrize("query_rank", [None, 8])
@pytest.mark.parametrize("absorbed", [False, True])
def test_latent_module_equals_reference(query_rank, absorbed):
    w = latent_weights(query_rank)
    x = random(2, T, E)
    rope = partial(reference.rotate, frequencies=rotary_frequencies(P), interleaved=True)
    expected = torch.stack([reference.latent_attention(row, w, rope) for row in x])
    torch.testing.assert_close(latent_module(w)(x, absorbed=absorbed), expected, **precision.EXACT)
    rolled = reference.latent_attention(x[0], w, rope, absorbed=True)
    torch.testing.assert_close(rolled, expected[0], **precision.EXACT)


def test_encoder_and_cross_modules_equal_reference_and_the_memory_is_read_once():
    w = grouped_weights()
    x = random(1, T, E)
    memory = random(1, 5, E, seed=3)
    encoder = reference.grouped_query_attention(x[0], w, reference.BIDIRECTIONAL)
    torch.testing.assert_close(grouped_module(w, causal=False)(x)[0], encoder, **precision.EXACT)
    module = grouped_module(w, causal=False, cross=True)
    expected = reference.grouped_query_attention(x[0], w, reference.BIDIRECTIONAL, memory=memory[0])
    torch.testing.assert_close(module(x, memory=memory)[0], expected, **precision.EXACT)
    cache = module.new_cache(1, dtype=torch.float64)
    with torch.no_grad():
        first = module(x[:, :1], memory=memory, cache=cache)
        rest = [module(x[:, t : t + 1], cache=cache) for t in range(1, T)]
    torch.testing.assert_close(torch.cat([first, *rest], 1)[0], expected, **precision.EXACT)
    assert cache.length == 5
    again = module.new_cache(1, dtype=torch.float64)
    with torch.no_grad():
        parts = [module(x[:, t : t + 1], memory=memory, cache=again) for t in range(T)]
    torch.testing.assert_close(torch.cat(parts, 1)[0], expected, **precision.EXACT)
    assert again.length == 5


@pytest.mark.parametrize("norm", [None, nn.RMSNorm(16)], ids=["plain", "normed"])
def test_latent_attention_trains_under_autocast(norm):
    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    sizes = {"heads": 4, "kv_rank": 16, "rope_dim": 4, "nope_dim": 8, "value_dim": 8}
    layers = {
        "query": linear(32, 48),
        "down": linear(32, 20),
        "up": linear(16, 64),
        "output": linear(32, 32),
    }
    module = LatentAttention(**layers, **sizes, frequencies=rotary_frequencies(4), latent_norm=norm)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(2, 20, 32)).float().sum().backward()
    assert module.up.weight.grad.dtype == torch.float32


def modules() -> list[tuple[str, nn.Module]]:
    rotary = {"frequencies": rotary_frequencies(D), "layout": "half"}
    return [
        ("mha", grouped_module(grouped_weights(H), **rotary)),
        ("gqa", grouped_module(grouped_weights(G), **rotary)),
        ("mqa window", grouped_module(grouped_weights(1), window=3, **rotary)),
        ("mla", latent_module(latent_weights())),
        ("mla window", latent_module(latent_weights(8), window=3)),
    ]


@pytest.mark.parametrize(("name", "module"), modules())
@torch.no_grad()
def test_cached_equals_uncached_at_every_split_point(name, module):
    x = random(2, T, E)
    whole = module(x)
    for split in range(T + 1):
        cache = module.new_cache(2, T * (split % 2), growing=split % 2 == 0, dtype=torch.float64)
        pieces = (
            [x[:, :split], *x[:, split:].split(1, 1)] if split % 2 else [x[:, :split], x[:, split:]]
        )
        parts = [module(piece, cache=cache) for piece in pieces if piece.shape[1]]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **precision.EXACT)
        assert cache.length == T


@pytest.mark.parametrize(("name", "module"), modules())
@torch.no_grad()
def test_a_padded_batch_equals_each_sequence_alone(name, module):
    x = random(2, T, E)
    starts = torch.tensor([0, 3])
    cache = module.new_cache(2, dtype=torch.float64)
    both = torch.cat([module(part, cache=cache, starts=starts) for part in (x[:, :5], x[:, 5:])], 1)
    for row, start in enumerate(starts.tolist()):
        torch.testing.assert_close(
            both[row, start:], module(x[row : row + 1, start:])[0], **precision.EXACT
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [modules()[i] for i in (2, 3)])
def test_modules_compile_without_graph_breaks(name, module):
    x = random(2, T, E)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), module(x), **precision.EXACT)
    found = torch.autograd.grad(whole(x).square().sum(), list(module.parameters()))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    step = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = module.new_cache(2, T, growing=False, dtype=torch.float64)
        outs = [step(token, cache=cache) for token in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(outs, 1), module(x), **precision.EXACT)
    torch._dynamo.reset()


def test_frequencies_survive_a_cast_to_low_precision():
    module = grouped_module(grouped_weights(), frequencies=rotary_frequencies(D)).to(torch.bfloat16)
    (found,) = module.rotation(
        torch.tensor([9001]), torch.cat([torch.ones(D // 2), torch.zeros(D // 2)])[None, None, None]
    )
    assert torch.equal(found[0, 0, 0, : D // 2], (9001 * rotary_frequencies(D)).cos().float())
    assert module(random(1, T, E).bfloat16()).dtype == torch.bfloat16
