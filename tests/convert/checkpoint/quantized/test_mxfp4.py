"""MXFP4 experts of gpt-oss."""

import json
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import mxfp4
from safetensors.torch import save_file

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError

NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def source(tiny_family, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A gpt-oss whose first experts are MXFP4, and the weight that these stand for."""
    stored = tensors(tiny_family("gpt_oss"))
    experts, into, out = stored.pop(NAME).shape
    blocks, scales, meant = mxfp4(experts, out, into)
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    save_file(stored | {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, folder / "model.safetensors")
    config = json.loads((tiny_family("gpt_oss") / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder, meant


def test_experts_are_dequantized_by_their_name(source: tuple[Path, torch.Tensor]) -> None:
    folder, meant = source
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors[NAME].shape == tuple(meant.shape)
    assert torch.equal(checkpoint.read(NAME).float(), meant)
    assert not any(name.endswith(("_blocks", "_scales")) for name in checkpoint.tensors)
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.made_of == ("1 weights stored as MXFP4, dequantized to bfloat16",)


def test_blocks_without_scales(source: tuple[Path, torch.Tensor]) -> None:
    stored = tensors(source[0])
    del stored[f"{NAME}_scales"]
    save_file(stored, source[0] / "model.safetensors")
    with pytest.raises(InputError, match="expected _scales beside it, found none"):
        open_checkpoint(str(source[0]))
