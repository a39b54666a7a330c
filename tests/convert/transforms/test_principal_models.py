"""Invariances of a principal conversion, and cases in which it must be exact: in the logits of whole models."""

import shutil

import pytest
import torch
from helpers import precision
from helpers.checkpoints import add_demo_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint

HEADS, DIMS = 8, 8
SHAPE = {"vocab_size": 2048, "attention_bias": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "few.txt"
    file.write_text("def function(argument): return a value of the list. " * 400)
    return file


@pytest.fixture
def source(tiny_family, tmp_path):
    """A random float32 Llama whose tokenizer is the demo's."""
    folder = shutil.copytree(tiny_family("llama", **SHAPE), tmp_path / "source")
    add_demo_tokenizer(folder)
    return folder


def changed(source, name, change):
    """A copy of the model in which ``change`` has replaced attention tensors ``[H, D, ...]`` (``[E, H, D]`` for o)."""
    folder = shutil.copytree(source, source.parent / name)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for layer in range(2):
        change({part: _Part(tensors, f"model.layers.{layer}.self_attn.{part}_proj.") for part in "qkvo"}, generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class _Part:
    def __init__(self, tensors, prefix):
        self._tensors, self._prefix = tensors, prefix

    def rows(self, change):
        """``change`` of the weight and the bias, both as ``[H, D, n]``."""
        for kind in ("weight", "bias"):
            tensor = self._tensors[self._prefix + kind]
            self._tensors[self._prefix + kind] = change(tensor.view(HEADS, DIMS, -1)).reshape(tensor.shape).contiguous()

    def columns(self, change):
        """``change`` of the weight's columns as ``[E, H, D]``."""
        tensor = self._tensors[self._prefix + "weight"]
        changed = change(tensor.view(-1, HEADS, DIMS))
        self._tensors[self._prefix + "weight"] = changed.reshape(tensor.shape).contiguous()


def turned_values(parts, generator):
    turns, _ = torch.linalg.qr(torch.randn(HEADS, DIMS, DIMS, generator=generator))
    parts["v"].rows(lambda rows: turns @ rows)
    parts["o"].columns(lambda columns: torch.einsum("ehd,hcd->ehc", columns, turns))


def turned_keys(parts, generator):
    angle = 6.28 * torch.rand(HEADS, DIMS // 2, 1, generator=generator)

    def turn(rows):
        one, two = rows.chunk(2, dim=1)
        return torch.cat((one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), dim=1)

    parts["q"].rows(turn)
    parts["k"].rows(turn)


def twin_heads(parts, generator):
    for part in "kv":
        parts[part].rows(lambda rows: rows[::2].repeat_interleave(2, 0))


def converted(source, out, text, **options):
    options = {"method": "principal", "group": "contiguous", "calibration": str(text), **options}
    if options["method"] == "mean":
        options |= {"group": None, "calibration": None}
    request = ConvertRequest(
        model=str(source), out=str(out), to="gqa", samples=8, seq_len=32, quiet=True, allow_growth=True, **options
    )
    convert_checkpoint(request)
    return out


@torch.no_grad()
def logits(folder):
    tokens = torch.randint(3, 2048, (4, 40), generator=torch.Generator().manual_seed(5))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


def largest(expected, found):
    """The largest difference, relative to the largest number."""
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.parametrize("change", [turned_values, turned_keys])
@pytest.mark.parametrize("group", ["contiguous", "similar"])
def test_bases_of_heads_do_not_matter_as_they_do_for_pooling(source, tmp_path, text, change, group):
    other = changed(source, "other", change)
    assert largest(logits(source), logits(other)) < 1e-5
    ours = [
        converted(model, tmp_path / f"{model.name}-ours", text, kv_heads=2, group=group) for model in (source, other)
    ]
    mean = [
        converted(model, tmp_path / f"{model.name}-mean", text, kv_heads=2, method="mean") for model in (source, other)
    ]
    assert largest(*map(logits, ours)) < precision.CONVERTED
    assert largest(*map(logits, mean)) > 1e-2


def test_as_many_heads_as_before_change_nothing(source, tmp_path, text):
    assert largest(logits(source), logits(converted(source, tmp_path / "out", text, kv_heads=HEADS))) < 1e-5


@pytest.mark.parametrize("group", ["contiguous", "similar"])
def test_identical_heads_fold_exactly(source, tmp_path, text, group):
    twins = changed(source, "twins", twin_heads)
    assert largest(logits(twins), logits(converted(twins, tmp_path / "out", text, kv_heads=4, group=group))) < 1e-5


def test_sinks_move_with_the_query_heads_of_their_group(tiny_family, tmp_path, text):
    """Twins that are no neighbors: query heads change places, each with its sink; rows of attention sum to under 1."""
    folder = shutil.copytree(tiny_family("gpt_oss", vocab_size=2048, num_key_value_heads=4), tmp_path / "source")
    add_demo_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".k_proj." in name or ".v_proj." in name]:
        half = tensors[name][: len(tensors[name]) // 2]
        tensors[name] = torch.cat([half, half])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sinks = tensors["model.layers.0.self_attn.sinks"]
    assert float(sinks.std()) > 0.1
    out = converted(folder, tmp_path / "out", text, kv_heads=2, group="similar")
    assert largest(logits(folder), logits(out)) < precision.CONVERTED
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(load_file(out / "model.safetensors")["model.layers.0.self_attn.sinks"], sinks[order])
