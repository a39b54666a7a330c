"""Weights of compressed-tensors are read as dense ones; other quantizations are refused with the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvfold.convert.checkpoint.folder import DEQUANTIZE
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint, open_headers
from kvfold.convert.errors import InputError

OUT, IN, GROUP = 32, 64, 32
NOT_READ = "; expected plain weights, or one of fp8, fbgemm_fp8, compressed-tensors, mxfp4"


def make(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, "F32")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "compressed-tensors"}, ": expected config_groups, found none"),
        (
            {"quant_method": "gptq", "bits": 4},
            NOT_READ,
        ),
        (
            {"quant_method": "bitsandbytes"},
            NOT_READ,
        ),
    ],
)
def test_settings_that_are_not_read(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    folder = make(tmp_path / "m", {"l.weight": torch.zeros(2, 2)}, settings)
    with pytest.raises(InputError) as caught:
        open_headers(folder)
    assert f"(quantization_config, method {settings['quant_method']!r}){problem}; {DEQUANTIZE}" in caught.value.message


SCHEMES = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "naive-quantized": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 24]},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
    "pack-quantized, 8 bits": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}


def compressed(kind: str, weights: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as the library stores it, and as the library reads it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.manual_seed(0)
    weight = torch.randn(OUT, IN + (0 if "block" not in weights["strategy"] else 8))
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    args = scheme.weights
    blocks = {"group": (1, GROUP), "tensor_group": (1, 16), "channel": (1, weight.shape[1]), "tensor": weight.shape}
    rows, columns = blocks.get(weights["strategy"], (8, 24))
    parts = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2).flatten(2)
    state: dict[str, Any] = {"weight": weight}
    if kind.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale.reshape(()) if scale.numel() == 1 else scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    stored = BaseCompressor.get_value_from_registry(kind).compress(dict(state), scheme)
    meant = fake_quantize(weight, state["weight_scale"], zero, args, global_scale=state.get("weight_global_scale"))
    return stored, meant


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.20")
    kind, weights = name.partition(",")[0], SCHEMES[name]
    stored, expected = compressed(kind, weights)
    group = {"targets": ["Linear"], "weights": weights}
    settings = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    tensors = {f"l.{end}": tensor for end, tensor in stored.items()} | {"l.input_global_scale": torch.ones(1)}
    checkpoint = opened(make(tmp_path / "m", tensors, settings))
    assert {*checkpoint.tensors} == {"l.weight"}
    assert checkpoint.info("l.weight").shape == expected.shape
    atol = 0.05 if kind.startswith("nvfp4") else 1e-5  # the library makes NVFP4 in bfloat16
    torch.testing.assert_close(checkpoint.read("l.weight"), expected.float(), atol=atol, rtol=0)


def test_groups_of_compressed_tensors_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    """The same dtype in two formats: INT8 per row, and without a group."""
    groups = {
        "a": {"targets": ["re:.*mlp.*"], "weights": SCHEMES["int-quantized"], "format": "int-quantized"},
        "b": {"targets": ["re:.*attn.*"], "weights": SCHEMES["pack-quantized"], "format": "pack-quantized"},
    }
    stored = {
        "mlp.l.weight": torch.ones(4, 4, dtype=torch.int8),
        "mlp.l.weight_scale": torch.ones(4, 1),
        "attn.l.weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32),
        "attn.l.weight_scale": torch.ones(OUT, IN // GROUP),
        "attn.l.k_scale": torch.ones(1),
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    tensors = open_headers(make(tmp_path / "m", stored, settings)).tensors
    assert {name: info.shape for name, info in tensors.items()} == {"mlp.l.weight": (4, 4), "attn.l.weight": (OUT, IN)}


def test_columns_in_the_order_of_activations_are_refused(tmp_path: Path) -> None:
    """The library drops their order when it decompresses them."""
    group = {"targets": ["Linear"], "weights": SCHEMES["pack-quantized"]}
    stored = {
        "l.weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32),
        "l.weight_scale": torch.ones(OUT, IN // GROUP),
        "l.weight_g_idx": torch.arange(IN, dtype=torch.int32) % 2,
    }
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    with pytest.raises(InputError, match=r"expected columns in groups of neighbors, found .weight_g_idx \(actorder"):
        open_headers(make(tmp_path / "m", stored, settings))


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.dequantized.find_spec", lambda module: None)
    group = {"targets": ["Linear"], "weights": SCHEMES["int-quantized"]}
    stored = {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.weight_scale": torch.ones(4, 1)}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    folder = make(tmp_path / "m", stored, settings)
    with pytest.raises(InputError, match=r"expected compressed_tensors to .*pip install 'compressed-tensors'"):
        open_checkpoint(folder)
