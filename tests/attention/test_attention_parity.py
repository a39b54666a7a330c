"""The attention modules of tiny transformers models against this package fed with their weights, to
1e-5 in float32.
"""

import pytest
import torch
from helpers.attention import random_tokens
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3Model, LlamaConfig, LlamaModel

from kvfold.attention import GroupedAttention, LatentAttention, rotary_frequencies

B = 2
T = 11
E = 32
H = 4
D = 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": E,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
}


def assert_equal(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 1e-2, "outputs this small would agree by chance"


def initialize(model):
    """Weights far enough from zero for scores, and with them the masks, to matter."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name.lower() and name.endswith("weight")
        nn.init.normal_(parameter, float(is_norm), 0.2)
    return model.eval()


def record(module, model, **inputs):
    """The hidden states and the output of ``module`` inside ``model(**inputs)``."""
    calls = []

    def hook(_, args, kwargs, output):
        calls.append((kwargs["hidden_states"], output[0]))

    handle = module.register_forward_hook(hook, with_kwargs=True)
    model(**inputs)
    handle.remove()
    return calls[0]


@pytest.mark.parametrize(("kv_heads", "padding"), [(4, 0), (2, 4), (1, 4)])
@torch.no_grad()
def test_llama(kv_heads, padding):
    config = LlamaConfig(**SIZES, num_key_value_heads=kv_heads, attention_bias=True)
    model = initialize(LlamaModel(config))
    stock = model.layers[1].self_attn
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    x, expected = record(
        stock, model, input_ids=random_tokens(B, T), attention_mask=mask, position_ids=positions
    )
    module = GroupedAttention(
        query=stock.q_proj,
        key=stock.k_proj,
        value=stock.v_proj,
        output=stock.o_proj,
        heads=H,
        kv_heads=kv_heads,
        head_dim=D,
        frequencies=rotary_frequencies(D),
    )
    result = module(x, starts=torch.tensor([0, padding]), positions=positions)
    assert_equal(result[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("query_rank", [None, 12])
@torch.no_grad()
def test_deepseek_v3(query_rank):
    config = DeepseekV3Config(
        **SIZES,
        num_key_value_heads=H,
        q_lora_rank=query_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=12,
        first_k_dense_replace=2,
    )
    model = initialize(DeepseekV3Model(config))
    stock = model.layers[1].self_attn
    x, expected = record(stock, model, input_ids=random_tokens(B, T))
    if query_rank is None:
        query = stock.q_proj
    else:
        query = nn.Sequential(stock.q_a_proj, stock.q_a_layernorm, stock.q_b_proj)
    module = LatentAttention(
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
    assert_equal(module(x, absorbed=False), expected)
    assert_equal(module(x, absorbed=True), expected)
