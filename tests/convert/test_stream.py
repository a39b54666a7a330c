"""A checkpoint's stream computes what the stock model computes, for every family, one layer at a time."""

from typing import Any

import pytest
import torch
from kvfold.convert.stream import CheckpointStream
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = {"sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"head_dim": 12},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 12},
    "gemma": {"head_dim": 12},
    "gemma2": {
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 0.5,
        **WINDOW,
    },
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window_pattern": 3, **WINDOW},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"pad_token_id": 0, **WINDOW},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": WINDOW,
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "nemotron": {},
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "attention_bias": True,
    },
    "deepseek_v3-experts": {
        "num_key_value_heads": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
    },
}


def tiny(family: str, **changes: Any) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A random model of ``family`` with its config.json and its tensors as they would be stored."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split("-")[0], **{**SMALL, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter) * 0.2 if parameter.dim() == 1 else torch.randn_like(parameter) * 0.1
            )
    stored = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight")
    return model, config.to_dict(), {name: tensor.detach().clone() for name, tensor in stored.items()}


def run(stream: CheckpointStream, tokens: Tensor) -> Tensor:
    hidden = stream.embed(tokens)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer, torch.no_grad():
            hidden = layer(hidden).hidden
    return stream.logits(hidden)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_stock_forward(family: str, tokens: Tensor) -> None:
    model, config, stored = tiny(family)
    with torch.no_grad():
        expected = model(tokens).logits
    found = run(CheckpointStream(config, stored.__getitem__, stored), tokens)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
