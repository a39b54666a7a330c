"""A quantized source gives what its dense twin gives, to the last bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import fp8_blocks, fp8_settings, quantized_copy

from kvfold.convert.conversion.run import convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.request import ConvertRequest

BLOCK = (24, 40)
MLA: dict[str, Any] = {"to": "mla", "kv_rank": 24, "rope_dim": 4, "samples": 2, "seq_len": 8, "quiet": True}


def check_equal(found: Path, expected: Path) -> None:
    """Equal tensors and configs; their order in the file is the source's."""
    ours, others = tensors(found), tensors(expected)
    assert {*ours} == {*others}
    for name, tensor in others.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert json.loads((found / "config.json").read_text()) == json.loads((expected / "config.json").read_text())


def convert(source: Path, out: Path, **options: Any) -> Path:
    convert_checkpoint(ConvertRequest(str(source), str(out), **options))
    return out


@pytest.mark.parametrize("options", [MLA, {"to": "gqa", "kv_heads": 2, "method": "mean"}], ids=["mla", "gqa"])
def test_fp8_gives_what_its_twin_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    twin = quantized_copy(demo_folder(), tmp_path / "fp8", fp8_settings(BLOCK), fp8_blocks(BLOCK))
    ours = convert(tmp_path / "fp8", tmp_path / "ours", **options)
    expected = convert(twin, tmp_path / "expected", **options)
    check_equal(ours, expected)
    record, card = json.loads((ours / "kvfold.json").read_text()), (ours / "README.md").read_text()
    line = "28 weights stored as FP8 in blocks of 24 x 40, dequantized to bfloat16"
    assert record["source"]["made_of"] == [line]
    assert record["tensors"]["model.layers.0.mlp.up_proj.weight"]["origin"] == "dequantized"
    assert record["tensors"]["model.norm.weight"]["origin"] == "copied"
    assert f"The source: {line}." in card
    assert "Everything else is the source's, stored as bfloat16." in card
    assert "made_of" not in json.loads((expected / "kvfold.json").read_text())["source"]


_PEAK = (
    "import resource, sys; from kvfold.convert.cli import kvfold\n"
    "kvfold(sys.argv[1:], standalone_mode=False); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


@pytest.mark.slow
def test_fp8_copy_of_the_reference_model(reference: Path, tmp_path: Path) -> None:
    """Equal to its twin in every weight, at about its memory: 30 MB more for what is dequantized at a time."""
    twin = quantized_copy(reference / "llama-mha", tmp_path / "fp8", fp8_settings((128, 128)), fp8_blocks((128, 128)))
    peaks = []
    for source in (tmp_path / "fp8", twin):
        out = tmp_path / f"{source.name}-out"
        command = ["convert", str(source), str(out), "--to", "gqa", "--kv-heads", "4", "--method", "mean", "--quiet"]
        ran = subprocess.run([sys.executable, "-c", _PEAK, *command], check=True, capture_output=True, text=True)
        peaks.append(int(ran.stdout.split()[-1]))  # KiB
    check_equal(tmp_path / "fp8-out", tmp_path / "fp8-twin-out")
    assert peaks[0] < peaks[1] + 30_000, peaks
