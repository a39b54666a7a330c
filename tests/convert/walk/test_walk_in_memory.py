"""Streaming a checkpoint layer by layer folds it as a computation with the whole model in memory does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.families.layout import layer_rotary, read_layer, write_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.passes import survey


def whole_statistics(model: Any, tokens: Tensor) -> list[LayerStatistics]:
    """Of every layer of a stock model in float64, from all its inputs and whole attention maps at once."""
    inputs: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        inputs.append(kwargs["hidden_states"].flatten(0, 1))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        maps = model(tokens, output_attentions=True).attentions
    length = tokens.shape[1]
    found = []
    for rows, weights in zip(inputs, maps, strict=True):
        mean = weights.double().mean(0)
        profile = torch.stack([mean.diagonal(-delta, -2, -1).sum(-1) for delta in range(length)], -1) / length
        found.append(LayerStatistics(rows.T @ rows / len(rows), rows.mean(0), len(rows), profile))
    return found


def folded(checkpoint: Checkpoint, layer: int, statistics: LayerStatistics) -> dict[str, Tensor]:
    model = model_of(checkpoint.config)
    weights = read_layer(model, layer, checkpoint.read)
    rotary = layer_rotary(model, layer)
    groups = grouping.contiguous(weights.kv_heads, 2)
    return write_layer(model, layer, principal.fold(weights, statistics, rotary, groups))


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gemma2"])
def test_weights_are_equal(name: str, tiny_family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.walk.passes._CPU_TOKENS", 100)
    folder: Path = tiny_family(name)
    tokens = torch.randint(3, 97, (24, 31), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    whole = whole_statistics(model, tokens)
    checkpoint = open_checkpoint(str(folder))
    stream = CheckpointStream(checkpoint.config, checkpoint.read, checkpoint.tensors)
    for index, statistics, _ in survey(stream, tokens):
        expected, found = folded(checkpoint, index, whole[index]), folded(checkpoint, index, statistics)
        assert list(found) == list(expected)
        for tensor in expected:
            torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-5)
    checkpoint.close()
