"""The modeling file of layout ``kvfold`` against the blocked core, in every attention function of transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvfold.attention import apply_rotary, latent_attention, rotary_frequencies, rotary_tables
from kvfold.attention.blocked import blocked_attention
from kvfold.attention.checkpoints import modeling_kvfold
from kvfold.attention.mask import Visibility

B, T, E, H, D, R, P = 2, 7, 24, 4, 6, 10, 4
FACTS: dict[str, Any] = {
    "model_dim": E,
    "heads": H,
    "head_dim": D,
    "qkv_bias": True,
    "o_bias": True,
    "scale": 0.3,
    "amplitude": 1.0,
    "attention_dropout": 0.0,
    "output_dropout": 0.0,
    "frequencies": rotary_frequencies(P).tolist(),
}


def module(kind: type[nn.Module], implementation: str, **facts: Any) -> Any:
    torch.manual_seed(0)
    config = SimpleNamespace(kvfold={**FACTS, **facts}, _attn_implementation=implementation)
    return kind(config, 0).double().eval()


def run(attention: Any, x: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None) -> Tensor:
    with torch.no_grad():
        return attention(x, attention_mask=mask, past_key_values=cache)[0]


def heads(projected: Tensor, count: int) -> Tensor:
    return projected.unflatten(-1, (count, -1)).transpose(1, 2)


def causal() -> Tensor:
    return torch.ones(T, T).tril().bool()[None, None]


@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize(("implementation", "softcap"), [("sdpa", None), ("eager", None), ("eager", 2.0)])
def test_grouped_attention_is_that_of_the_core(groups: int, implementation: str, softcap: float | None) -> None:
    attention = module(
        modeling_kvfold.GroupedSelfAttention, implementation, kv_heads=groups, softcap=softcap, sliding_window=None
    )
    x = torch.randn(B, T, E).double()
    tables = rotary_tables(torch.arange(T), rotary_frequencies(P), torch.float64)
    with torch.no_grad():
        query, key = (
            apply_rotary(heads(p(x), n), tables) for p, n in ((attention.q_proj, H), (attention.k_proj, groups))
        )
        value = heads(attention.v_proj(x), groups)
        grouped = query.unflatten(1, (groups, -1))
        z = blocked_attention(grouped, key, value, Visibility(), 0.3, softcap=softcap).flatten(1, 2)
        expected = attention.o_proj(z.transpose(1, 2).flatten(2))
    torch.testing.assert_close(run(attention, x, causal()), expected, rtol=1e-6, atol=1e-6)  # float32 rotary tables


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", range(1, T))
def test_latent_attention_is_that_of_the_core_at_every_split(implementation: str, prefix: int) -> None:
    attention = module(modeling_kvfold.LatentSelfAttention, implementation, kv_rank=R, rope_dim=P)
    x = torch.randn(B, T, E).double()
    tables = rotary_tables(torch.arange(T), rotary_frequencies(P), torch.float64)
    with torch.no_grad():
        query, down = heads(attention.q_proj(x), H), attention.kv_down_proj(x)
        latent = torch.cat([down[..., :R], apply_rotary(down[:, None, :, R:], tables)[:, 0]], -1)
        ups = (part.weight.view(H, D, R) for part in (attention.k_up_proj, attention.v_up_proj))
        z = latent_attention(
            query[..., :D], apply_rotary(query[..., D:], tables), latent, *ups, absorbed=False, scale=0.3
        )
        expected = attention.o_proj(z.transpose(1, 2).flatten(2))
    cache = DynamicCache()
    found = [run(attention, x[:, :prefix], causal()[..., :prefix, :prefix], cache)]
    found += [run(attention, x[:, t : t + 1], None, cache) for t in range(prefix, T)]  # absorbed
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-6, atol=1e-6)
