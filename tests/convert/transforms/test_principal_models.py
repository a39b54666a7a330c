"""Cases in which a principal conversion must be exact, and its invariances: in the logits of whole models."""

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


def changed(source, name, change):
    """A copy of the model in which ``change(tensors, prefix, generator)`` has edited every layer's attention."""
    folder = shutil.copytree(source, source.parent / name)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for layer in range(2):
        change(tensors, f"model.layers.{layer}.self_attn.", generator)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def edit(tensors, names, change):
    """``change`` of the rows of some tensors, as ``[H, D, n]``."""
    for name in names:
        tensors[name] = change(tensors[name].view(HEADS, DIMS, -1)).reshape(tensors[name].shape)


def other_bases(tensors, prefix, generator):
    """Value heads rotated, key pairs turned; the output projection and the queries undo both."""
    turns, _ = torch.linalg.qr(torch.randn(HEADS, DIMS, DIMS, generator=generator))
    edit(tensors, [f"{prefix}v_proj.{kind}" for kind in ("weight", "bias")], lambda rows: turns @ rows)
    columns = tensors[f"{prefix}o_proj.weight"]
    undone = torch.einsum("ehd,hcd->ehc", columns.view(-1, HEADS, DIMS), turns)
    tensors[f"{prefix}o_proj.weight"] = undone.reshape(columns.shape)
    angle = 6.28 * torch.rand(HEADS, DIMS // 2, 1, generator=generator)

    def turn(rows):
        one, two = rows.chunk(2, dim=1)
        return torch.cat((one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), dim=1)

    edit(tensors, [f"{prefix}{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")], turn)


def twin_heads(tensors, prefix, generator):
    names = [f"{prefix}{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")]
    edit(tensors, names, lambda rows: rows[::2].repeat_interleave(2, 0))


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


def test_bases_of_heads_do_not_matter(source, tmp_path, text):
    other = changed(source, "other", other_bases)
    assert difference(source, other) < 1e-5
    folded = [converted(each, tmp_path / f"{each.name}-out", text, kv_heads=2) for each in (source, other)]
    assert difference(*folded) < 1e-4


def test_identical_heads_fold_exactly(source, tmp_path, text):
    twins = changed(source, "twins", twin_heads)
    assert difference(twins, converted(twins, tmp_path / "out", text, kv_heads=4, group="similar")) < 1e-5


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
