"""The attention modules of tiny transformers models against this package fed with their weights, to
1e-5 in float32.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3Model,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5Model,
)

from kvfold.attention import GroupedAttention, LatentAttention, rotary_frequencies

B = 2
T = 11
E = 32
H = 4
D = E // H


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 1e-2, "outputs this small would agree by chance"


def louder(model: nn.Module) -> nn.Module:
    """Weights far enough from zero for scores, and with them the masks, to matter."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(
            parameter, 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.2
        )
    return model.eval()


def record(module: nn.Module, model: nn.Module, **inputs) -> tuple[Tensor, dict, Tensor]:
    """The arguments of ``module`` (hidden states, others) and its output inside
    ``model(**inputs)``.
    """
    seen: list = []

    def hook(_, arguments, keywords, output):
        given = dict(zip(("hidden_states", "key_value_states"), arguments, strict=False)) | keywords
        seen.append((given.pop("hidden_states"), given, output[0]))

    handle = module.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[-1]


def tokens() -> Tensor:
    return torch.randint(3, 64, (B, T))


def grouped(
    query: nn.Module, key: nn.Module, value: nn.Module, output: nn.Module, **options
) -> GroupedAttention:
    options = {"heads": H, "kv_heads": H, "head_dim": D, **options}
    return GroupedAttention(query=query, key=key, value=value, output=output, **options)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@torch.no_grad()
def test_llama(kv_heads, padding):
    sizes = {"vocab_size": 64, "hidden_size": E, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": H, "num_key_value_heads": kv_heads, "attention_bias": True}
    model = louder(LlamaModel(LlamaConfig(**sizes, **heads)))
    stock = model.layers[1].self_attn
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    x, _, expected = record(
        stock, model, input_ids=tokens(), attention_mask=mask, position_ids=positions
    )
    ours = grouped(
        stock.q_proj,
        stock.k_proj,
        stock.v_proj,
        stock.o_proj,
        kv_heads=kv_heads,
        frequencies=rotary_frequencies(D),
    )
    found = ours(x, starts=torch.tensor([0, padding]), positions=positions)
    close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_t5_with_its_relative_bias_and_its_cross_attention(part):
    config = T5Config(
        vocab_size=64, d_model=E, d_kv=D, d_ff=64, num_layers=2, num_heads=H, dropout_rate=0.0
    )
    model = louder(T5Model(config))
    mask = torch.ones(B, T, dtype=torch.long)
    ids = tokens()
    if part == "cross":
        mask[1, 6:] = 0
        stock = model.decoder.block[1].layer[1].EncDecAttention
        x, given, expected = record(
            stock, model, input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :7]
        )
        given = {"memory": given["key_value_states"], "lengths": mask.sum(1)}
    else:
        stock = getattr(model, part).block[0].layer[0].SelfAttention
        x, _, expected = record(stock, model, input_ids=ids, decoder_input_ids=ids)
        given = {"bias": stock.compute_bias(T, T)}
    options = {"scale": 1.0, "causal": part == "decoder", "cross": part == "cross"}
    close(grouped(stock.q, stock.k, stock.v, stock.o, **options)(x, **given), expected)


@pytest.mark.parametrize("query_rank", [None, 12])
@torch.no_grad()
def test_deepseek_v3(query_rank):
    sizes = {"vocab_size": 64, "hidden_size": E, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 16,
    }
    dims = {
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
    }
    config = DeepseekV3Config(**sizes, **heads, **dims)
    model = louder(DeepseekV3Model(config))
    stock = model.layers[1].self_attn
    x, _, expected = record(stock, model, input_ids=tokens())
    query = (
        stock.q_proj
        if query_rank is None
        else nn.Sequential(stock.q_a_proj, stock.q_a_layernorm, stock.q_b_proj)
    )
    ours = LatentAttention(
        query=query,
        down=stock.kv_a_proj_with_mqa,
        latent_norm=stock.kv_a_layernorm,
        up=stock.kv_b_proj,
        output=stock.o_proj,
        heads=H,
        kv_rank=16,
        rope_dim=6,
        nope_dim=10,
        value_dim=12,
        frequencies=rotary_frequencies(6),
    )
    for absorbed in (False, True):
        close(ours(x, absorbed=absorbed), expected)
