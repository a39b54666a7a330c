"""Parameters from stored tensors, by transformers' own conversions."""

import shutil

import pytest
import tiny_models
import torch
from helpers.checkpoints import edit_json
from transformers import LlamaConfig
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.stream import parameters as weights_of
from kvfold.convert.stream.parameters import WeightMap, load_model
from kvfold.convert.stream.stock import build_empty_model

CONFIG = LlamaConfig(**tiny_models.SIZES).to_dict()
JOINED = WeightConverter(
    source_patterns=["mlp.low.weight", "mlp.high.weight"],
    target_patterns="mlp.up_proj.weight",
    operations=[Concatenate(dim=0)],
)


@pytest.fixture
def model():
    return build_empty_model(CONFIG, torch.float32)


@pytest.fixture
def tensors(model):
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.fixture
def conversions(monkeypatch):
    """``conversions(*entries)``: transformers has these conversions for the model."""
    return lambda *entries: monkeypatch.setattr(
        weights_of, "get_model_conversion_mapping", lambda model: list(entries)
    )


@pytest.mark.parametrize(
    ("conversion", "name"),
    [(WeightRenaming(".feed_forward.", ".mlp."), "feed_forward.up_proj"), (JOINED, "mlp.low")],
    ids=["renamed", "joined"],
)
def test_two_ways_to_one_parameter_are_refused(
    model, tensors, conversions, conversion, name, refused
):
    conversions(conversion)
    with refused(kind=KvfoldError):
        WeightMap(model, [*tensors, f"model.layers.0.{name}.weight"])


def test_tied_parameters_come_from_each_other(refused):
    tied = build_empty_model({**CONFIG, "tie_word_embeddings": True}, torch.float32)
    names = [name for name in tied.state_dict() if name != "lm_head.weight"]
    weights = WeightMap(tied, names)
    assert weights.find_source("lm_head.weight").names == ("model.embed_tokens.weight",)
    with refused():
        WeightMap(tied, []).find_source("lm_head.weight")


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 3}, {"intermediate_size": 40}, {"num_experts_per_tok": 9}]
)
def test_a_model_is_loaded_only_if_its_tensors_are_those_of_its_config(
    changes, tiny_family, tmp_path, refused
):
    """transformers puts random numbers in the place of what is missing, and notices other values
    when it runs.
    """
    family = "mixtral" if "num_experts_per_tok" in changes else "llama"
    model = shutil.copytree(tiny_family(family), tmp_path / "model")
    edit_json(model / "config.json", **changes)
    with refused():
        load_model(open_checkpoint(model), torch.float32, False)
