"""Checkpoint folders in tests: their tensors, and the stock model that they make."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import make_model


def run_conversion(model, out, progress=None, **options):
    """The conversion of ``model`` into ``out``; it prints no progress."""
    return convert_checkpoint(ConvertRequest(model, out, **{"quiet": True, **options}), progress)


def read_json(file):
    """The content of a JSON file."""
    return json.loads(file.read_text())


def edit_json(file, **changes):
    """Change entries of a JSON file, or make it of these alone."""
    content = read_json(file) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def tensors(folder):
    """Every tensor of the folder's safetensors files."""
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_tensors(folder, other):
    """Assert that two folders have tensors of the same names and bytes."""
    torch.testing.assert_close(tensors(folder), tensors(other), rtol=0, atol=0)


def read_model(folder):
    """The model that the folder's config.json describes."""
    return make_model(read_json(folder / "config.json"))


def convert(source, out, kv_heads=None, **options):
    """``out`` with the conversion of ``source``: the means of groups unless ``options`` differ."""
    options = {"to": "gqa", "method": "mean", "allow_growth": True, "quiet": True, **options}
    convert_checkpoint(ConvertRequest(source, out, kv_heads=kv_heads, **options))
    return out


def full_split(source, more=0):
    """Options of latent attention with which nothing is lost; ``more`` channels than needed."""
    size = read_model(source).geometry
    split = {"kv_rank": size.model_dim + more, "rope_dim": size.rotary_dims * size.kv_heads}
    return {"to": "mla", "method": "svd", **split}


def stock_model(folder, loader=AutoModelForCausalLM, **options):
    """The model as transformers loads it, in evaluation mode; no tensor missing, left over or
    misshapen.
    """
    # Below 5.23 gemma2's default in transformers leaves out its softcap.
    if read_json(folder / "config.json").get("attn_logit_softcapping"):
        options.setdefault("attn_implementation", "eager")
    model, info = loader.from_pretrained(folder, output_loading_info=True, **options)
    assert {
        key: info[key]
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[key]
    } == {}
    return model.eval()


@torch.no_grad()
def compute_logits(folder, length=24, **options):
    """The logits of the folder's model for random tokens ``[2, length]``, always the same."""
    tokens = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(5))
    return stock_model(folder, **options)(tokens).logits


def hub_config(name):
    """What shapes and targets need of the config.json of a hub's model that a recipe or a page
    names."""
    file = Path(__file__).parents[1] / "convert" / "recipe_configs.json"
    return json.loads(file.read_text())[name]


def add_demo_tokenizer(folder):
    """Gives a model with at least 2048 tokens the tokenizer of the model that ships."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_folder() / name, folder / name)
