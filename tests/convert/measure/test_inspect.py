import json
import re
from pathlib import Path

import pytest
from helpers.wrappers import make_wrapper

from kvfold.convert import ConvertRequest, convert_checkpoint, inspect_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import supported

FAMILIES = Path(__file__).resolve().parents[3] / "docs" / "families.md"


def test_facts_of_the_shipped_model():
    facts = inspect_checkpoint(str(demo_folder()))
    wanted = {
        "family": "llama",
        "attention": "MHA",
        "layers": 4,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 32,
    }
    wanted |= {
        "model_dim": 256,
        "biases": [],
        "qk_norm": None,
        "rotary_dims": 32,
        "rope": "default",
    }
    wanted |= {"dtype": "BF16", "max_context": 512}
    assert {key: getattr(facts, key) for key in wanted} == wanted
    cache = facts.cache
    assert (cache.cache_elements, cache.bytes_per_token) == (512, 4 * 512 * 2)
    assert cache.bytes == {"8k": 8192 * 4096, "128k": 131072 * 4096}
    saves = {target.options: target.saves for target in facts.targets}
    assert (
        saves.items()
        >= {
            "--to gqa --kv-heads 4": 0.5,
            "--to mqa": 0.875,
            "--to mla --budget 64": 0.875,
        }.items()
    )


@pytest.mark.parametrize("name", supported())
def test_every_family_is_inspected(tiny_family, name):
    facts = inspect_checkpoint(str(tiny_family(name)))
    assert facts.family == name
    assert facts.targets
    text = facts.summary()
    assert f"{facts.kv_heads} key/value heads" in text
    assert ("biases on" in text) == bool(facts.biases)


def test_properties_of_a_family_are_listed(tiny_family):
    assert inspect_checkpoint(str(tiny_family("qwen2"))).biases == ["q", "k", "v"]
    assert inspect_checkpoint(str(tiny_family("qwen3"))).qk_norm == "rms"
    text = inspect_checkpoint(str(tiny_family("qwen3", use_sliding_window=False))).summary()
    assert "rms norm on queries and keys" in text
    assert (
        "which headers do not show; a conversion measures it on text (`head_norms` in kvfold.json)"
        in text
    )


def test_windowed_layers_hold_their_window_only(tiny_family):
    facts = inspect_checkpoint(str(tiny_family("gemma2", max_position_embeddings=16384)))
    assert facts.windows == [8]
    width = facts.cache.bytes_per_token // facts.layers
    windowed = 1  # of two layers
    assert facts.cache.bytes["8k"] == width * (windowed * 8 + (facts.layers - windowed) * 8192)


def test_windows_count_in_a_result_of_layout_kvfold(tmp_path, tiny_family):
    source = tiny_family("gemma2", max_position_embeddings=16384)
    out = tmp_path / "out"
    request = {
        "to": "mla",
        "kv_rank": 8,
        "rope_dim": 4,
        "layout": "kvfold",
        "method": "svd",
        "quiet": True,
    }
    convert_checkpoint(ConvertRequest(source, out, **request))
    facts = inspect_checkpoint(out)
    per_layer = facts.cache.bytes_per_token // facts.layers
    assert facts.cache.bytes["8k"] == per_layer * (
        8 + (facts.layers - 1) * 8192
    )  # one of two layers has a window of 8


def test_the_readme_lists_every_family():
    table = FAMILIES.read_text()
    assert set(supported()) <= set(re.findall(r"[a-z0-9_]+", table))
    tests = {path.stem for path in Path(__file__).parents[1].glob("*/test_*.py")}
    rows = [
        line.split("|")
        for line in table.splitlines()
        if line.startswith("| ") and "`model_type`" not in line
    ]
    assert all(set(re.findall(r"`(\w+)`", row[-2])) & tests for row in rows)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[-2])} <= tests


def test_latent_models_are_distinguished(tmp_path, tiny_family):
    facts = inspect_checkpoint(demo_folder()).to_dict()
    assert facts["latent"] == {"possible": True, "numbers_below": 512, "rope_dim_up_to": 256}
    refused = inspect_checkpoint(tiny_family("gemma2")).to_dict()["latent"]
    assert not refused["possible"]
    assert all(reason.startswith("--to mla: gemma2 ") for reason in refused["because"])
    request = {"to": "mla", "kv_rank": 48, "rope_dim": 16, "method": "svd", "quiet": True}
    convert_checkpoint(ConvertRequest(demo_folder(), tmp_path / "latent", **request))
    found = inspect_checkpoint(tmp_path / "latent")
    assert "8 heads over a latent of 48 and a rotary key of 16" in found.summary()
    latent = found.to_dict()
    assert latent.keys() - facts.keys() == {"value_dim", "kv_rank", "q_rank"}
    assert (latent["attention"], latent["kv_rank"], latent["rotary_dims"], latent["q_rank"]) == (
        "MLA",
        48,
        16,
        None,
    )
    assert (
        latent["cache"]["cache_elements"],
        latent["targets"],
        latent["latent"],
    ) == (64, [], None)
    assert all(json.loads(json.dumps(values)) == values for values in (facts, latent))


def test_a_latent_model_in_a_wrapper_is_inspected(tmp_path):
    make_wrapper("llava", tmp_path / "llava")
    request = {"to": "mla", "kv_rank": 16, "rope_dim": 8, "method": "svd", "quiet": True}
    convert_checkpoint(ConvertRequest(tmp_path / "llava", tmp_path / "latent", **request))
    found = inspect_checkpoint(tmp_path / "latent")
    assert (found.family, found.attention, found.kv_rank, found.rotary_dims) == (
        "llava",
        "MLA",
        16,
        8,
    )
    assert found.cache.cache_elements == 24
    config = json.loads((tmp_path / "latent" / "config.json").read_text())
    config["text_config"]["kv_lora_rank"] = 12
    (tmp_path / "latent" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"wrong shape: language_model\.model\.layers\.0"):
        inspect_checkpoint(tmp_path / "latent")
