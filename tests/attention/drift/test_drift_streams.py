"""Loaded models as streams: what stock transformers computes, layer by layer, with the model left
as it was.
"""

import pytest
import torch
from helpers import precision
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvfold.attention.drift.profile import distance_profile
from kvfold.attention.drift.streams import LayerStream, as_stream

IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = IDS | {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT = IDS | {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "llama": LLAMA,
    "gemma2": (
        LLAMA | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
    ),
    "deepseek_v3": LLAMA | MLA,
    "mixtral": LLAMA | {"num_local_experts": 4},
    "gpt2": GPT,
    "bloom": {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4},
}
NO_MAPS = {"bloom"}  # its attention does not go through transformers' attention interface


def tiny(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(FAMILIES[family] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


def some_tokens(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def walk(stream: LayerStream, tokens: torch.Tensor) -> tuple[torch.Tensor, list]:
    hidden = stream.embed(tokens)
    outputs = []
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            outputs.append(layer(hidden))
        hidden = outputs[-1].hidden
    return stream.logits(hidden), outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_computes_exactly_what_the_model_does(family):
    model = tiny(family)
    tokens = some_tokens()
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    stream = as_stream(model)
    logits, outputs = walk(stream, tokens)
    assert all(
        (output.query is None) == (output.context is None) == (family in NO_MAPS)
        for output in outputs
    )
    assert torch.equal(logits, expected.logits)
    for index, output in enumerate(outputs[:-1]):
        assert torch.equal(output.hidden, expected.hidden_states[index + 1])
    with stream.open_layer(0) as layer, torch.no_grad():
        part = layer.attend(stream.embed(tokens))
    assert torch.equal(outputs[0].attention, part.attention)
    assert torch.equal(outputs[0].attention_input, part.attention_input)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NO_MAPS))
def test_queries_keys_and_heads_explain_the_attention(family):
    """Maps from the captured queries and keys are the model's own, and head contributions add up to
    its output.
    """
    model = tiny(family, attn_implementation="eager")
    tokens = some_tokens()
    with torch.no_grad():
        maps = model(tokens, output_attentions=True).attentions
    _, outputs = walk(as_stream(model), tokens)
    for output, weights in zip(outputs, maps, strict=True):
        profile = distance_profile(
            output.query, output.key, output.scale, window=output.window, softcap=output.softcap
        )
        rows = torch.stack(
            [weights.mean(0).diagonal(-d, 1, 2).sum(1) for d in range(weights.shape[-1])], 1
        )
        torch.testing.assert_close(
            profile.float(), rows / weights.shape[-1], **precision.ACTIVATIONS
        )
        summed = torch.einsum("bthd,ehd->bte", output.context, output.output_weight)
        difference = output.attention - summed
        # all that is left is the output projection's bias, the same everywhere
        torch.testing.assert_close(
            difference, difference[:1, :1].expand_as(difference), rtol=0, atol=1e-5
        )


def test_the_model_is_left_as_it_was():
    model = tiny("llama", attention_dropout=0.5).train()
    tokens = some_tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = list(model.model.layers)
    walk(as_stream(model, dtype=torch.float64), tokens)
    # without dropout
    assert torch.equal(walk(as_stream(model), tokens)[0], walk(as_stream(model), tokens)[0])
    as_stream(model).cache_bytes_per_token()
    assert model.config._attn_implementation == "sdpa"
    assert list(model.model.layers) == layers
    assert all(part.training and not part._forward_hooks for part in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_stream_in_another_dtype_is_the_model_cast(family, tmp_path):
    model = tiny(family)
    tokens = some_tokens()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for dtype, cast, close in ((torch.float64, model, 1e-4), (torch.bfloat16, half, 0)):
        logits, outputs = walk(as_stream(model, dtype=dtype), tokens)
        assert logits.dtype == outputs[0].query.dtype == dtype
        with torch.no_grad():
            expected = cast(tokens).logits
        torch.testing.assert_close(logits.to(expected.dtype), expected, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tiny("llama", num_key_value_heads=1), 2 * 3 * 8 * 4),
        (tiny("gpt2"), 2 * 3 * 4 * 8 * 4),
        (tiny("llama").bfloat16(), 2 * 3 * 2 * 8 * 2),
        (tiny("deepseek_v3"), 3 * (12 + 4) * 4),
    ],
    ids=["MQA", "MHA", "GQA bfloat16", "MLA"],
)
def test_cache_bytes_are_those_of_the_formulas(model, expected):
    assert as_stream(model).cache_bytes_per_token() == expected
