"""Every family to every target that its class can express, where nothing may be lost, loaded in a fresh process.

Folds start from twin heads, which share without loss; latent targets have as many channels as the model is wide, and
all of its rotary dims.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import precision
from helpers.processes import run_python
from safetensors.torch import load_file, save_file
from tiny_models import CLASSICS, tiny_config

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import supported
from kvfold.convert.families.layout import read_layer, write_layer
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems

FULL = ["full_attention", "full_attention"]
# What a model of the family must be like for the latent class to express it, beside one context for all its layers.
LATENT = {
    "llama": {"mlp_bias": False},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "phi3": {"sliding_window": None},
    "smollm3": {"use_sliding_window": False, "no_rope_layers": [1, 1]},
    "granite": {"mlp_bias": False, "residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
    "hyperclovax": {
        "mlp_bias": False,
        "use_post_norm": False,
        "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "cwm": {"layer_types": FULL},
    "ernie4_5": {"use_bias": False},
    "glm": {},
    "helium": {"mlp_bias": False},
    "internlm3": {"mlp_bias": False, "attention_bias": False},
    "iquestcoder": {},
    "ministral": {"layer_types": FULL},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}
        | {"original_max_position_embeddings": 16},
    },
    "seed_oss": {"mlp_bias": False},
}
APPROXIMATED = (
    "qwen3",
    "qwen3_moe",
    "olmoe",
)  # linear maps stand in for its norms on queries and keys: never without loss
COMPARE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(5))

def logits(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=False
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (folder, info)
    with torch.no_grad():
        return model.eval()(tokens).logits

pairs = json.load(open(sys.argv[1]))
print(json.dumps({name: float((logits(out) - logits(source)).abs().max()) for name, (source, out) in pairs.items()}))
"""


def test_the_latent_class_expresses_no_other_family():
    """Whatever their options: tiny models of them have a problem that no option removes."""
    lasting = (
        "LayerNorm",
        "another kind of RMSNorm",
        "no gate",
        "placed as",
        "experts",
        "after their rotary embedding",
    )
    for name in set(supported()) - {*LATENT, *APPROXIMATED}:
        config = json.loads(tiny_config(name, {}).to_json_string(use_diff=False))
        found = " ".join(latent_problems(model_of(config), LatentTarget(8, 4)))
        assert any(word in found for word in lasting), (name, found)


def test_queries_that_grow_with_their_position_are_no_latent_queries():
    config = json.loads(tiny_config("ministral3", {"sliding_window": None}).to_json_string(use_diff=False))
    assert latent_problems(model_of(config), LatentTarget(8, 4)) == [
        "--to mla: ministral3 multiplies queries by a factor that grows with their position, MLA layouts do "
        "not; --to gqa works"
    ]


def test_keys_normalized_behind_their_rotation_are_pooled_only(tiny_family, tmp_path):
    source = tiny_family("hunyuan_v1_dense")
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out", to="gqa", kv_heads=4, method="principal")
    assert str(caught.value) == (
        "--method principal does not support hunyuan_v1_dense, which normalizes queries and keys after their rotary "
        "embedding; use --method mean with --refine auto"
    )


@pytest.mark.slow  # builds, converts and loads two models of every family
def test_logits_stay_where_nothing_is_lost(tiny_family, tmp_path):
    pairs = dict(folds(tiny_family, tmp_path)) | dict(latents(tiny_family, tmp_path))
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    differences = json.loads(run_python("-c", COMPARE, tmp_path / "pairs.json").stdout)
    assert differences.keys() == pairs.keys()
    assert {name: value for name, value in differences.items() if not value < precision.CONVERTED} == {}


def folds(tiny_family, folder: Path):
    """A model whose heads are twins, and its fold to half as many."""
    for name in supported():
        if name in CLASSICS:  # see test_own_code.py
            continue
        source = twins(tiny_family(name, num_key_value_heads=4), folder / f"{name}-twins")
        yield f"{name} to GQA-4", (str(source), convert(source, folder / f"{name}-gqa", to="gqa", kv_heads=4))


def latents(tiny_family, folder: Path):
    for name, changes in LATENT.items():
        source = tiny_family(name, num_key_value_heads=2, **changes)
        geometry = model_of(json.loads((source / "config.json").read_text())).geometry
        rope, rank = geometry.rotary_dims * geometry.kv_heads, geometry.model_dim + 1
        out = convert(source, folder / f"{name}-mla", to="mla", method="svd", kv_rank=rank, rope_dim=rope)
        yield f"{name} to MLA", (str(source), out)


def convert(source: Path, out: Path, **options) -> str:
    options = {"method": "mean", **options}
    convert_checkpoint(ConvertRequest(model=str(source), out=str(out), allow_growth=True, quiet=True, **options))
    return str(out)


def twins(source: Path, out: Path) -> Path:
    """``source`` with every key/value head stored twice, side by side."""
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    model = model_of(config)
    doubled = Model(model.family, config | model.kv_config(2 * model.geometry.kv_heads))
    for layer in range(model.geometry.layers):
        weights = read_layer(model, layer, tensors.__getitem__)
        twice = {name: getattr(weights, name) for name in ("k", "v", "k_bias", "v_bias")}
        twice = {name: None if rows is None else rows.repeat_interleave(2, 0) for name, rows in twice.items()}
        norm = weights.k_norm and weights.k_norm.map(lambda rows: torch.repeat_interleave(rows, 2, 0))
        for name in model.attention_names(layer):
            del tensors[name]
        tensors |= write_layer(doubled, layer, replace(weights, k_norm=norm, **twice))
    out.mkdir()
    (out / "config.json").write_text(json.dumps(doubled.config))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out
