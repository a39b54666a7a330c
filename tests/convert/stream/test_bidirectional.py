"""Families whose config may say ``use_bidirectional_attention``: both streams see it, and folds are fitted to it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfold.attention.drift.loaded import LoadedStream
from kvfold.attention.drift.streams import LayerOutput, LayerStream
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.families.layout import read_layer, write_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.families.rotary import layer_rotary
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.passes import survey
from kvfold.convert.walk.statistics import StatisticsAccumulator

LENGTH = 31
WINDOWS = {"gemma": [None, None], "gemma3_text": [5, None]}  # a window of 8 is 8 // 2 + 1 keys to either side


@pytest.fixture(params=WINDOWS)
def folder(request: pytest.FixtureRequest, tiny_family: Any) -> Path:
    flagged: Path = tiny_family(request.param, use_bidirectional_attention=True)
    config = json.loads((flagged / "config.json").read_text())
    if "sliding_window" in config:
        config["sliding_window"] = 8  # as in a real config: making the model has halved it once, loading will again
        (flagged / "config.json").write_text(json.dumps(config))
    return flagged


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (6, LENGTH), generator=torch.Generator().manual_seed(1))


def stock(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stream_of(folder: Path) -> CheckpointStream:
    checkpoint = open_checkpoint(str(folder))
    return CheckpointStream(checkpoint.config, checkpoint.read, checkpoint.tensors)


@torch.no_grad()
def outputs(stream: LayerStream, tokens: Tensor) -> list[LayerOutput]:
    hidden, found = stream.embed(tokens), []
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            found.append(layer(hidden))
        hidden = found[-1].hidden
    return found


def profile(output: LayerOutput) -> Tensor:
    accumulator = StatisticsAccumulator()
    accumulator.add(output)
    return accumulator.result().profile


@torch.no_grad()
def maps(found: list[LayerOutput]) -> list[Tensor]:
    """Mean attention maps ``[H, T, T]`` of every layer in float64, by the formula."""
    result = []
    order = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    for output in found:
        share = output.query.shape[1] // output.key.shape[1]
        scores = output.scale * output.query.double() @ output.key.double().repeat_interleave(share, 1).mT
        seen = order < (LENGTH if output.window is None else output.window)
        result.append(scores.masked_fill(~seen, -torch.inf).softmax(-1).mean(0))
    return result


def test_later_tokens_change_earlier_ones(folder: Path, tokens: Tensor) -> None:
    model, other = stock(folder), tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 97
    with torch.no_grad():
        assert (model(tokens).logits[:, 0] - model(other).logits[:, 0]).abs().max() > 1e-4


def test_both_streams_say_that_attention_goes_both_ways(folder: Path, tokens: Tensor) -> None:
    loaded, read = outputs(LoadedStream(stock(folder)), tokens), outputs(stream_of(folder), tokens)
    windows = WINDOWS[open_checkpoint(str(folder)).config["model_type"]]
    for ours, theirs, window in zip(read, loaded, windows, strict=True):
        assert ours.causal is theirs.causal is False
        assert ours.window == theirs.window == window
        torch.testing.assert_close(ours.attention, theirs.attention, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(profile(ours), profile(theirs), rtol=1e-6, atol=1e-9)


def test_profiles_count_keys_on_both_sides(folder: Path, tokens: Tensor) -> None:
    found = outputs(stream_of(folder), tokens)
    for output, weights in zip(found, maps(found), strict=True):
        both = [weights.diagonal(-d, 1, 2).sum(1) + (d > 0) * weights.diagonal(d, 1, 2).sum(1) for d in range(LENGTH)]
        torch.testing.assert_close(profile(output), torch.stack(both, 1) / LENGTH, rtol=1e-5, atol=1e-7)


def test_folds_are_fitted_to_both_sides(folder: Path, tokens: Tensor) -> None:
    checkpoint, stream = open_checkpoint(str(folder)), stream_of(folder)
    model = model_of(checkpoint.config)
    found = outputs(stream, tokens)
    for index, statistics, _ in survey(stream, tokens):
        weights = read_layer(model, index, checkpoint.read)
        rotary = layer_rotary(model, index)
        groups = grouping.contiguous(weights.kv_heads, 2)
        causal = StatisticsAccumulator()
        causal.add(LayerOutput(**{**vars(found[index]), "causal": True}))
        assert not torch.allclose(causal.result().profile, statistics.profile, atol=1e-3)
        expected = principal.fold(weights, replace(statistics, profile=profile(found[index])), rotary, groups)
        wrong = principal.fold(weights, replace(statistics, profile=causal.result().profile), rotary, groups)
        fitted = principal.fold(weights, statistics, rotary, groups)
        torch.testing.assert_close(fitted.k, expected.k, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(fitted.k, wrong.k, rtol=1e-3, atol=1e-4)


def test_keys_on_both_sides_count_in_the_fit(folder: Path, tokens: Tensor) -> None:
    checkpoint, stream = open_checkpoint(str(folder)), stream_of(folder)
    model = model_of(checkpoint.config)
    found = outputs(stream, tokens)
    hidden = stream.embed(tokens)
    for index, statistics, _ in survey(stream, tokens):
        assert not statistics.causal
        weights, rotary = read_layer(model, index, checkpoint.read), layer_rotary(model, index)
        errors = []
        for causal in (False, True):
            fitted = replace(statistics, causal=causal)
            folded = principal.fold(weights, fitted, rotary, grouping.contiguous(weights.kv_heads, 2))
            errors.append(attention_error(checkpoint, index, folded, hidden, found[index].attention))
        assert errors[0] < 0.99 * errors[1]
        hidden = found[index].hidden


@torch.no_grad()
def attention_error(
    checkpoint: Checkpoint, index: int, folded: AttentionWeights, hidden: Tensor, expected: Tensor
) -> float:
    """Relative error of the attention's output of layer ``index`` with two key/value heads instead of eight."""
    config = {**checkpoint.config, "num_key_value_heads": 2}
    new = write_layer(model_of(config), index, folded)

    def read(name: str) -> Tensor:
        return new[name] if name in new else checkpoint.read(name)

    with CheckpointStream(config, read, checkpoint.tensors).open_layer(index) as layer:
        return float((layer.attend(hidden).attention - expected).norm() / expected.norm())
