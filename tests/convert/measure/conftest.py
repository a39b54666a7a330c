"""A tiny model that reads text, for what must hold whatever a model knows."""

import pytest


@pytest.fixture(scope="session")
def reader(tiny_family):
    """64 cache elements per token and layer: four heads, where the tiny models of the families have
    eight.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 2048}
    return tiny_family("llama", **sizes, mlp_bias=False)
