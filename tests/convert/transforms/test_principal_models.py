"""Cases in which a principal conversion must be exact, in the logits of whole models."""

import shutil

import pytest
import torch
from helpers.checkpoints import add_demo_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint

HEADS, DIMS = 8, 8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "few.txt"
    file.write_text("def function(argument): return a value of the list. " * 400)
    return file


@pytest.fixture
def source(tiny_family, tmp_path):
    """A random float32 Llama whose tokenizer is the demo's."""
    folder = shutil.copytree(tiny_family("llama", vocab_size=2048, attention_bias=True), tmp_path / "source")
    add_demo_tokenizer(folder)
    return folder


def twins(source):
    """A copy of the model in which neighboring key/value heads are equal."""
    folder = shutil.copytree(source, source.parent / "twins")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".k_proj." in name or ".v_proj." in name]:
        heads = tensors[name].view(HEADS, DIMS, -1)[::2].repeat_interleave(2, 0)
        tensors[name] = heads.reshape(tensors[name].shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def converted(source, out, text, **options):
    request = ConvertRequest(
        str(source), str(out), to="gqa", calibration=str(text), samples=8, seq_len=32, quiet=True, **options
    )
    convert_checkpoint(request)
    return out


def difference(one, other):
    """The largest difference of two models' logits, relative to the largest logit."""
    tokens = torch.randint(3, 2048, (4, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()(tokens).logits
            for each in (one, other)
        )
    return float((expected - found).abs().max() / expected.abs().max())


def test_identical_heads_fold_exactly(source, tmp_path, text):
    folder = twins(source)
    assert difference(folder, converted(folder, tmp_path / "out", text, kv_heads=4, group="similar")) < 1e-5


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
    assert difference(folder, out) < 1e-4
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(load_file(out / "model.safetensors")["model.layers.0.self_attn.sinks"], sinks[order])
