"""A checkpoint's stream computes what the stock model computes, for every family, one layer at a
time.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_models
import torch
from helpers import precision
from helpers.cases import mostly_slow
from helpers.walks import run_stream
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import list_supported_model_types
from kvfold.convert.stream.checkpoint_stream import CheckpointStream

SMALL = tiny_models.SIZES | {"hidden_size": 48, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
WINDOW = {"sliding_window": 5}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    "gemma3_text": {"head_dim": 12, "sliding_window_pattern": 3, **WINDOW},
    "youtu": {**LATENT, "q_lora_rank": 20, "attention_bias": True},
    "deepseek_v3": {
        **LATENT,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
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
    config = AutoConfig.for_model(family, **{**SMALL, **MODELS[family], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
    stored = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight")
    return model, config.to_dict(), {name: tensor.clone() for name, tensor in stored.items()}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(
        0, SMALL["vocab_size"], (3, 17), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *mostly_slow(
            [(name, {"num_key_value_heads": 2}) for name in list_supported_model_types()], 4
        ),
        ("llama", {"tie_word_embeddings": True, "hidden_size": 48, "head_dim": 10}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ],
    ids=str,
)
def test_logits_of_every_family_equal_the_stock_forward(
    family: str, changes: Any, tiny_family: Any
) -> None:
    folder = tiny_family(family, **changes)
    tokens = torch.randint(3, 97, (3, 17), generator=torch.Generator().manual_seed(1))
    # eager: with some transformers, gemma2's default attention leaves out its soft cap
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = stock(tokens).logits
    checkpoint = open_checkpoint(str(folder))
    found = run_stream(
        CheckpointStream(checkpoint.config, checkpoint.read_tensor, checkpoint.tensors), tokens
    )
    checkpoint.close()
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, **precision.LOGITS)


@pytest.mark.parametrize("family", MODELS)
def test_logits_and_cache_of_latent_and_expert_models(family: str, tokens: Tensor) -> None:
    """As the stock model has them; float64 is nearer to the truth; its dtype does not change what
    the cache holds.
    """
    model, config, stored = tiny(family)
    short = tokens[:1, :2]
    with torch.no_grad():
        expected = model(tokens).logits
        cache = model(short, use_cache=True).past_key_values
    stream = CheckpointStream({**config, "dtype": "float32"}, stored.__getitem__, stored)
    found = run_stream(stream, tokens)
    torch.testing.assert_close(found, expected, **precision.LOGITS)
    exact = run_stream(stream.to(dtype=torch.float64), tokens)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    held = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert stream.cache_bytes_per_token() == held // short.numel()
    assert stream.to(dtype=torch.bfloat16).cache_bytes_per_token() == held // short.numel()
    halved = CheckpointStream({**config, "dtype": "bfloat16"}, stored.__getitem__, stored)
    assert halved.cache_bytes_per_token() == held // short.numel() // 2


def test_only_the_open_layer_is_in_memory(tokens: Tensor) -> None:
    _, config, stored = tiny("mixtral")
    read = Mock(side_effect=stored.__getitem__)
    stream = CheckpointStream(config, read, stored)
    hidden = stream.embed(tokens)
    read.reset_mock()
    with stream.open_layer(1) as layer:
        layer(hidden)
        names = [call.args[0] for call in read.mock_calls]
        assert sorted(names) == sorted(name for name in stored if ".layers.1." in name)
        held = layer.tensors
        assert held
    assert not held
    assert all(parameter.is_meta for parameter in stream._frame.model.parameters())


@pytest.mark.parametrize(
    ("family", "shared"), [("llama", "mlp.up_proj.weight"), ("mixtral", "mlp.experts.gate_up_proj")]
)
def test_a_student_reads_its_own_tensors_first_and_shares_the_rest(
    family: str, shared: str, tokens: Tensor
) -> None:
    source_model, config, stored = tiny(family)
    others = dict(source_model.named_parameters())
    expected_model, changed_config, changed = tiny(family, num_key_value_heads=3)
    new = {name: changed[name] for name in changed if "self_attn" in name}
    read = Mock(side_effect={**stored, **new}.__getitem__)
    source = CheckpointStream(config, stored.__getitem__, stored)
    student = CheckpointStream(changed_config, read, stored, teacher=source, changed=new)
    with source.open_layer(0) as before, student.open_layer(0) as after:
        assert after.tensors[shared] is before.tensors[shared]
        names = {call.args[0] for call in read.mock_calls}
        assert names == {name for name in new if ".layers.0." in name}
    with torch.no_grad():
        for name, parameter in expected_model.named_parameters():
            if "self_attn" not in name:
                parameter.copy_(others[name])
        torch.testing.assert_close(
            run_stream(student, tokens), expected_model(tokens).logits, **precision.LOGITS
        )


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_text_of_another_length_gets_its_own_masks_and_frequencies(
    family: str, tokens: Tensor
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 8} if family == "llama" else {}
    model, config, stored = tiny(family, **changes)
    stream = CheckpointStream(config, stored.__getitem__, stored)
    for part in (tokens[:, :6], tokens, tokens[:1, :3]):
        with torch.no_grad():
            expected = model(part).logits
        torch.testing.assert_close(run_stream(stream, part), expected, **precision.LOGITS)


def test_lower_precision_is_the_stock_model_loaded_in_that_precision(
    tmp_path: Path, tokens: Tensor
) -> None:
    model, config, stored = tiny("llama")
    model.save_pretrained(tmp_path)
    stream = CheckpointStream(config, stored.__getitem__, stored).to(dtype=torch.bfloat16)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(
            tokens
        ).logits
    torch.testing.assert_close(run_stream(stream, tokens), expected)


def test_missing_tensors_and_unknown_models_are_named(refused: Any) -> None:
    _, config, stored = tiny("mixtral")
    gone = [name for name in stored if "layers.2" in name and ("w2" in name or "q_proj" in name)]
    stream = CheckpointStream(config, stored.__getitem__, set(stored) - set(gone))
    with pytest.raises(InputError) as caught, stream.open_layer(2):
        pass
    assert sorted(caught.value.details) == [
        "model.layers.2.mlp.experts.down_proj",
        "model.layers.2.self_attn.q_proj.weight",
    ]
    with refused():
        CheckpointStream({"model_type": "nonesuch"}, stored.__getitem__, [])
