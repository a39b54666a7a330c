"""What a source has besides what its config states, or beyond what a stock MLA class can express:
the result has it too, or the run says what it lacks.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import precision
from helpers.cases import read_cases
from helpers.checkpoints import (
    compute_logits,
    convert,
    edit_json,
    full_split,
    read_json,
    run_conversion,
    tensors,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kvfold.attention import register_models
from kvfold.convert import ConvertRequest
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.measure.inspect import inspect_checkpoint
from kvfold.convert.targets.mla import spec

CASES = read_cases(__file__)
SHORT = 32  # tokens with the first of longrope's two sets of frequencies


@pytest.fixture
def two_heads(tiny_family, tmp_path):
    """``two_heads(family, equal)``: a model whose config says that its head is the embedding,
    although its file has a head: another one, or with ``equal`` a copy of the embedding.
    """

    def make(family, equal=False):
        source = tmp_path / "tied"
        changes = {"tie_word_embeddings": True, "mlp_bias": False, "use_sliding_window": False}
        shutil.copytree(tiny_family(family, **changes), source)
        stored = tensors(source)
        embedding = next(value for name, value in stored.items() if "embed" in name)
        head = embedding.clone() if equal else torch.randn_like(embedding)
        save_file({**stored, "lm_head.weight": head}, source / "model.safetensors")
        return source

    return make


@pytest.mark.parametrize(
    ("family", "options"),
    CASES["heads"],
)
def test_a_head_that_differs_from_the_embedding_stays(family, options, two_heads, tmp_path):
    register_models()
    source = two_heads(family)
    split = full_split(source, 1) if "layout" in options else {}
    out = convert(source, tmp_path / "out", **{**split, **options})
    assert read_json(out / "config.json")["tie_word_embeddings"] is False
    difference = compute_logits(out) - compute_logits(source)
    assert difference.abs().max() < precision.CONVERTED


def test_layout_engine_copies_the_head_that_is_stored(two_heads):
    options = {"to": "mla", "kv_rank": 16, "rope_dim": 8, "layout": "engine"}
    source = two_heads("llama")
    edit_json(source / "config.json", attention_bias=False)
    stored = {name: value for name, value in tensors(source).items() if "_proj.bias" not in name}
    save_file(stored, source / "model.safetensors")
    plan = make_plan(ConvertRequest(source, "out", **options), open_checkpoint(source))
    (head,) = [tensor for tensor in plan.output.tensors if tensor.name == "lm_head.weight"]
    assert head.source == "lm_head.weight"


def test_a_stored_copy_of_the_embedding_stays_tied(two_heads, tmp_path):
    source = two_heads("qwen2", equal=True)
    out = convert(source, tmp_path / "out", **full_split(source, 1))
    assert read_json(out / "config.json")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors(out)


@pytest.mark.parametrize(
    ("family", "flags", "part"),
    CASES["denied"],
)
def test_other_tensors_that_the_config_denies_are_refused(
    family, flags, part, tiny_family, tmp_path, refused
):
    source = tmp_path / "source"
    shutil.copytree(tiny_family(family, **flags), source)
    save_file({**tensors(source), f"model.{part}": torch.ones(64)}, source / "model.safetensors")
    with refused(part):
        convert(source, tmp_path / "out", 2)


@pytest.fixture(scope="module")
def longrope(tiny_family):
    """A phi3 with other rotary frequencies for texts above ``SHORT`` tokens."""
    return tiny_family("phi3", **CASES["longrope"])


def test_longrope_keeps_both_sets_of_frequencies(longrope, tmp_path):
    register_models()
    conversion = run_conversion(
        longrope, tmp_path / "out", allow_growth=True, **full_split(longrope)
    )
    assert "layout" in conversion.summary()
    for length in (SHORT, SHORT + 1, 100):
        difference = compute_logits(tmp_path / "out", length) - compute_logits(longrope, length)
        assert difference.abs().max() < precision.CONVERTED
    source, out = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (longrope, tmp_path / "out")
    )
    prompt = torch.arange(3, SHORT)[None]  # the answer passes the switch
    answers = [
        model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        for model in (source, out)
    ]
    assert torch.equal(*answers)


def test_the_first_name_of_longrope_is_read_and_not_written(longrope, tmp_path):
    source = shutil.copytree(longrope, tmp_path / "source")
    config = read_json(source / "config.json")
    table = {**config.pop("rope_parameters"), "type": "su"}
    del table["rope_type"]
    (source / "config.json").write_text(json.dumps({**config, "rope_scaling": table}))
    out = convert(source, tmp_path / "out", 2)
    difference = compute_logits(out, SHORT + 1) - compute_logits(longrope, SHORT + 1)
    assert difference.abs().max() < precision.CONVERTED


def test_a_shorter_context_lets_a_stock_class_hold_longrope_and_is_stated(
    longrope, tmp_path, out, refused
):
    options = {**full_split(longrope, 1), "layout": "free", "allow_growth": True}
    for context in (None, SHORT + 1, 10**6):
        with refused():
            run_conversion(longrope, out, context=context, **options)
    conversion = run_conversion(longrope, out, context=SHORT, **options)
    difference = compute_logits(out, SHORT) - compute_logits(longrope, SHORT)
    assert difference.abs().max() < precision.CONVERTED
    stated = f"context {SHORT}"
    assert stated in conversion.summary()
    assert stated in (out / "README.md").read_text()
    assert inspect_checkpoint(out).max_context == SHORT
    with refused():
        run_conversion(longrope, tmp_path / "own", context=SHORT, **{**options, "layout": "kvfold"})


@pytest.mark.parametrize(
    ("family", "changes", "lost"),
    CASES["lost"],
)
def test_a_property_that_no_rule_knows_is_missed_at_the_end_of_planning(
    family, changes, lost, tiny_family, monkeypatch, refused
):
    monkeypatch.setitem(spec._FEATURES, "stock", [])
    source = tiny_family(family, **changes)
    request = ConvertRequest(source, "out", to="mla", kv_rank=8, rope_dim=4, layout="free")
    with refused(lost):
        make_plan(request, open_checkpoint(source))


def test_weights_of_whole_numbers_are_refused(tiny_family, refused):
    checkpoint = open_checkpoint(tiny_family("llama"))
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint.tensors[name] = replace(checkpoint.tensors[name], dtype="I16")
    with refused():
        make_plan(ConvertRequest("m", "o", "gqa", kv_heads=2), checkpoint)
