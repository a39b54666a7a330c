"""Tiny random checkpoints of every family, made by the stock classes: each switches on what is
particular to it.
"""

from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
}
GROWING: dict[str, Any] = {  # queries grow from position 16 on
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
SCALED: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "mlp_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "qwen2": WINDOW,
    "qwen3": {**WINDOW, "head_dim": 16},
    "qwen2_moe": {**EXPERTS, **WINDOW, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
    },
    "phi": {"qk_layernorm": True},
    "phi3": {"sliding_window": 8},
    "olmo": {"clip_qkv": 0.8},
    "olmo2": {"attention_bias": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 8},
    "granite": SCALED,
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8},
    "cohere": {"use_qk_norm": True, "attention_bias": True},
    "nemotron": {"attention_bias": True, "mlp_bias": True},
    "apertus": {"attention_bias": True},
    "arcee": {"attention_bias": True, "mlp_bias": True},
    "cohere2": {"attention_bias": True, "sliding_window": 8, "sliding_window_pattern": 2},
    "cwm": {
        "sliding_window": 8,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "helium": {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {"head_dim": 16, "attention_bias": True},
    "hyperclovax": SCALED,
    "internlm3": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {"head_dim": 16, "sliding_window": 8, "rope_parameters": GROWING},
    "olmo3": {
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed_oss": {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    "vaultgemma": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
}

# Families whose stock class gives every query head a key and a value of its own: they become layout
# kvfold.
CLASSICS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
        "bias": True,
        "ffn_hidden_size": 48,
    },
    "gpt2": {"n_inner": 48},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"n_inner": 48, "rotary_dim": 4},
    "mpt": {"max_seq_len": 128},
    "opt": {"ffn_dim": 48},
}


def tiny_config(name: str, changes: dict[str, Any]) -> Any:
    """The stock config of the tiny model of family ``name``."""
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **{**SIZES, **(FAMILIES | CLASSICS)[name], **changes})


def skip_unknown(name: str) -> None:
    """Skip the test if the installed transformers, an older supported one, has no model type
    ``name``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {name}")


def make_tiny(name: str, folder: Path, changes: dict[str, Any]) -> None:
    """Saves a random model of family ``name`` in float32, none of its norms and biases at the value
    it starts from.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(tiny_config(name, changes), dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or ".ln_" in path or path.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
