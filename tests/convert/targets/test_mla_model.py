"""Latent weights in the stock class of either layout: what transformers computes is their formula,
in float64 here.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import precision
from helpers.attention import random_tokens
from helpers.checkpoints import read_json, read_model, stock_model, tensors
from helpers.layers import attend_latent
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvfold.convert.targets.mla.encode import encode_stock_mla
from kvfold.convert.targets.mla.layout import build_mla_config, list_mla_shapes
from kvfold.convert.targets.mla.spec import MlaSpec, compute_query_rank
from kvfold.convert.transforms.latent.latent_weights import LatentWeights, QueryLatent

TOKENS = random_tokens(2, 40)


class LatentAttention(nn.Module):
    """The formula of ``LatentWeights`` in float64, in the place of a stock model's attention."""

    def __init__(self, latent, normed):
        super().__init__()
        self.latent = latent.map_tensors(torch.Tensor.double)
        self.normed = normed

    def forward(self, hidden_states, **_):
        return attend_latent(self.latent, hidden_states, self.normed), None


def random_latent(size, target, seed=0, inner=None, scaled=False):
    """Weights for inputs of about one, with all biases that the layout has a place for; latents of
    unit energy. ``scaled`` divides low frequencies by 4.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    heads = size.heads
    dim = size.head_dim
    width = size.model_dim
    rank = target.kv_rank - target.has_constant_channel
    rope = target.count_used_rope_dims(8)
    free = target.has_constant_channel
    # Layout engine has plain frequencies and those of YaRN; layout free any.
    theta = [10000.0 ** (-2 * i / rope) if not free else 1 / (1 + 3 * i) for i in range(rope // 2)]
    if scaled:
        theta[2:] = [angle / 4 for angle in theta[2:]]
    latent = LatentWeights(
        down=rand(rank, width) / math.sqrt(rank),
        rope_key=rand(rope, width) * 2,
        q_nope=rand(heads, dim, width) * 2,
        q_rope=rand(heads, rope, width),
        uk=rand(heads, dim, rank) * rank,
        uv=rand(heads, dim, rank) * rank,
        o=rand(width, heads, dim),
        theta=torch.tensor(theta, dtype=torch.float64),
        scale=dim**-0.5,
    )
    if free:
        biases = {"down_bias": rand(rank) / math.sqrt(rank), "rope_key_bias": rand(rope)}
        latent = replace(latent, **biases, o_bias=rand(width))
    if inner is not None:
        root = math.sqrt(inner)
        query = QueryLatent(
            rand(inner, width) / root,
            rand(heads, dim, inner) * root,
            rand(heads, rope, inner) * root,
        )
        biases = {"q_nope_bias": rand(heads, dim), "q_rope_bias": rand(heads, rope)}
        latent = replace(latent, query=query, **biases)
    return latent


@pytest.fixture
def written(tiny_family, tmp_path):
    """``written(target)``: random latents, the stock model of their files in ``tmp_path``, and the
    formula's logits.
    """

    def make(target, family="llama", factor=1.0):
        changes = {"mlp_bias": False, "attention_bias": False} if family == "llama" else {}
        source = tiny_family(family, num_key_value_heads=2, tie_word_embeddings=True, **changes)
        bound = read_model(source)
        stored = tensors(source)
        rank = compute_query_rank(bound, target)
        inner = None if rank is None else rank - target.has_constant_channel
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        made = {}
        for name, (_, of) in list_mla_shapes(bound, target).items():
            if of is not None:
                made[name] = stored[of].clone()
        for index, layer in enumerate(model.model.layers):
            latent = random_latent(bound.geometry, target, index, inner, factor > 1)
            layer.self_attn = LatentAttention(latent, normed=not target.has_constant_channel)
            tensors_of_layer = encode_stock_mla(latent, index, target, factor)
            made |= {name: value.float() for name, value in tensors_of_layer.items()}
        save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
        config = build_mla_config(bound, target, latent.theta.tolist(), dtype="float32")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return latent, stock_model(tmp_path), logits(model)

    return make


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.double()


@pytest.fixture
def small_kernels(monkeypatch):
    """Kernels for 80 cached elements too, so that models with them are small."""
    monkeypatch.setattr("kvfold.convert.targets.mla.spec.KERNEL_CACHES", (80,))


@pytest.mark.parametrize(
    ("target", "family", "factor"),
    [
        (MlaSpec(9, 6), "llama", 1.0),
        (MlaSpec(16, 64), "llama", 1.0),  # a size of the small kernels
        (MlaSpec(9, 8, layout="engine"), "llama", 1.0),
        (MlaSpec(9, 8, layout="engine"), "llama", 4.0),
        (MlaSpec(9, 6), "qwen2", 1.0),  # whose query bias needs a query latent
    ],
    ids=str,
)
def test_the_stock_class_computes_what_latent_weights_say(
    target, family, factor, written, small_kernels
):
    latent, loaded, expected = written(target, family, factor)
    assert (logits(loaded) - expected).abs().max() < precision.CONVERTED
    assert loaded.config.q_lora_rank == (65 if family == "qwen2" else None)
    rotary = loaded.model.rotary_emb  # after a pass, which may swap short for long factors
    torch.testing.assert_close(rotary.inv_freq.double(), latent.theta, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == 1.0
    if target.layout == "engine":
        rope = loaded.config.rope_parameters
        assert (rope["rope_type"], rope["factor"]) == ("yarn", factor)
        assert [name for name, _ in loaded.named_parameters() if name.endswith("bias")] == []
    elif target.has_kernels:
        # vLLM's Transformers backend takes it for the size of the cache
        assert loaded.config.head_dim == 80


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_padded_heads_change_nothing(factor, written, small_kernels):
    """At 16 + 64 cached elements heads of 8 dims, all rotary, get the sizes of a kernel: 64, 64 and
    128.
    """
    target = MlaSpec(16, 64, "engine")
    latent, loaded, expected = written(target, factor=factor)
    sizes = loaded.config.qk_nope_head_dim, loaded.config.qk_rope_head_dim, loaded.config.v_head_dim
    assert sizes == (64, 64, 128)
    assert latent.rope_dim == 8
    stored = [value for name, value in loaded.named_parameters() if ".self_attn." in name]
    loaded.requires_grad_(True)(input_ids=TOKENS).logits.square().sum().backward()
    matrices = [value for value in stored if value.dim() == 2]
    assert not any(
        value.grad[value == 0].any() for value in matrices
    )  # so training leaves the padding alone
    assert (logits(loaded.requires_grad_(False)) - expected).abs().max() < precision.CONVERTED


def test_generates_the_same_with_and_without_its_small_cache(written):
    _, loaded, _ = written(MlaSpec(17, 12))
    prompt = TOKENS[:, :9]
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    cached = loaded.generate(prompt, use_cache=True, **options)
    assert cached.shape[1] > 9
    assert torch.equal(cached, loaded.generate(prompt, use_cache=False, **options))
    cache = DynamicCache(config=loaded.config)
    with torch.no_grad():
        loaded(TOKENS, past_key_values=cache)
    held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert held == [TOKENS.numel() * (17 + 12)] * 2


def test_it_is_loaded_and_saved_like_any_stock_model(written, tmp_path, caplog, capfd):
    written(MlaSpec(9, 6), "qwen2")
    capfd.readouterr()
    first = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    said = "".join(capfd.readouterr()).lower()
    assert caplog.records == []
    assert not any(word in said for word in ("warn", "unexpected", "missing", "not initialized"))
    first.save_pretrained(tmp_path / "second")
    assert torch.equal(logits(stock_model(tmp_path / "second")), logits(first))
    wrote = read_json(tmp_path / "config.json")
    read = AutoConfig.from_pretrained(tmp_path)
    respelled = {"architectures", "dtype", "torch_dtype", "rope_parameters"}
    assert {key for key in wrote.keys() - respelled if getattr(read, key) != wrote[key]} == set()
    assert wrote["rope_parameters"].items() <= read.rope_parameters.items()
