"""Layout ``kvfold``: families whose stock class cannot share heads, in checkpoints that bring their
attention along.
"""

import inspect
import json
import sys
import tomllib
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from helpers import forked, precision
from helpers.attention import random_tokens
from helpers.cases import mostly_slow, read_cases
from helpers.checkpoints import (
    assert_same_tensors,
    convert,
    edit_json,
    full_split,
    read_json,
    read_model,
    stock_model,
)
from helpers.processes import run_python
from tiny_models import CLASSICS
from tokenizers import Tokenizer
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import register_models
from kvfold.attention.checkpoints import SOURCES, modeling_kvfold, vllm_plugin
from kvfold.convert import ConvertRequest, inspect_checkpoint
from kvfold.convert.conversion.plan import list_mla_specs
from kvfold.convert.data import read_documents
from kvfold.convert.errors import InputError
from kvfold.convert.measure.verify import verify_checkpoint

CASES = read_cases(__file__)
# Models whose stock class shares heads but not a latent: what nothing may be lost of.
LATENT = {name: {"num_key_value_heads": 2} for name in SOURCES if name not in CLASSICS}
LATENT |= CASES["latents"]
USE = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM

pairs, remote, saved = *map(json.loads, sys.argv[1:3]), sys.argv[3]
if not remote:  # as the commands load it, whatever the file in the folder says
    from kvfold.convert.checkpoint.opening import open_checkpoint
    from kvfold.convert.stream.stock import load_config
    for _, out in pairs:
        load_config(open_checkpoint(out), False)
tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(5))

def load(folder, auto=AutoModelForCausalLM):
    model, info = auto.from_pretrained(folder, trust_remote_code=remote, output_loading_info=True)
    left = info["unexpected_keys"] if auto is AutoModelForCausalLM else []  # the head
    assert not any([left, info["missing_keys"], info["mismatched_keys"]]), (folder, info)
    return model.eval()

def gradient(model):
    torch.manual_seed(3)  # of dropout
    model.zero_grad()
    model.train()(tokens, labels=tokens).loss.backward()
    model.eval()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def check(source, out, at):
    stock, model = load(source), load(out)
    module = type(model).__module__
    assert module.startswith("transformers_modules." if remote else "kvfold."), module
    ids = dict(input_ids=tokens[:, :6], attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]))
    greedy = dict(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    cached = model.generate(**greedy)
    assert torch.equal(cached, model.generate(**greedy, use_cache=False)), out
    assert torch.equal(cached, stock.generate(**greedy)), out
    expected, plain = model(tokens).logits, gradient(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden = load(out, AutoModel)(tokens)[0]
    model.save_pretrained(f"{saved}/{at}")
    same = dict(logits=(stock(tokens).logits, expected), gradient=(plain, gradient(model)),
                hidden=(stock.base_model(tokens)[0], hidden),
                saved=(load(f"{saved}/{at}")(tokens).logits, expected))
    return {name: float((a - b).detach().abs().max()) for name, (a, b) in same.items()}

print(json.dumps([check(*pair, at) for at, pair in enumerate(pairs)]))
"""


@pytest.fixture(scope="module")
def latents(tiny_family, tmp_path_factory):
    """A family of ``LATENT``, or of ``CLASSICS`` as it is, and the same in layout kvfold with
    nothing lost.
    """

    @cache
    def pair(name):
        source = tiny_family(name.removesuffix("-rw"), **LATENT.get(name, {}))
        return source, convert(
            source, tmp_path_factory.mktemp(name) / "out", layout="kvfold", **full_split(source)
        )

    return pair


@pytest.mark.slow  # loads the models of many families
@pytest.mark.parametrize("remote", [True, False])
def test_nothing_is_lost_with_as_many_heads_and_it_works_as_a_stock_model_does(
    remote, tiny_family, latents, tmp_path
):
    """With the checkpoint's own code, in a fresh process, and for a few families with that of the
    installed package.
    """
    classics, shared = (CLASSICS, ["gemma3_text", "qwen2_moe"]) if remote else (["gpt2"], ["qwen3"])
    sources = [(tiny_family(name), {"kv_heads": 8}) for name in [*classics][::3]]
    sources += [(latents("falcon-rw")[0], {"kv_heads": 8})] if remote else []
    for name in classics:
        source = tiny_family(name, **CASES["variants"][name])
        sources.append((source, full_split(source)))
    pairs = [latents(name) for name in shared]
    for at, (source, how) in enumerate(sources):
        pairs.append((source, convert(source, tmp_path / f"{at}", **how)))
    (tmp_path / "saved").mkdir()
    if not remote:
        (pairs[-1][1] / "modeling_kvfold.py").write_text("raise SystemExit(1)")  # never run
    given = json.dumps([list(map(str, pair)) for pair in pairs])
    arguments = ["-c", USE, given, json.dumps(remote), str(tmp_path / "saved")]

    def work():
        sys.argv = arguments[1:]
        exec(USE, {})

    done = run_python(*arguments) if remote else forked.run(tmp_path / "log", work)
    assert done.stdout, done.stderr
    differences = [value for found in json.loads(done.stdout) for value in found.values()]
    assert max(differences) < precision.CONVERTED
    assert len(differences) == 4 * len(pairs)


@pytest.mark.parametrize(
    ("name", "implementation"),
    mostly_slow(
        [
            *((name, how) for name in sorted(CLASSICS) for how in (None, "eager")),
            *((name, None) for name in LATENT if name not in CLASSICS),
            ("gemma3_text", "eager"),
        ],
        5,
    ),
)
@torch.no_grad()
def test_latents_of_full_size_are_the_stock_model_at_every_split_of_a_text(
    name, implementation, latents
):
    register_models()
    source, out = latents(name)
    text = random_tokens(2, 24)
    model = stock_model(out, attn_implementation=implementation)
    expected = stock_model(source)(text).logits
    torch.testing.assert_close(model(text).logits, expected, **precision.LARGE_LOGITS)
    cache = None
    logits = []
    # several tokens over the latents, and single ones
    for part in text.split([1, 8, 1, 12, 1, 1], 1):
        done = model(part, past_key_values=cache, use_cache=True)
        cache = done.past_key_values
        logits.append(done.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, **precision.LARGE_LOGITS)
    elements = cache.layers[0].keys.shape[-1] + cache.layers[0].values.shape[-1]
    assert elements == inspect_checkpoint(str(out)).cache.cache_elements
    padded = torch.cat([torch.full((2, 3), 5), text], 1)  # left of what counts
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 24)], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(0)
    before = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1]}
    start = model(padded[:, :-1], **before, use_cache=True)
    last = model(
        padded[:, -1:],
        attention_mask=mask,
        position_ids=positions[:, -1:],
        past_key_values=start.past_key_values,
    )
    torch.testing.assert_close(last.logits[:, -1], expected[:, -1], **precision.LARGE_LOGITS)


def test_attention_that_cannot_run_latents_is_refused_and_soft_caps_are_kept(latents):
    register_models()
    _, out = latents("gemma2")
    with pytest.raises(ValueError, match="'flex_attention' does not support latent attention; use"):
        stock_model(out, attn_implementation="flex_attention")
    assert stock_model(out).config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2"])
def test_trainer_device_map_and_static_cache_take_it(name, latents, tmp_path):
    register_models()
    source, out = latents(name)
    model = AutoModelForCausalLM.from_pretrained(out, device_map="auto")
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    text = random_tokens(2, 24).to(model.device)
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    expected = stock_model(source).generate(random_tokens(2, 24), **options)
    # windows: a static cache of their own
    found = model.generate(text, cache_implementation="static", **options)
    assert torch.equal(found.cpu(), expected)
    settings = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
    )
    before = model(text, labels=text).loss.item()
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(2, 24)]
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = stock_model(tmp_path / "saved", trust_remote_code=False).to(text.device)
    with torch.no_grad():
        torch.testing.assert_close(
            saved(text).logits, model.eval()(text).logits, **precision.LARGE_LOGITS
        )
        assert saved(text, labels=text).loss.item() < before - 0.5


@pytest.mark.parametrize(
    ("name", "options", "attention", "elements"),
    mostly_slow(CASES["calibrated"], 7),
)
def test_conversions_are_calibrated_checked_and_described(
    name, options, attention, elements, tiny_family, tmp_path
):
    source = tiny_family(name, vocab_size=2048)
    out = convert(source, tmp_path / "out", samples=4, seq_len=32, **options)
    record = read_json(out / "kvfold.json")
    assert (record["attention"]["to"], record["request"]["layout"]) == (attention, "kvfold")
    assert record["drift"]["cache_bytes_per_token"] == {"source": 1024, "student": 2 * 4 * elements}
    assert (out / "modeling_kvfold.py").read_text() == inspect.getsource(modeling_kvfold)
    assert "modeling_kvfold.py" in record["files"]
    assert "trust_remote_code=True" in (out / "README.md").read_text()
    assert verify_checkpoint(str(out)).problems == []
    facts = inspect_checkpoint(str(out))
    assert (facts.family, facts.attention) == (f"kvfold_{name}", attention[:3])
    assert facts.cache.cache_elements == elements
    with pytest.raises(InputError, match="already converted"):
        convert(out, tmp_path / "again", kv_heads=1)


@pytest.mark.slow  # a calibration of 64 channels
@torch.no_grad()
def test_norms_are_exact_after_calibration_too_and_their_divisors_count(tiny_family, tmp_path):
    """Constant parts of keys, from biases, dims without rotation and centered norms, are divided as
    well.
    """
    register_models()
    source = tiny_family("stablelm", vocab_size=2048, **LATENT["stablelm"])
    options = {"to": "mla", "layout": "kvfold", "kv_rank": 64, "rope_dim": 16}
    options |= {"samples": 4, "seq_len": 32, "method": "principal"}
    out = convert(source, tmp_path / "out", **options)
    text = demo_tokens(source)
    expected = stock_model(source)(text).logits
    torch.testing.assert_close(stock_model(out)(text).logits, expected, rtol=1e-4, atol=1e-4)
    record = read_json(out / "kvfold.json")
    assert record["attention"] == {"from": "GQA-4", "to": "MLA 64+16+4"}
    assert record["drift"]["cache_bytes_per_token"]["student"] == 2 * 4 * (64 + 16 + 4)


def test_latents_of_a_window_are_fitted_to_what_it_shows(tiny_family, tmp_path):
    """Distances that no query sees count as little as those beyond the context."""
    sizes = {"vocab_size": 2048, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}
    options = {"to": "mla", "layout": "kvfold", "kv_rank": 24, "rope_dim": 8, "method": "principal"}
    options |= {"samples": 4, "seq_len": 16}
    outs = []
    for positions in (16, 4096):
        source = tiny_family("gemma3_text", max_position_embeddings=positions, **sizes)
        outs.append(convert(source, tmp_path / f"{positions}", **options))
    assert_same_tensors(*outs)


def test_each_layer_has_the_rotary_pairs_that_it_needs_most(tiny_family, tmp_path):
    """Random layers, which need different ones: only the config of this layout can tell them."""
    options = {"to": "mla", "layout": "kvfold", "kv_rank": 24, "rope_dim": 4, "method": "principal"}
    source = tiny_family("qwen3", vocab_size=2048, use_sliding_window=False)
    out = convert(source, tmp_path / "out", samples=4, seq_len=64, **options)
    rows = [row["frequencies"] for row in read_json(out / "config.json")["kvfold"]["layers"]]
    assert len(rows) == 2
    assert rows[0] != rows[1]
    assert verify_checkpoint(str(out)).problems == []


@pytest.mark.parametrize(("name", "divisors"), CASES["divisors"].items())
def test_a_budget_holds_the_divisors_of_norms(name, divisors, tiny_family):
    model = read_model(tiny_family(name))
    request = ConvertRequest(model="MODEL", out="OUT", to="mla", budget=64, layout="kvfold")
    splits = list_mla_specs(request, model)
    assert {target.kv_rank + target.rope_dim for target in splits} == {64 - divisors}
    size = model.geometry
    present = 2 * size.kv_heads * size.head_dim
    request = replace(request, budget=None, kv_rank=present - divisors - 8, rope_dim=8)
    with pytest.raises(InputError, match=f"rope-dim 8 need {present} elements per token"):
        list_mla_specs(request, model)


def demo_tokens(folder):
    """Held-out text that ships, ``[8, 64]``."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("".join(read_documents("held_out"))[:4000]).ids
    return torch.tensor(ids[:512]).view(8, 64)


@pytest.mark.parametrize("kv_heads", [3, 2])
def test_a_config_that_kvfold_did_not_write_is_named(kv_heads, tiny_family, tmp_path, refused):
    out = convert(tiny_family("gpt_neox"), tmp_path / "out", kv_heads=4)
    block = read_json(out / "config.json")["kvfold"]
    edit_json(out / "config.json", kvfold={**block, "kv_heads": kv_heads})
    with refused():
        inspect_checkpoint(str(out))


@pytest.fixture
def plug_in(monkeypatch):
    """vLLM's plug-in; what it sets is removed after the test, since others run in this process."""
    for name in ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM"):
        source = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
        config = getattr(modeling_kvfold, f"Kvfold{source}Config")
        monkeypatch.setattr(config, "num_key_value_heads", None, raising=False)
        monkeypatch.setattr(vllm_plugin.transformers, f"Kvfold{name}", None, raising=False)
    monkeypatch.setattr(modeling_kvfold, "VARIANTS", {**modeling_kvfold.VARIANTS})
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    return EntryPoint("kvfold", project["entry-points"][group]["kvfold"], group).load()


def test_vllm_finds_folds_of_layout_kvfold_by_the_plug_in(plug_in):
    """vLLM's Transformers backend reads a class from transformers, and the key/value heads from its
    config.
    """
    for _ in range(2):  # vLLM calls it in each of its processes, perhaps twice
        plug_in()
    for name in ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM"):
        assert getattr(vllm_plugin.transformers, f"Kvfold{name}") is not None
    block = {"variant": "grouped", "kv_heads": 2}
    config = AutoConfig.for_model("kvfold_gpt_neox", kvfold=block, num_key_value_heads=8)
    assert config.num_key_value_heads == 2  # not the source's
    config.kvfold = {"variant": "latent"}
    with pytest.raises(ValueError, match=r"no kernels for MLA of layout kvfold .*; convert the"):
        _ = config.num_key_value_heads


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt"])
@torch.no_grad()
def test_attention_of_the_plug_in_is_that_of_the_checkpoint(
    name, plug_in, tiny_family, tmp_path, monkeypatch
):
    """Over a function that takes and returns what vLLM's does, in the one place where vLLM looks
    for its call.
    """

    def pages(module, query, key, value, mask, scaling):
        assert mask is None
        context = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return context.transpose(1, 2).flatten(2)[0], None

    out = convert(tiny_family(name), tmp_path / "out", kv_heads=2)
    register_models()
    expected = stock_model(out)(random_tokens(2, 24)[:1]).logits
    plug_in()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", pages)
    served = stock_model(out, attn_implementation="vllm")
    for layer in served.base_model.modules():
        if isinstance(layer, modeling_kvfold.SelfAttention):
            assert "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(layer).forward)
    torch.testing.assert_close(
        served(random_tokens(2, 24)[:1], use_cache=False).logits, expected, **precision.LARGE_LOGITS
    )


def test_a_traced_rotation_rotates():
    """vLLM traces modules that it serves afterwards."""
    rotation = modeling_kvfold.FixedRotaryEmbedding({"frequencies": [1.0]}, 1.0)
    torch.fx.symbolic_trace(rotation)
    turned = rotation(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[1]]))
    torch.testing.assert_close(turned.flatten(), torch.tensor([0.5403023, 0.8414710]))
