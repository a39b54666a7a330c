"""``absorb``: the same outputs as stock transformers, over the same latent cache, in every way
models are used.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from helpers import precision
from helpers.attention import random_tokens
from helpers.checkpoints import read_json
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from kvfold.attention import absorb, deepseek, unabsorb

VARIANTS = read_json(Path(__file__).with_name("absorb.json"))


def tiny(variant="deepseek_v3"):
    """A random model whose attention matters: weights of unit scale, norms and biases away from
    where they start.
    """
    torch.manual_seed(5)
    config = AutoConfig.for_model(variant.split()[0], **VARIANTS[variant])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval()


def pair(variant="deepseek_v3"):
    stock = tiny(variant)
    return stock, absorb(copy.deepcopy(stock))


@torch.no_grad()
def decode(model, tokens, splits, cache=None):
    """Logits of every token, fed in pieces, and the cache."""
    cache = cache or DynamicCache(config=model.config)
    pieces = [
        model(piece, past_key_values=cache, use_cache=True).logits
        for piece in tokens.split(splits, 1)
    ]
    return torch.cat(pieces, 1), cache


@pytest.fixture
def calls(monkeypatch):
    """The number of queries in each call of the absorbed path."""
    queries = []
    original = deepseek._attend_absorbed

    def count(layer, hidden, *rest):
        queries.append(hidden.shape[1])
        return original(layer, hidden, *rest)

    monkeypatch.setattr(deepseek, "_attend_absorbed", count)
    return queries


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_decoding_equals_stock(variant, calls):
    logits = []
    caches = []
    for model in pair(variant):
        result, cache = decode(model, random_tokens(3, 14), [8, 1, 1, 3, 1])
        logits.append(result)
        caches.append([layer.keys for layer in cache.layers])
        assert cache.layers[0].values.shape == (3, 1, 14, 8)
    assert_close(logits[1], logits[0], **precision.LOGITS)
    assert_close(caches[1], caches[0], **precision.LOGITS)
    # two layers; the prompt is explicit
    assert calls[:8] == [1, 1, 1, 1, 3, 3, 1, 1]


@torch.no_grad()
def test_eager_attention_is_the_stock_form_and_returns_its_maps(calls):
    _, absorbed = pair()
    absorbed.set_attn_implementation("eager")
    _, cache = decode(absorbed, random_tokens(3, 9), [8, 1])
    step = absorbed(random_tokens(3, 1), past_key_values=cache, output_attentions=True)
    assert step.attentions[0].shape == (3, 4, 1, 10)
    assert calls == []


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (3, {"do_sample": True, "top_k": 20}),
        (3, {"cache_implementation": "static"}),
        (3, {"num_return_sequences": 2, "num_beams": 2}),
        (1, {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_generate_gives_the_same_tokens(batch, options, calls):
    tokens = random_tokens(batch, 9)
    tokens[0, :4] = 0
    texts = []
    for model in pair():
        torch.manual_seed(11)
        text = model.generate(
            tokens,
            attention_mask=(tokens > 0).long(),
            max_new_tokens=12,
            disable_compile=True,
            **options,
        )
        texts.append(text)
    assert texts[0].shape[1] == tokens.shape[1] + 12
    assert torch.equal(texts[0], texts[1])
    assert len(calls) >= 8


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_cache_begun_by_one_form_is_continued_by_the_other(static, reverse):
    models = pair()
    tokens = random_tokens(3, 12)
    expected, _ = decode(models[0], tokens, [7, 1, 1, 1, 1, 1])
    first, second = reversed(models) if reverse else models
    cache = StaticCache(config=first.config, max_cache_len=20) if static else None
    begun, cache = decode(first, tokens[:, :9], [7, 1, 1], cache)
    continued, _ = decode(second, tokens[:, 9:], [1, 1, 1], cache)
    result = torch.cat([begun, continued], 1)
    assert_close(result, expected, **precision.LOGITS)


def test_gradients_with_a_cache_are_those_of_stock():
    grads = []
    for model in pair():
        model.train()
        cache = DynamicCache(config=model.config)
        model(random_tokens(3, 9), past_key_values=cache)
        model(random_tokens(3, 1), past_key_values=cache).logits.square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_close(grads[1], grads[0], **precision.ACTIVATIONS)


def test_under_autocast_absorbed_models_are_the_stock_ones():
    """Rotary queries and latents are wider there than the products."""
    stock, absorbed = pair()
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = decode(stock, random_tokens(3, 9), [6, 1, 1, 1])
        logits, _ = decode(absorbed, random_tokens(3, 9), [6, 1, 1, 1])
    assert_close(logits, expected)


@pytest.mark.slow
def test_compiled_decoding_equals_stock():
    stock, absorbed = pair()
    expected, _ = decode(stock, random_tokens(3, 11), [9, 1, 1])
    compiled = torch.compile(absorbed, backend="eager", fullgraph=True)
    cache = StaticCache(config=stock.config, max_cache_len=16)
    logits, _ = decode(compiled, random_tokens(3, 11), [9, 1, 1], cache)
    assert_close(logits, expected, **precision.LOGITS)


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("offloaded", [False, True])
def test_models_spread_over_devices(hooks_first, offloaded, calls):
    """accelerate wraps each module's forward; offloaded weights are not at hand, so those steps are
    explicit.
    """
    model = tiny()
    expected, _ = decode(model, random_tokens(3, 12), [9, 1, 1, 1])
    if not hooks_first:
        absorb(model)
    if offloaded:
        cpu_offload(model, torch.device("cpu"))
    else:
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
    for form in (absorb, unabsorb):
        logits, _ = decode(form(model), random_tokens(3, 12), [9, 1, 1, 1])
        assert_close(logits, expected, **precision.LOGITS)
    assert len(calls) == (0 if offloaded else 6)


def test_an_adapter_on_the_up_projection_is_obeyed():
    class Adapted(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    logits = []
    for model in pair():
        model.model.layers[0].self_attn.kv_b_proj.__class__ = Adapted
        logits.append(decode(model, random_tokens(3, 12), [9, 1, 1, 1])[0])
    assert_close(logits[1], logits[0], **precision.LOGITS)


def test_absorbed_models_are_pickled_saved_and_restored(tmp_path):
    stock, absorbed = pair()
    assert absorb(absorbed) is absorbed
    assert absorbed.state_dict().keys() == stock.state_dict().keys()
    pickled = pickle.loads(pickle.dumps(absorbed))
    assert list(map(type, pickled.modules())) == list(map(type, absorbed.modules()))
    absorbed.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["DeepseekV3ForCausalLM"]
    assert list(map(type, unabsorb(absorbed).modules())) == list(map(type, stock.modules()))
