"""Loaded models as streams: what stock transformers computes, layer by layer, with the model left
as it was.
"""

import pytest
import torch
from helpers import precision
from helpers.attention import DECODERS, attention_maps, random_tokens, tiny_decoder
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from kvfold.attention.drift.streams import make_layer_stream


@torch.no_grad()
def run(stream, tokens):
    """The logits and the output of every layer."""
    hidden = stream.embed(tokens)
    outputs = []
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            outputs.append(layer(hidden))
        hidden = outputs[-1].hidden
    return stream.compute_logits(hidden), outputs


@pytest.mark.parametrize("family", DECODERS)
def test_a_stream_computes_exactly_what_the_model_does(family):
    model = tiny_decoder(family)
    tokens = random_tokens()
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    stream = make_layer_stream(model)
    logits, outputs = run(stream, tokens)
    assert torch.equal(logits, expected.logits)
    for output, hidden in zip(outputs[:-1], expected.hidden_states[1:], strict=False):
        assert torch.equal(output.hidden, hidden)
    with stream.open_layer(0) as layer, torch.no_grad():
        attention = layer.attend(stream.embed(tokens))
    assert torch.equal(outputs[0].attention, attention.attention)
    assert torch.equal(outputs[0].attention_input, attention.attention_input)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt2"])
@torch.no_grad()
def test_queries_and_keys_explain_the_attention(family):
    """Maps from the recorded queries and keys are the model's own."""
    model = tiny_decoder(family, attn_implementation="eager")
    tokens = random_tokens()
    maps = model(tokens, output_attentions=True).attentions
    for output, expected in zip(run(make_layer_stream(model), tokens)[1], maps, strict=True):
        weights = attention_maps(
            output.query, output.key, output.scale, expected > 0, output.softcap
        )
        assert_close(weights, expected, **precision.ACTIVATIONS)


def test_the_model_is_left_as_it_was():
    model = tiny_decoder(attention_dropout=0.5).train()
    tokens = random_tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = list(model.model.layers)
    run(make_layer_stream(model, dtype=torch.float64), tokens)
    # without dropout
    assert torch.equal(
        run(make_layer_stream(model), tokens)[0], run(make_layer_stream(model), tokens)[0]
    )
    make_layer_stream(model).measure_cache_bytes_per_token()
    assert model.config._attn_implementation == "sdpa"
    assert list(model.model.layers) == layers
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_a_stream_in_another_dtype_is_the_model_cast(family, tmp_path):
    model = tiny_decoder(family)
    tokens = random_tokens()
    wide, outputs = run(make_layer_stream(model, dtype=torch.float64), tokens)
    assert wide.dtype == outputs[0].query.dtype == torch.float64
    assert_close(wide.float(), model(tokens).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    logits, _ = run(make_layer_stream(model, dtype=torch.bfloat16), tokens)
    assert torch.equal(logits, half(tokens).logits)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tiny_decoder("gpt2"), 2 * 3 * 4 * 8 * 4),
        (tiny_decoder("llama").bfloat16(), 2 * 3 * 2 * 8 * 2),
        (tiny_decoder("deepseek_v3"), 3 * (12 + 4) * 4),
    ],
)
def test_cache_bytes_are_those_of_the_formulas(model, expected):
    assert make_layer_stream(model).measure_cache_bytes_per_token() == expected
