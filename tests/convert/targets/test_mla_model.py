"""Converted layers in the stock DeepSeek class: tiny models of every supported kind, loaded and run by transformers."""

import json
import math

import pytest
import torch
from helpers import precision
from helpers.checkpoints import stock_model
from helpers.layers import rotated
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvfold.convert.families.layout import layer_rotary, read_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.targets.mla.config import LatentTarget, mla_config, query_rank
from kvfold.convert.targets.mla.layout import mla_shapes, mlp_tensors, padding
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.mla.tensors import mla_tensors
from kvfold.convert.transforms.latent.latent import to_latent
from kvfold.convert.transforms.latent.slots import choose_slots, plain_slots, survey_layer
from kvfold.convert.transforms.latent.variants import live_norm, query_latent
from kvfold.convert.transforms.weights import LayerStatistics

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "mha": ("llama", {"num_key_value_heads": 4}),
    "gqa": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "wide-heads": ("mistral", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}),
    "wide-mha": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "biased": ("qwen2", {"num_key_value_heads": 2}),
    "output-bias": ("llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "partial": ("phi3", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "sliding_window": None}),
    "unrotated-layer": ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "use_sliding_window": False}),
    "llama3": ("llama", {"rope_parameters": {**ROPE, **RAMP, "rope_type": "llama3", "factor": 8.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn": ("llama", {"num_key_value_heads": 2, "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
}


def source_model(name):
    model_type, changes = MODELS[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


def source_config(model):
    return json.loads(model.config.to_json_string(use_diff=False))


def attention_statistics(model, tokens):
    """Every layer's attention inputs, and their second moments with a profile that favors the near past."""
    seen = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: seen.__setitem__(index, kwargs.get("hidden_states", (args or [0])[0])),
            with_kwargs=True,
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    profile = torch.arange(tokens.shape[1], 0, -1).double()
    profile = (profile / profile.sum()).expand(model.config.num_attention_heads, -1)
    flat = [seen[index].flatten(0, 1).double() for index in range(len(seen))]
    return flat, [LayerStatistics(x.T @ x / len(x), x.mean(0), len(x), profile) for x in flat]


class LatentAttention(nn.Module):
    """The formula of ``LatentWeights``, written out in float64."""

    def __init__(self, latent, normed=False):
        super().__init__()
        self.latent = latent.map(torch.Tensor.double)
        self.normed = normed

    def norm(self, rows):
        return rows / rows.square().mean(-1, keepdim=True).add(1e-6).sqrt() if self.normed else rows

    def forward(self, hidden_states, **_):
        w, x = self.latent, hidden_states
        c = self.norm(x @ w.down.T + (0 if w.down_bias is None else w.down_bias))
        key = rotated(x @ w.rope_key.T + (0 if w.rope_key_bias is None else w.rope_key_bias), w.theta)
        source, q_nope, q_rope = (x, w.q_nope, w.q_rope)
        if w.query is not None:
            source, q_nope, q_rope = self.norm(x @ w.query.down.T), w.query.q_nope, w.query.q_rope
        out = 0 if w.o_bias is None else w.o_bias
        for head in range(w.heads):
            nope = source @ q_nope[head].T + (0 if w.q_nope_bias is None else w.q_nope_bias[head])
            rope = source @ q_rope[head].T + (0 if w.q_rope_bias is None else w.q_rope_bias[head])
            score = nope @ (c @ w.uk[head].T).mT + rotated(rope, w.theta) @ key.mT
            future = torch.ones_like(score, dtype=torch.bool).triu(1)
            mixed = (score * w.scale).masked_fill(future, -math.inf).softmax(-1) @ (c @ w.uv[head].T)
            out = out + mixed @ w.o[:, head].T
        return out, None


def convert(model, target, folder, dtype=torch.float32):
    """Converts a loaded tiny model and writes it; returns the layers' LatentWeights."""
    bound = model_of(source_config(model))
    assert latent_problems(bound, target, allow_growth=True) == []
    inputs, statistics = attention_statistics(
        model, torch.randint(0, 101, (64, 24), generator=torch.Generator().manual_seed(1))
    )
    read = model.state_dict().__getitem__
    layers = range(bound.geometry.layers)
    weights = [read_layer(bound, layer, read) for layer in layers]
    rotaries = [layer_rotary(bound, layer) for layer in layers]
    surveys = [survey_layer(*parts) for parts in zip(weights, statistics, rotaries, strict=True)]
    choose = choose_slots if target.constant else plain_slots
    slots = choose(surveys, target.rope_kept(bound.geometry.rotary_dims))
    latents, rank = [], query_rank(bound, target)
    for layer in layers:
        scale = bound.layers[layer].scale
        parts = weights[layer], statistics[layer], rotaries[layer]
        latent = to_latent(*parts, slots, target.channels, scale=scale, centered=target.constant)
        latent = latent if rank is None else query_latent(latent, statistics[layer], rank - target.constant)
        latents.append(latent if target.constant else live_norm(latent, inputs[layer]))
    tensors = {}
    for layer, latent in enumerate(latents):
        tensors |= mla_tensors(latent, layer, target) | mlp_tensors(bound, layer, read)
    shapes = mla_shapes(bound, target)
    tensors |= {name: read(source) for name, (_, source) in shapes.items() if source is not None}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: item[0] for name, item in shapes.items()
    }
    written = mla_config(
        bound,
        target,
        slots.theta.tolist(),
        dtype=str(dtype).removeprefix("torch."),
    )
    save_file(
        {name: tensor.to(dtype).contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(written))
    return latents


def full(model):
    """A target that loses nothing: every rotary pair of every key head has a slot."""
    size = model_of(source_config(model)).geometry
    rows = 2 * size.kv_heads * size.head_dim
    return LatentTarget(min(rows, size.model_dim) + 1, size.kv_heads * size.rotary_dims)


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.double()


TOKENS = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(3))


def latent_logits(model, latents, normed=False):
    """What ``model`` computes with its attention replaced by the formula."""
    for layer, latent in zip(model.model.layers, latents, strict=True):
        layer.self_attn = LatentAttention(latent, normed)
    return logits(model, TOKENS)


@pytest.mark.parametrize("name", MODELS)
def test_full_rank_gives_the_logits_of_the_source(name, tmp_path):
    model = source_model(name)
    convert(model, full(model), tmp_path)
    error = (logits(stock_model(tmp_path), TOKENS) - logits(model, TOKENS)).abs().max()
    assert error < precision.CONVERTED


@pytest.mark.parametrize("name", ["mha", "gqa", "biased", "partial", "unrotated-layer", "yarn"])
def test_stock_class_computes_what_latent_weights_say(name, tmp_path):
    model = source_model(name)
    latents = convert(model, LatentTarget(9, 6), tmp_path)
    exact = logits(model, TOKENS)
    expected = latent_logits(model, latents)
    assert (expected - exact).abs().max() > 1e-2  # the target is small enough to change something
    assert (logits(stock_model(tmp_path), TOKENS) - expected).abs().max() < precision.CONVERTED


@pytest.mark.parametrize("q_rank", [None, 20])
def test_engine_layout_computes_what_normed_latents_say(q_rank, tmp_path):
    model = source_model("gqa")
    latents = convert(model, LatentTarget(9, 6, q_rank, "engine"), tmp_path)
    loaded = stock_model(tmp_path)
    assert (loaded.config.rope_parameters["rope_type"], loaded.config.rope_parameters["factor"]) == ("yarn", 1.0)
    assert [name for name, _ in loaded.named_parameters() if name.endswith("bias")] == []
    assert (logits(loaded, TOKENS) - latent_logits(model, latents, normed=True)).abs().max() < precision.CONVERTED


@pytest.mark.parametrize(("layout", "q_rank", "share"), [("free", 33, 1e-5), ("engine", 32, 0.05)])
def test_a_query_latent_of_full_rank_changes_nothing(layout, q_rank, share, tmp_path):
    """Under a live norm little: attention inputs come out of a norm, so their latent's length is almost constant."""
    model = source_model("gqa")
    found = []
    for rank in (None, q_rank):
        (folder := tmp_path / f"{rank}").mkdir()
        convert(model, LatentTarget(9, 6, rank, layout), folder)
        loaded = stock_model(folder)
        assert loaded.config.q_lora_rank == rank
        found.append(logits(loaded, TOKENS))
    assert (found[0] - found[1]).norm() < share * found[0].norm()


def test_generates_the_same_with_and_without_its_small_cache(tmp_path):
    model = source_model("mha")
    convert(model, LatentTarget(17, 12), tmp_path)
    loaded, prompt = stock_model(tmp_path), TOKENS[:, :9]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    cached = loaded.generate(prompt, use_cache=True, **options)
    assert cached.shape[1] > 9
    assert torch.equal(cached, loaded.generate(prompt, use_cache=False, **options))
    cache = DynamicCache(config=loaded.config)
    with torch.no_grad():
        loaded(TOKENS, past_key_values=cache)
    held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert held == [TOKENS.numel() * (17 + 12)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_changes_the_conversion_no_more_than_the_source(dtype, tmp_path):
    model = source_model("gqa")
    convert(model, full(model), tmp_path, dtype)
    exact = logits(model, TOKENS)
    low = (logits(stock_model(tmp_path, dtype=dtype), TOKENS) - exact).norm()
    floor = (logits(model.to(dtype), TOKENS) - exact).norm()
    assert low < 2 * floor


def test_frequencies_of_the_stock_class_are_the_chosen_ones(tmp_path):
    model = source_model("llama3")
    latents = convert(model, LatentTarget(9, 6), tmp_path)
    loaded = stock_model(tmp_path)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq.double(), latents[0].theta, rtol=1e-6, atol=0)
    with torch.no_grad():
        loaded(TOKENS)  # the first pass may swap short for long factors
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq.double(), latents[0].theta, rtol=1e-6, atol=0)
    assert loaded.model.rotary_emb.attention_scaling == 1.0


def test_it_is_loaded_and_saved_like_any_stock_model(tmp_path, caplog, capfd):
    convert(source_model("biased"), LatentTarget(9, 6), tmp_path)
    capfd.readouterr()
    first = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    captured = capfd.readouterr()
    said = (captured.out + captured.err).lower()
    assert [record.getMessage() for record in caplog.records] == []
    assert not [word for word in ("warn", "unexpected", "missing", "not initialized") if word in said]
    first.save_pretrained(tmp_path / "second")
    assert torch.equal(logits(stock_model(tmp_path / "second"), TOKENS), logits(first, TOKENS))
    wrote, read = json.loads((tmp_path / "config.json").read_text()), AutoConfig.from_pretrained(tmp_path)
    respelled = {"architectures", "dtype", "torch_dtype", "rope_scaling", "rope_parameters", "rope_theta"}
    assert {key for key in wrote.keys() - respelled if getattr(read, key) != wrote[key]} == set()
    assert {key: read.rope_parameters[key] for key in wrote["rope_parameters"]} == wrote["rope_parameters"]


@pytest.fixture
def small_kernels(monkeypatch):
    """Kernels for 80 cached elements too, so that models with them are small."""
    monkeypatch.setattr("kvfold.convert.targets.mla.config.KERNEL_CACHES", (80,))


def test_engines_and_transformers_agree_on_the_size_of_the_cache(tmp_path, small_kernels):
    """vLLM's Transformers backend reads ``head_dim``; what transformers computes does not depend on it."""
    model = source_model("wide-mha")
    latents = convert(model, LatentTarget(16, 64), tmp_path)
    loaded = stock_model(tmp_path)
    assert loaded.config.head_dim == 80
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq.double(), latents[0].theta, rtol=1e-6, atol=0)
    assert (logits(loaded, TOKENS) - latent_logits(model, latents)).abs().max() < precision.CONVERTED


def zeros(tensors):
    return sum(int((tensor == 0).sum()) for tensor in tensors)


@pytest.mark.parametrize("q_rank", [None, 20])
def test_padded_heads_change_nothing(q_rank, tmp_path, small_kernels):
    """At 16 + 64 cached elements heads of 8 dims, all rotary, get the sizes of a kernel: 64, 64 and 128."""
    model = source_model("gqa")
    latents = convert(model, LatentTarget(16, 64, q_rank, "engine"), tmp_path)
    loaded = stock_model(tmp_path)
    sizes = loaded.config.qk_nope_head_dim, loaded.config.qk_rope_head_dim, loaded.config.v_head_dim
    assert sizes == (64, 64, 128)
    assert {latent.rope_dim for latent in latents} == {8}
    bound = model_of(source_config(model))
    stored = [value for name, value in loaded.named_parameters() if ".self_attn." in name]
    own = []
    for latent in latents:
        queries = latent if latent.query is None else latent.query
        own += [latent.down, latent.rope_key, latent.uk, latent.uv, latent.o, queries.q_nope, queries.q_rope]
        own += [] if latent.query is None else [latent.query.down]
    assert zeros(stored) - zeros(own) == padding(bound, LatentTarget(16, 64, q_rank, "engine"))
    loaded.requires_grad_(True)(input_ids=TOKENS).logits.square().sum().backward()
    matrices = [value for value in stored if value.dim() == 2]
    assert not any(value.grad[value == 0].any() for value in matrices)  # so training leaves the padding alone
    loaded.requires_grad_(False)
    assert (logits(loaded, TOKENS) - latent_logits(model, latents, normed=True)).abs().max() < precision.CONVERTED
