"""Conversions end to end: the written files, that transformers takes it, and that a wrong request
writes nothing.
"""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import assert_same_tensors, read_json, stock_model, tensors
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A tiny Llama in three shards, with a tokenizer, a license and a card, and an old-style
    config.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
    text = read_json(folder / "config.json")
    text["rope_theta"], text["torch_dtype"] = 10000.0, text.pop("dtype")
    text["transformers_version"], text["my_own_key"] = "4.30.0", {"kept": [1, 2]}
    (folder / "config.json").write_text(json.dumps(text))
    (folder / "LICENSE").write_text("a license")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return folder


@pytest.fixture
def model(source, tmp_path):
    """A copy of ``source`` that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def convert(model, out, to="gqa", **options):
    heads = {"kv_heads": 2} if to == "gqa" else {}
    checkpoints.run_conversion(model, out, to=to, **{"method": "mean", **heads, **options})


def refused(model, out, **options):
    """The error text; also asserts that nothing was left beside the model."""
    before = sorted(out.parent.glob("*"))
    with pytest.raises(InputError) as caught:
        convert(model, out, **options)
    assert sorted(out.parent.glob("*")) == before
    return str(caught.value)


@pytest.fixture(scope="module")
def pooled(source, tmp_path_factory):
    """``source`` with two key/value heads."""
    out = tmp_path_factory.mktemp("pooled") / "out"
    convert(source, out, max_shard_size="60KB")
    return out


def test_only_keys_and_values_change(source, pooled):
    before = tensors(source)
    after = tensors(pooled)
    assert max(file.stat().st_size for file in pooled.glob("*.safetensors")) <= 60_000
    assert set(before) == set(after)  # the tied head is in neither
    for name, value in before.items():
        if "k_proj" in name or "v_proj" in name:
            mean = value.view(2, 4, 8, 64).mean(1).reshape(16, 64)
            assert_close(after[name], mean, rtol=0, atol=1e-7)
        else:
            assert torch.equal(after[name], value), name
    # The config is edited, not rewritten.
    before, after = (read_json(folder / "config.json") for folder in (source, pooled))
    assert (before.pop("num_key_value_heads"), after.pop("num_key_value_heads")) == (8, 2)
    assert list(after.items()) == list(before.items())


def test_side_files_and_the_record(source, pooled):
    assert (pooled / "LICENSE").read_text() == "a license"
    generation = "generation_config.json"
    assert (pooled / generation).read_bytes() == (source / generation).read_bytes()
    assert "license: mit" in (pooled / "README.md").read_text()
    record = read_json(pooled / "kvfold.json")
    assert record["source"]["sha256"] == open_checkpoint(source).compute_model_digest()
    assert record["cache_elements"] == {"from": 128, "to": 32}
    norm = "model.norm.weight"
    assert record["tensors"][norm].items() >= {"origin": "copied", "from": [norm]}.items()
    assert record["tensors"]["model.layers.1.self_attn.k_proj.weight"]["origin"] == "mean"
    assert set(record["tensors"]) == set(tensors(pooled))


def test_equal_requests_give_equal_bytes(source, pooled, tmp_path):
    moved = shutil.copytree(source, tmp_path / "elsewhere" / source.name)
    convert(moved, tmp_path / "b", overwrite=True, max_shard_size="60KB")
    for file in pooled.iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_fold_has_the_rope_in_the_older_spelling_too(model, out):
    table = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = read_json(model / "config.json")
    del config["rope_theta"]
    config["rope_parameters"] = table
    (model / "config.json").write_text(json.dumps(config))
    convert(model, out)
    wrote = read_json(out / "config.json")
    assert (wrote["rope_theta"], wrote["rope_parameters"]) == (500.0, table)
    tokens = torch.arange(96)[None, :64]
    both = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
    for other in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        spelled = {name: value for name, value in wrote.items() if name not in other}
        (out / "config.json").write_text(json.dumps(spelled))
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(tokens).logits, both)


def test_gqa_sources_fold_further_and_as_many_heads_as_before_are_bit_identical(source, tmp_path):
    convert(source, tmp_path / "four", kv_heads=4)
    convert(tmp_path / "four", tmp_path / "one", to="mqa")
    convert(source, tmp_path / "direct", to="mqa")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert_close(tensors(tmp_path / "one")[name], tensors(tmp_path / "direct")[name])
    convert(source, tmp_path / "same", kv_heads=8, allow_growth=True)
    assert_same_tensors(tmp_path / "same", source)


def test_more_heads_are_repetitions(source, tmp_path, out, refused):
    convert(source, tmp_path / "one", to="mqa")
    growth = {"kv_heads": 4, "method": None, "allow_growth": True}
    convert(tmp_path / "one", tmp_path / "four", **growth)
    name = "model.layers.0.self_attn.k_proj.weight"
    before = tensors(tmp_path / "one")[name]
    assert torch.equal(tensors(tmp_path / "four")[name], before.repeat(4, 1))
    for wrong in ({"method": "mean"}, {"allow_growth": False}, {"kv_heads": 3}, {"kv_heads": 16}):
        with refused():
            convert(tmp_path / "one", out, **(growth | wrong))
    with refused(field="method"):
        convert(source, out, method="repeat")


def test_plain_transformers_uses_it(tmp_path, out):
    convert(demo_folder(), out, kv_heads=4)
    model = stock_model(out, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(out)("The function returns", return_tensors="pt")
    ids = prompt["input_ids"]
    generated = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert generated.shape[1] == ids.shape[1] + 8
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


# What is wrong with a request or a checkpoint: exit 2, nothing written.


def test_numbers_of_heads_that_a_source_cannot_have(source, tmp_path):
    for heads in (3, 16, 8):
        out = tmp_path / "out"
        assert f"--kv-heads {heads} must divide" in refused(source, out, kv_heads=heads)
    convert(source, tmp_path / "one", to="mqa")
    assert "already MQA" in refused(tmp_path / "one", tmp_path / "out", to="mqa")


def test_a_disk_without_room_is_refused_before_anything_is_written(source, out, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "too little disk space" in refused(source, out)


def test_damaged_tensors_are_all_listed(out, model, told):
    values = tensors(model)
    for file in model.glob("*.safetensors*"):
        file.unlink()
    values["model.layers.1.self_attn.v_proj.weight"][3, 4] = float("inf")
    save_file(values, model / "model.safetensors")
    told(refused(model, out))
    del values["model.layers.0.self_attn.k_proj.weight"]
    values |= {
        "model.layers.7.mlp.up_proj.weight": torch.zeros(2),
        "model.norm.weight": torch.zeros(63),
    }
    save_file(values, model / "model.safetensors")
    told(refused(model, out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kv_heads", "expected"), [("mean", 2, 366.552), ("first", 4, 99.299)]
)
def test_published_baselines_on_the_reference_model(reference, out, method, kv_heads, expected):
    """Perplexities of an independent implementation of the baselines on the same model and text."""
    from kvfold.convert.measure.losses import cut_token_windows, measure_perplexity

    tokenizer = AutoTokenizer.from_pretrained(reference / "llama-mha")
    tokens = cut_token_windows(
        tokenizer, (reference / "evaluation.txt").read_text(encoding="utf-8"), 48, 256
    )
    convert(reference / "llama-mha", out, method=method, kv_heads=kv_heads)
    assert measure_perplexity(out, tokens) == pytest.approx(expected, rel=1e-3)


# A source that changes during a run gives an error and no OUT: its result would belong to neither
# version.


def exchange(model):
    """Another file with a header of the same layout."""
    weights = min(model.glob("*.safetensors"))
    other = model.parent / "other"
    save_file(
        {name: tensor + 1 for name, tensor in load_file(weights).items()}, other, {"format": "pt"}
    )
    os.replace(other, weights)


def overwrite(model):
    with min(model.glob("*.safetensors")).open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def link_elsewhere(model):
    secret = model.parent / "secret.json"
    secret.write_text("{}")
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to(secret)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (exchange, ".safetensors"),
        (overwrite, ".safetensors"),
        (lambda model: os.truncate(min(model.glob("*.safetensors")), 900), ".safetensors"),
        (link_elsewhere, "generation_config.json"),
        (lambda model: (model / "generation_config.json").unlink(), "generation_config.json"),
    ],
)
def test_a_change_during_the_run(model, change, found):
    (model / "generation_config.json").write_text("{}")
    pending = [change]

    def progress(stage, done, total):
        if stage == "convert" and pending:
            pending.pop()(model)

    with pytest.raises(InputError) as raised:
        convert(model, model.parent / "out", progress=progress)
    assert any(found in line for line in (raised.value.message, *raised.value.details))
    assert not list(model.parent.glob("*out*"))
