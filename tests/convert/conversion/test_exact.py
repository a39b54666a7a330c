"""Exact conversions of extreme models: weights at the ends of what numbers hold, and norms on
queries and keys.
"""

import shutil

import pytest
import torch
from helpers import precision
from helpers.attention import random_tokens
from helpers.cases import mostly_slow
from helpers.checkpoints import (
    add_demo_tokenizer,
    compute_logits,
    run_conversion,
    stock_model,
    tensors,
)
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvfold.convert.measure.verify import verify_checkpoint

WIDTH = 32
TOKENS = random_tokens(2, 24)
SIZES = {
    "vocab_size": 2048,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}


def save(folder, model):
    model.save_pretrained(folder)
    add_demo_tokenizer(folder)
    return folder


def qwen3(eps=1e-6):
    """Heads as wide as the model; no norm has the weights that it starts from."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=128,
        rms_norm_eps=eps,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.copy_(1.0 + 0.5 * torch.rand(WIDTH))
    return model


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """All queries and keys have one length, so their norms do nothing: turned inputs of a norm
    without weights.

    The usual eps of that norm would let the lengths of the embeddings vary by 3e-6, and the logits
    by 9e-5.
    """
    model = qwen3(1e-12)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.copy_(
                    torch.linalg.qr(torch.randn(2, WIDTH, WIDTH)).Q.flatten(0, 1)
                )
    return save(tmp_path_factory.mktemp("steady"), model)


TEXT = {"samples": 8, "seq_len": 64}


def of_tokens(model):
    return model(TOKENS).logits


@pytest.mark.parametrize("method", ["principal", "svd"])
def test_norms_without_effect_convert_exactly(steady, out, method):
    latent = {"to": "mla", "kv_rank": WIDTH + 1, "rope_dim": 2 * WIDTH}
    run_conversion(steady, out, **latent, **TEXT, method=method)
    precision.assert_same_function(stock_model(out), stock_model(steady), of_tokens)


def test_identical_heads_fold_exactly_behind_their_norms(tmp_path, out):
    """Keys of least squares would lose a little here: held-out text leaves them aside."""
    model = qwen3()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight[WIDTH:] = projection.weight[:WIDTH]
    source = save(tmp_path / "source", model)
    run_conversion(source, out, to="mqa", **TEXT)
    precision.assert_same_function(stock_model(out), stock_model(source), of_tokens)


def test_layout_engine_is_exact_where_yarn_holds_the_frequencies(tmp_path, subtests):
    """One key head keeps every rotary pair, and the latent the whole input. The blends of both
    types begin and end at pairs; YaRN scales queries and keys too.
    """
    scaled = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
    blend = {"low_freq_factor": 1.0, "high_freq_factor": 1.01}
    tokens = random_tokens(1, 256)
    for kind, table in (("yarn", {}), ("llama3", blend)):
        torch.manual_seed(0)
        config = LlamaConfig(
            **SIZES,
            num_key_value_heads=1,
            max_position_embeddings=256,
            rms_norm_eps=1e-12,
            rope_parameters={"rope_type": kind, **scaled, **table},
        )
        source = save(tmp_path / kind, LlamaForCausalLM(config))
        out = tmp_path / f"{kind}-mla"
        latent = {"to": "mla", "kv_rank": WIDTH, "rope_dim": 16, "layout": "engine"}
        run_conversion(source, out, **latent, **TEXT, allow_growth=True)
        with subtests.test(kind):
            assert stock_model(out).config.rope_parameters["factor"] == 4.0
            precision.assert_same_function(
                stock_model(out), stock_model(source), lambda model: model(tokens).logits
            )


# Finite weights at the ends of what numbers hold: the result is finite, and exact where the source
# is.

ATTENTION = "qkvo"
WHOLE = {"to": "mla", "kv_rank": 17, "rope_dim": 16, "allow_growth": True}
HALF = {"to": "mla", "kv_rank": 8, "rope_dim": 8}
CASES = {  # what is multiplied by what, and conversions that lose nothing then
    "no attention": (ATTENTION, 0.0, [HALF, HALF | {"layout": "engine"}]),
    "no embedding": ("embed", 0.0, [HALF | {"layout": "engine"}]),
    "no norms": ("layernorm", 0.0, [HALF, HALF | {"layout": "engine"}]),
    "loud attention": (ATTENTION, 1e15, [WHOLE]),
    "loud embedding": ("embed", 1e15, [WHOLE]),
    "loud": ("layernorm", 1e15, [WHOLE]),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"hidden_size": 16, "intermediate_size": 24})
    return LlamaForCausalLM(config).state_dict(), config


@torch.no_grad()
def logits(folder):
    return of_tokens(stock_model(folder))


@pytest.mark.parametrize(
    ("part", "factor", "conversions"), mostly_slow(CASES.values(), 3), ids=CASES
)
def test_results_are_finite_and_exact_where_the_source_is(
    model, tmp_path, part, factor, conversions
):
    tensors, config = model
    names = [f"{each}_proj" for each in part] if part == ATTENTION else [part]
    changed = LlamaForCausalLM(config)
    scaled = {
        name: tensor * factor
        for name, tensor in tensors.items()
        if any(each in name for each in names)
    }
    changed.load_state_dict({**tensors, **scaled})
    source = save(tmp_path / "model", changed)
    expected = logits(source)
    assert expected.isfinite().all()
    for number, options in enumerate(conversions):
        out = tmp_path / str(number)
        run_conversion(source, out, **options, samples=4, seq_len=24)
        assert verify_checkpoint(out).problems == []
        torch.testing.assert_close(
            logits(out), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-5), ("gpt_oss", 1e-4)])
def test_identical_heads_fold_exactly(tiny_family, tmp_path, out, family, tolerance):
    """Twins that are no neighbors: query heads change places, each with its attention sink where
    the model has them.
    """
    made = tiny_family(family, vocab_size=2048, num_key_value_heads=4, attention_bias=True)
    source = shutil.copytree(made, tmp_path / "source")
    stored = tensors(source)
    for name, value in stored.items():
        if ".k_proj." in name or ".v_proj." in name:
            stored[name] = torch.cat([value[: len(value) // 2]] * 2)
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    run_conversion(source, out, to="gqa", kv_heads=2, group="similar", samples=8, seq_len=32)
    expected = compute_logits(source)
    error = (expected - compute_logits(out)).abs().max()
    assert error < tolerance * expected.abs().max()
    sinks = "model.layers.0.self_attn.sinks"
    if sinks in stored:
        assert stored[sinks].std() > 0.1
        assert torch.equal(tensors(out)[sinks], stored[sinks][[0, 1, 4, 5, 2, 3, 6, 7]])
