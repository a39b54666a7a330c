"""The recipes of docs/questions.md for quantized models, which kvfold refuses."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import edit_json, run_conversion, tensors
from safetensors.torch import save_file

from kvfold.convert.checkpoint.files import SINGLE
from kvfold.convert.checkpoint.opening import open_checkpoint_headers
from kvfold.convert.errors import InputError

DOCS = Path(__file__).parents[2] / "docs" / "questions.md"


def recipe(number, *changes):
    """Run the page's ``number``-th piece of Python in the current folder."""
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[number]
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    exec(code, {})


@pytest.fixture
def model(tiny_reader, tmp_path, monkeypatch):
    """A folder MODEL in the current one, with the config and the tokenizer of a tiny Llama."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_reader, "MODEL")
    return Path("MODEL")


def quantize(folder, settings, stored):
    """Store ``stored`` in ``folder`` as its quantized weights; kvfold must refuse them."""
    edit_json(folder / "config.json", dtype="bfloat16", quantization_config=settings)
    for file in folder.glob("model*"):
        file.unlink()
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / SINGLE)
    with pytest.raises(InputError, match="dequantize the model first"):
        open_checkpoint_headers(folder)


@pytest.mark.parametrize("tool", ["compressed-tensors", "fp8 blocks"])
def test_a_dequantized_model_converts(model, tool):
    pytest.importorskip("compressed_tensors", minversion="0.20")
    stored = {}
    meant = {}
    int8 = tool == "compressed-tensors"
    for name, value in tensors(model).items():
        meant[name] = value.bfloat16()
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name]
            continue
        rows, columns = (1, value.shape[1]) if int8 else (16, 16)
        blocks = value.float().unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        scale = blocks.abs().amax((1, 3)) / (127 if int8 else 448)
        scaled = blocks / scale[:, None, :, None]
        codes = scaled.round().to(torch.int8) if int8 else scaled.to(torch.float8_e4m3fn)
        stored[name] = codes.flatten(0, 1).flatten(1)
        stored[f"{name}_scale{'' if int8 else '_inv'}"] = scale
        meant[name] = (codes.float() * scale[:, None, :, None]).flatten(0, 1).flatten(1).bfloat16()
    quantize(model, read_cases(__file__)["int8" if int8 else "fp8"], stored)
    if int8:
        recipe(0)
    else:
        call = 'FP8BlockDequantizer.from_pretrained("MODEL", weight_block_size=(16, 16))'
        imported = ("import CompressedTensorsDequantizer", "import FP8BlockDequantizer")
        recipe(0, ('CompressedTensorsDequantizer("MODEL", ignore=dense)', call), imported)
    dense = tensors(Path("DENSE"))
    assert {*dense} == {*meant}
    for name, value in meant.items():
        torch.testing.assert_close(dense[name], value, msg=name)
    run_conversion("DENSE", "OUT", to="mqa", method="mean")
    assert list(Path("OUT").glob("tokenizer*"))


def test_mxfp4_experts_are_dequantized_by_transformers(model, tiny_family):
    source = tiny_family("gpt_oss", intermediate_size=64)
    shutil.copyfile(source / "config.json", model / "config.json")
    stored = {}
    for name, value in tensors(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value.bfloat16()
            continue
        experts, into, out = value.shape
        # Two numbers a byte, and a power of two for each 32 of them, here 2^0; 0x22 is twice 1.0.
        stored[f"{name}_blocks"] = torch.full((experts, out, into // 32, 16), 0x22).byte()
        stored[f"{name}_scales"] = torch.full((experts, out, into // 32), 127).byte()
    quantize(model, {"quant_method": "mxfp4"}, stored)
    recipe(1)
    for name, value in tensors(Path("DENSE")).items():
        assert torch.equal(value, stored.get(name, torch.ones_like(value))), name
    run_conversion("DENSE", "OUT", to="mqa", method="mean")
