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


def test_encoder_module_equals_reference():
    w = grouped_weights()
    x = random(T, E)
    expected = reference.grouped_query_attention(x, w, reference.BIDIRECTIONAL)
    result = grouped_module(w, causal=False)(x[None])[0]
    torch.testing.assert_close(result, expected, **precision.EXACT)


@pytest.mark.parametrize("again", [False, True], ids=["memory once", "memory at every step"])
@torch.no_grad()
def test_cross_module_equals_reference_and_reads_the_memory_once(again):
    w = grouped_weights()
    x = random(1, T, E)
    memory = random(1, 5, E, seed=3)
    module = grouped_module(w, causal=False, cross=True)
    cache = module.new_cache(1, dtype=torch.float64)
    parts = [
        module(x[:, t : t + 1], memory=memory if again or t == 0 else None, cache=cache)
        for t in range(T)
    ]
    expected = reference.grouped_query_attention(x[0], w, reference.BIDIRECTIONAL, memory=memory[0])
    for result in (torch.cat(parts, 1)[0], module(x, memory=memory)[0]):
        torch.testing.assert_close(result, expected, **precision.EXACT)
    assert cache.length == 5


@pytest.mark.parametrize("norm", [None, nn.RMSNorm(R)], ids=["plain", "normed"])
def test_latent_attention_trains_under_autocast(norm):
    module = latent_module(latent_weights(), latent_norm=norm).float()
    with torch.autocast("cpu", torch.bfloat16):
        module(random(2, 20, E).float()).float().sum().backward()
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
    expected = module(x)
    for split in range(T):
        growing = split % 2 == 0
        cache = module.new_cache(2, 0 if growing else T, growing=growing, dtype=torch.float64)
        parts = [module(x[:, :split], cache=cache)] if split else []
        parts += [
            module(token, cache=cache) for token in x[:, split:].split(T if growing else 1, 1)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), expected, **precision.EXACT)


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
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = module(x)
    result = compiled(x)
    torch.testing.assert_close(result, expected, **precision.EXACT)
    weights = list(module.parameters())
    grads = [torch.autograd.grad(y.square().sum(), weights) for y in (result, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-9)
    step = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = module.new_cache(2, T, growing=False, dtype=torch.float64)
        parts = [step(token, cache=cache) for token in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, **precision.EXACT)
    torch._dynamo.reset()


def test_frequencies_survive_a_cast_to_low_precision():
    module = grouped_module(grouped_weights(), frequencies=rotary_frequencies(D)).to(torch.bfloat16)
    (found,) = module.rotation(
        torch.tensor([9001]), torch.cat([torch.ones(D // 2), torch.zeros(D // 2)])[None, None, None]
    )
    assert torch.equal(found[0, 0, 0, : D // 2], (9001 * rotary_frequencies(D)).cos().float())
    assert module(random(1, T, E).bfloat16()).dtype == torch.bfloat16
