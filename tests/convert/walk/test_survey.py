"""Statistics of a checkpoint streamed layer by layer are those of the whole model in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.stream.stream import CheckpointStream
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


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "gemma2"])
def test_statistics_are_those_of_the_stock_model(name: str, tiny_family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks."""
    monkeypatch.setattr("kvfold.convert.walk.passes._CPU_TOKENS", 100)
    folder: Path = tiny_family(name)
    tokens = torch.randint(3, 97, (9, 31), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    checkpoint = open_checkpoint(str(folder))
    stream = CheckpointStream(checkpoint.config, checkpoint.read, checkpoint.tensors)
    for found, expected in zip(survey(stream, tokens), whole_statistics(model, tokens), strict=True):
        assert found[1].tokens == expected.tokens
        for part in ("gram", "mean", "profile"):
            torch.testing.assert_close(getattr(found[1], part), getattr(expected, part), rtol=1e-4, atol=1e-5)
    checkpoint.close()
