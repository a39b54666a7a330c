"""recipes/keep_fp8.py: FP8 MLPs beside converted attention, in stock transformers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import fp8_blocks, fp8_settings, quantized_copy
from transformers import AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint

SCRIPT = Path(__file__).parents[2] / "recipes" / "keep_fp8.py"
BLOCK = (16, 16)
TARGETS = [{"to": "gqa", "kv_heads": 2, "method": "mean"}, {"to": "mla", "kv_rank": 32, "rope_dim": 8, "method": "svd"}]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("keep_fp8", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tiny_family, tmp_path: Path) -> Path:
    quantized_copy(tiny_family("llama", attention_bias=False, mlp_bias=False), tmp_path / "fp8", fp8_settings(BLOCK),
                   fp8_blocks(BLOCK))  # fmt: skip
    return tmp_path / "fp8"


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model(torch.arange(3, 27)[None]).logits


@pytest.mark.parametrize("options", TARGETS, ids=["gqa", "mla"])
def test_mlps_keep_the_bytes_of_the_source(script: Any, source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    convert_checkpoint(ConvertRequest(str(source), str(tmp_path / "out"), quiet=True, **options))
    assert script.write(source, tmp_path / "out", tmp_path / "kept") == 2 * 3
    stored, out, found = (tensors(folder) for folder in (source, tmp_path / "out", tmp_path / "kept"))
    mlp = {name for name in found if ".mlp." in name}
    assert all(torch.equal(found[name].view(torch.uint8), stored[name].view(torch.uint8)) for name in mlp)
    assert all(torch.equal(found[name], out[name]) for name in found.keys() - mlp)
    left = json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name for name in left if ".mlp." in name} == set()
    assert any("self_attn" in name for name in left)
    assert torch.equal(logits(tmp_path / "kept"), logits(tmp_path / "out"))


def test_parts_of_blocks_and_other_formats_stay_as_they_are(script: Any) -> None:
    weight = torch.ones(24, 16).to(torch.float8_e4m3fn)
    source = {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 1)}

    class Source:
        files = dict.fromkeys(source)
        __getitem__ = staticmethod(source.__getitem__)

    assert list(script.kept("a.weight", torch.ones(24, 16), Source(), (16, 16))) == ["a.weight"]
    assert len(script.kept("a.weight", torch.ones(24, 16), Source(), (8, 16))) == 2
    with pytest.raises(SystemExit, match="expected FP8 with weight_block_size, found quantization_config"):
        script.settings_of({"quantization_config": {"quant_method": "gptq"}})
