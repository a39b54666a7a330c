"""``kvfold inspect``: facts from headers, targets, and what fits on a terminal."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.checkpoints import edit_json, read_json, run_conversion
from helpers.wrappers import make_wrapper

from kvfold.convert import inspect_checkpoint
from kvfold.convert.commands.inspect_command import format_inspection
from kvfold.convert.data import demo_folder
from kvfold.convert.families.family import list_supported_model_types

FAMILIES = Path(__file__).resolve().parents[3] / "docs" / "families.md"
MLA = {"to": "mla", "method": "svd"}


def test_facts_of_the_shipped_model():
    facts = inspect_checkpoint(str(demo_folder())).to_dict()
    assert facts["cache"] == {
        "cache_elements": 512,
        "rounded": {"16 bits": 1024, "FP8": 512, "INT4": 320},
        "bytes_per_token": 4 * 512 * 2,
        "bytes": {"8k": 8192 * 4096, "128k": 131072 * 4096},
    }
    saves = {target["options"]: target["saves"] for target in facts["targets"]}
    assert saves["--to gqa --kv-heads 4"] == 0.5
    assert "--to mla --kv-rank 256 --rope-dim 64 --layout engine" in saves
    assert saves["--to mqa"] == saves["--to mla --budget 64"] == 0.875


@pytest.mark.parametrize("name", list_supported_model_types())
def test_every_family_is_inspected(tiny_family, name):
    facts = inspect_checkpoint(str(tiny_family(name)))
    assert facts.family == name
    assert facts.targets
    assert f"{facts.kv_heads} key/value heads" in format_inspection(facts)


def test_properties_of_a_family_are_listed(tiny_family):
    assert inspect_checkpoint(str(tiny_family("qwen2"))).biases == ["q", "k", "v"]
    normed = inspect_checkpoint(str(tiny_family("qwen3", use_sliding_window=False)))
    assert "rms norm on queries and keys" in format_inspection(normed)


def test_a_model_without_a_stock_mla_class_has_targets_in_layout_kvfold(tiny_family):
    facts = inspect_checkpoint(tiny_family("gemma3_text"))
    assert facts.not_stock
    assert not facts.not_mla
    halved = next(target for target in facts.targets if "--budget" in target.options)
    assert halved.options == f"--to mla --budget {facts.cache.cache_elements // 2}"
    assert halved.cache_elements == facts.cache.cache_elements // 2


@pytest.mark.parametrize("target", [{}, {"layout": "free"}, {"layout": "kvfold"}])
def test_a_config_without_weights_is_enough(target, tiny_family, tmp_path):
    model = tiny_family("qwen3", use_sliding_window=False)
    if target:
        out = tmp_path / "out"
        run_conversion(model, out, kv_rank=8, rope_dim=4, **target, **MLA)
        model = out
    folder = tmp_path / model.name / "config"
    folder.mkdir(parents=True)
    shutil.copy(model / "config.json", folder)
    found = inspect_checkpoint(folder)
    facts = inspect_checkpoint(model)
    assert (found.attention, found.cache) == (facts.attention, facts.cache)
    assert [target.options for target in found.targets] == [
        target.options for target in facts.targets
    ]


@pytest.mark.parametrize("layout", [None, "kvfold"])
def test_windowed_layers_cache_their_window_only(tmp_path, tiny_family, layout):
    """One of two layers has a window of 8."""
    model = tiny_family("gemma2", max_position_embeddings=16384)
    if layout is not None:
        out = tmp_path / "out"
        run_conversion(model, out, kv_rank=8, rope_dim=4, layout=layout, **MLA)
        model = out
    facts = inspect_checkpoint(model)
    assert facts.windows == [8]
    layer_bytes = facts.cache.bytes_per_token // facts.layers
    assert facts.cache.bytes["8k"] == layer_bytes * (8 + 8192)


def test_the_page_of_families_lists_every_family_and_tests_that_exist():
    named = set(re.findall(r"[a-z0-9_]+", FAMILIES.read_text()))
    assert set(list_supported_model_types()) <= named
    tests = {path.stem for path in Path(__file__).parents[1].glob("*/test_*.py")}
    assert {name for name in named if name.startswith("test_")} <= tests


def test_an_mla_result_is_inspected(demo_latent, tmp_path):
    facts = inspect_checkpoint(demo_latent)
    assert "8 heads over a latent of 24 and a rotary key of 8" in format_inspection(facts)
    assert (facts.attention, facts.kv_rank, facts.rotary_dims) == ("MLA", 24, 8)
    assert facts.cache.cache_elements == 32
    assert {support.engine for support in facts.engines if support.serves} == {"transformers"}
    # Engines were not tried with what others write in these classes.
    stranger = shutil.copytree(demo_latent, tmp_path / "stranger")
    (stranger / "kvfold.json").unlink()
    assert inspect_checkpoint(stranger).engines == []


def test_a_latent_model_in_a_wrapper_is_inspected(tmp_path, refused):
    make_wrapper("llava", tmp_path / "llava")
    out = tmp_path / "latent"
    run_conversion(tmp_path / "llava", out, kv_rank=16, rope_dim=8, **MLA)
    facts = inspect_checkpoint(out)
    sizes = (facts.family, facts.attention, facts.kv_rank, facts.rotary_dims)
    assert sizes == ("llava", "MLA", 16, 8)
    assert facts.cache.cache_elements == 24
    text = read_json(out / "config.json")["text_config"]
    edit_json(out / "config.json", text_config={**text, "kv_lora_rank": 12})
    with refused():
        inspect_checkpoint(out)
