"""``absorb``: the same outputs as stock transformers, over the same latent cache, in every way
models are used.
"""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from helpers import precision
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Mistral4Config,
    Mistral4ForCausalLM,
    StaticCache,
    YoutuConfig,
    YoutuForCausalLM,
)

from kvfold.attention import absorb, unabsorb
from kvfold.attention import deepseek as am

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
GROWING = {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
VARIANTS = {
    "v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {"q_lora_rank": None}),
    "v3-query-latent": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"q_lora_rank": 20, "attention_bias": True},
    ),
    "v3-half": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"q_lora_rank": None, "rope_interleave": False},
    ),
    "v3-yarn": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"q_lora_rank": 20, "rope_parameters": YARN},
    ),
    "youtu": (YoutuForCausalLM, YoutuConfig, {"q_lora_rank": 20, "attention_bias": True}),
    "mistral4": (
        Mistral4ForCausalLM,
        Mistral4Config,
        {"q_lora_rank": 20, "rope_parameters": GROWING},
    ),
    "v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {"q_lora_rank": None, "attention_bias": True}),
    "v2-query-latent-yarn": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {"q_lora_rank": 20, "rope_parameters": YARN},
    ),
}


def tiny(variant="v3", dtype=torch.float32, **changes):
    """A random model whose attention matters: weights of unit scale, norms and biases away from
    where they start.
    """
    kind, config, particular = VARIANTS[variant]
    torch.manual_seed(5)
    model = kind(config(**{**SIZES, **particular, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval().to(dtype)


def pair(variant="v3", **changes):
    stock = tiny(variant, **changes)
    return stock, absorb(copy.deepcopy(stock))


def prompt(batch=3, length=9):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(2))


def decode(model, tokens, splits, cache=None, **options):
    """Logits of every token, fed in pieces."""
    cache = cache if cache is not None else DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [
            model(piece, past_key_values=cache, use_cache=True, **options).logits
            for piece in tokens.split(splits, 1)
        ]
    return torch.cat(pieces, 1), cache


@pytest.fixture
def calls(monkeypatch):
    """The queries of each call of the absorbed path."""
    seen = []
    plain = am._decode
    monkeypatch.setattr(
        am,
        "_decode",
        lambda this, hidden, *rest: seen.append(hidden.shape[1]) or plain(this, hidden, *rest),
    )
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_decoding_equals_stock(variant, attention, calls):
    stock, absorbed = pair(variant)
    for model in (stock, absorbed):
        model.set_attn_implementation(attention)
    tokens = prompt(length=14)
    splits = [8, 1, 1, 3, 1]
    expected, before = decode(stock, tokens, splits)
    found, after = decode(absorbed, tokens, splits)
    torch.testing.assert_close(found, expected, **precision.LOGITS)
    assert calls == [1, 1, 1, 1, 3, 3, 1, 1]  # two layers; the prompt is explicit
    for mine, theirs in zip(after.layers, before.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, **precision.LOGITS)
        assert mine.values.shape == theirs.values.shape == (3, 1, 14, 8)
    if attention == "eager":
        expected = stock(prompt(3, 1), past_key_values=before, output_attentions=True).attentions
        found = absorbed(prompt(3, 1), past_key_values=after, output_attentions=True).attentions
        torch.testing.assert_close(found, expected, **precision.ACTIVATIONS)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (3, {"do_sample": True, "top_k": 20}),
        (3, {"cache_implementation": "static"}),
        (3, {"num_return_sequences": 2, "num_beams": 2}),
        (1, {"prompt_lookup_num_tokens": 3}),
    ],
    ids=["sampling", "static", "beams", "speculative"],
)
def test_generate_gives_the_same_tokens(batch, options, calls):
    tokens = prompt(batch)
    tokens[0, :4] = 0
    mask = (tokens > 0).long()
    texts = []
    for model in pair("v3-query-latent"):
        torch.manual_seed(11)
        text = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, disable_compile=True, **options
        )
        texts.append(text.tolist())
    assert len(texts[0][0]) == tokens.shape[1] + 12
    assert texts[0] == texts[1]
    assert len(calls) >= 8


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_begun_by_one_form_is_continued_by_the_other(kind):
    stock, absorbed = pair()
    tokens = prompt(length=12)
    expected, _ = decode(stock, tokens, [7, 1, 1, 1, 1, 1])
    for first, second in ((stock, absorbed), (absorbed, stock)):
        cache = None if kind == "dynamic" else StaticCache(config=stock.config, max_cache_len=20)
        begun, cache = decode(first, tokens[:, :9], [7, 1, 1], cache)
        ended, _ = decode(second, tokens[:, 9:], [1, 1, 1], cache)
        torch.testing.assert_close(torch.cat([begun, ended], 1), expected, **precision.LOGITS)
    # a prompt so short that absorption pays from the start
    assert_decodes_alike(stock, absorbed, [2, 1, 1, 1], static=kind == "static")


def assert_decodes_alike(stock, absorbed, splits, static=False):
    """Logits of stock and absorbed form, fed in pieces."""
    logits = []
    for model in (stock, absorbed):
        cache = StaticCache(config=stock.config, max_cache_len=16) if static else None
        logits.append(decode(model, prompt(length=sum(splits)), splits, cache)[0])
    torch.testing.assert_close(*reversed(logits), **precision.LOGITS)


@pytest.mark.parametrize("cached", [False, True])
def test_training_is_what_it_was(cached):
    grads = []
    for model in pair("v3-query-latent"):
        model.train()
        cache = DynamicCache(config=model.config) if cached else None
        if cached:
            model(prompt(), past_key_values=cache)
        model(
            prompt(3, 1 if cached else 9), past_key_values=cache
        ).logits.square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], **precision.ACTIVATIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["v3-query-latent", "v2"])
def test_half_precision_is_no_worse_than_stock(variant, dtype):
    tokens = prompt(4, 40)
    splits = [32] + [1] * 8
    exact, _ = decode(tiny(variant, dtype).double(), tokens, splits)
    errors = []
    for model in (tiny(variant, dtype), absorb(tiny(variant, dtype))):
        found, _ = decode(model, tokens, splits)
        errors.append((found.double() - exact)[:, 32:].square().mean().sqrt())
    assert errors[0] > 0
    assert errors[1] <= 2 * errors[0]


@torch.no_grad()
def test_under_autocast_absorbed_models_are_the_stock_ones():
    """Rotary queries and latents are wider there than the products."""
    stock, absorbed = pair("v3-query-latent")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (decode(model, prompt(), [6, 1, 1, 1])[0] for model in (stock, absorbed))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compiled_decoding_equals_stock():
    stock, absorbed = pair("v3-query-latent", num_hidden_layers=1)
    compiled = torch.compile(absorbed, backend="eager", fullgraph=True)
    compiled.config = absorbed.config
    assert_decodes_alike(stock, compiled, [9, 1, 1], static=True)


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize(
    ("spread", "steps"),
    # offloaded weights are not at hand, so those steps are explicit
    [
        (lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True), 6),
        (lambda model: cpu_offload(model, torch.device("cpu")), 0),
    ],
    ids=["dispatched", "offloaded"],
)
def test_models_spread_over_devices(hooks_first, spread, steps, calls):
    """accelerate wraps each module's forward."""
    expected, _ = decode(tiny(), prompt(length=12), [9, 1, 1, 1])
    model = absorb(spread(tiny())) if hooks_first else spread(absorb(tiny()))
    for form in (lambda model: model, unabsorb):
        logits, _ = decode(form(model), prompt(length=12), [9, 1, 1, 1])
        torch.testing.assert_close(logits, expected, **precision.LOGITS)
    assert len(calls) == steps


def test_an_adapter_on_the_up_projection_is_obeyed():
    class Adapted(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    stock, absorbed = pair()
    for model in (stock, absorbed):
        model.model.layers[0].self_attn.kv_b_proj.__class__ = Adapted
    assert_decodes_alike(stock, absorbed, [9, 1, 1, 1])


def test_absorbed_models_are_pickled_saved_and_restored(tmp_path):
    stock, absorbed = pair()
    assert absorb(absorbed) is absorbed
    assert absorbed.state_dict().keys() == stock.state_dict().keys()
    pickled = pickle.loads(pickle.dumps(absorbed))
    assert [type(m) for m in pickled.modules()] == [type(m) for m in absorbed.modules()]
    absorbed.save_pretrained(tmp_path)
    config = DeepseekV3Config.from_pretrained(tmp_path)
    assert config.architectures == ["DeepseekV3ForCausalLM"]
    assert [type(m) for m in unabsorb(absorbed).modules()] == [type(m) for m in stock.modules()]
