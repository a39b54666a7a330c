"""A tiny model that reads text, for what must hold whatever a model knows."""

import shutil
from pathlib import Path

import pytest
from helpers.checkpoints import add_demo_tokenizer


@pytest.fixture(scope="session")
def reader(tmp_path_factory, tiny_family):
    """64 cache elements per token and layer: four heads, where the tiny models of the families have
    eight.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 2048}
    made = tiny_family("llama", **sizes, mlp_bias=False)
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("reader") / "model"))
    add_demo_tokenizer(folder)
    return folder
