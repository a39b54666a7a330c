"""A checkpoint's stream computes what the stock model computes, for every family, one layer at a
time.
"""

from unittest.mock import Mock

import pytest
import torch
from helpers import precision
from helpers.attention import random_tokens
from helpers.cases import mostly_slow
from helpers.checkpoints import stock_model, tensors
from helpers.walks import run_stream

from kvfold.convert.checkpoint.files import read_config
from kvfold.convert.families.family import list_supported_model_types
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.stock import ModelHead


@pytest.fixture
def tiny(tiny_family):
    """``tiny(family)``: the stock model, its config.json and its tensors as they are stored."""

    def tiny(family, **changes):
        folder = tiny_family(family, **changes)
        # eager: with some transformers, gemma2's default attention leaves out its soft cap
        model = stock_model(folder, dtype=torch.float32, attn_implementation="eager")
        return model, read_config(folder)[0], tensors(folder)

    return tiny


@pytest.fixture
def tokens():
    return random_tokens(3, 17)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *mostly_slow(
            [(name, {"num_key_value_heads": 2}) for name in list_supported_model_types()], 4
        ),
        ("llama", {"tie_word_embeddings": True, "hidden_size": 48, "head_dim": 10}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        ("youtu", {}),
        ("deepseek_v3", {}),
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_and_cache_are_those_of_the_stock_model(family, changes, tiny, tokens):
    """float64 is nearer to the truth; its dtype does not change what the cache holds."""
    model, config, stored = tiny(family, **changes)
    expected = model(tokens).logits
    assert expected.std() > 0.05
    head = ModelHead(model)
    states = head.compute_states(tokens)
    torch.testing.assert_close(head.compute_logits(states[1:, 3:7]), expected[1:, 3:7])
    stream = CheckpointStream(config, stored.__getitem__, stored)
    found = run_stream(stream, tokens)
    torch.testing.assert_close(found, expected, **precision.LOGITS)
    exact = run_stream(stream.to(dtype=torch.float64), tokens)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    cache = model(tokens[:1, :2], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 2
    assert stream.measure_cache_bytes_per_token() == held
    assert stream.to(dtype=torch.bfloat16).measure_cache_bytes_per_token() == held
    halved = CheckpointStream({**config, "dtype": "bfloat16"}, stored.__getitem__, stored)
    assert halved.measure_cache_bytes_per_token() == held // 2


def test_only_the_open_layer_is_in_memory(tiny, tokens):
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
def test_a_student_reads_its_own_tensors_first_and_shares_the_rest(family, shared, tiny):
    _, config, stored = tiny(family)
    _, changed_config, changed = tiny(family, num_key_value_heads=4)
    new = {name: changed[name] for name in changed if "self_attn" in name}
    read = Mock(side_effect={**stored, **new}.__getitem__)
    source = CheckpointStream(config, stored.__getitem__, stored)
    student = CheckpointStream(changed_config, read, stored, teacher=source, changed=new)
    with source.open_layer(0) as before, student.open_layer(0) as after:
        assert after.tensors[shared] is before.tensors[shared]
        names = {call.args[0] for call in read.mock_calls}
        assert names == {name for name in new if ".layers.0." in name}


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_text_of_another_length_gets_its_own_masks_and_frequencies(family, tiny, tokens):
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 8} if family == "llama" else {}
    model, config, stored = tiny(family, **changes)
    stream = CheckpointStream(config, stored.__getitem__, stored)
    for part in (tokens[:, :6], tokens, tokens[:1, :3]):
        with torch.no_grad():
            expected = model(part).logits
        torch.testing.assert_close(run_stream(stream, part), expected, **precision.LOGITS)


def test_lower_precision_is_the_stock_model_loaded_in_that_precision(tiny_family, tiny, tokens):
    _, config, stored = tiny("llama")
    stream = CheckpointStream(config, stored.__getitem__, stored).to(dtype=torch.bfloat16)
    with torch.no_grad():
        expected = stock_model(tiny_family("llama"), dtype=torch.bfloat16)(tokens).logits
    torch.testing.assert_close(run_stream(stream, tokens), expected)
