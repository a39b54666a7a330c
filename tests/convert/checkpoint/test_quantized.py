"""Quantized weights are read as the dense ones that they stand for; other quantizations are
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import fp8_blocks, fp8_settings, mxfp4, quantized_copy
from safetensors.torch import save_file
from torch import Tensor

from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
from kvfold.convert.errors import InputError

BLOCK = (24, 40)  # neither divides the 64 rows and columns of the tiny model's matrices, nor its 48
OUT = 32
IN = 64
GROUP = 32
FP8 = torch.float8_e4m3fn


def make(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    return folder


def blocks_of(*sizes: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": sizes}


def compressed_model(folder: Path, stored: dict[str, Tensor], **groups: Any) -> Path:
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }
    return make(folder, stored, settings)


def group_of(name: str, target: str = "Linear") -> dict[str, Any]:
    return {"targets": [target], "weights": SCHEMES[name], "format": name.partition(",")[0]}


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_headers(folder)
    return [caught.value.message, *caught.value.details]


@pytest.fixture
def source(tiny_family, tmp_path) -> Path:
    quantized_copy(tiny_family("llama"), tmp_path / "fp8", fp8_settings(BLOCK), fp8_blocks(BLOCK))
    return tmp_path / "fp8"


def test_is_seen_as_its_dense_twin(source: Path) -> None:
    expected = tensors(source.with_name("fp8-twin"))
    checkpoint = open_checkpoint(source)
    assert {*checkpoint.tensors} == {*expected}
    for name, tensor in expected.items():
        info = checkpoint.info(name)
        found = checkpoint.read(name)
        assert (info.shape, info.dtype, info.nbytes) == (tensor.shape, "BF16", 2 * tensor.numel())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, tensor)
        assert torch.equal(torch.cat(list(checkpoint.chunks(name, 100))), tensor.flatten())
        assert (checkpoint.raw_path(info) is None) == (
            "_proj.weight" in name
        )  # no bytes of theirs to copy
        assert info.made == ("dequantized" if "_proj.weight" in name else "")
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.made_of == (
        "14 weights stored as FP8 in blocks of 24 x 40, dequantized to bfloat16",
    )


def test_float32_keeps_what_bfloat16_rounds(source: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint = open_checkpoint(source, "F32")
    found = checkpoint.read(name)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert torch.equal(found.bfloat16(), open_checkpoint(source).read(name))
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.read("model.norm.weight").dtype == torch.float32
    assert checkpoint.raw_path(checkpoint.info("model.norm.weight")) is None  # a cast is no copy


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_scales_per_tensor_and_per_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight = torch.randn(6, 5).to(FP8)
    scale = torch.rand(shape) + 0.5
    activations = {"l.input_scale": torch.ones(()), "l.k_scale": torch.ones(())}
    stored = {"l.weight": weight, "l.weight_scale": scale, "l.bias": torch.ones(6), **activations}
    checkpoint = open_checkpoint(make(tmp_path / "m", stored, {"quant_method": "fp8"}), "F32")
    assert [*checkpoint.tensors] == ["l.bias", "l.weight"]
    assert torch.equal(
        checkpoint.read("l.weight"),
        weight.float() * (scale if scale.ndim == 0 else scale.view(-1, 1)),
    )


@pytest.mark.parametrize("kind", ["exponents", "in parts"])
def test_scales_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Powers of two (E8M0) are only exponents; a large weight is dequantized in parts."""
    monkeypatch.setattr("kvfold.convert.checkpoint.formats._FP8_ELEMENTS", 100)
    parts, expected = fp8_blocks((4, 8))(torch.randn(30, 20))
    if kind == "exponents":
        weight = torch.randn(4, 16).to(FP8)
        scale = torch.tensor([[0.5, 4.0]])
        parts = {".weight": weight, ".weight_scale_inv": scale.to(torch.float8_e8m0fnu)}
        expected = weight.float() * scale.repeat_interleave(8, 1)
    stored = {"l" + end: part for end, part in parts.items()}
    checkpoint = open_checkpoint(make(tmp_path / "m", stored, blocks_of(4, 8)), "F32")
    assert torch.equal(checkpoint.read("l.weight"), expected)


WEIGHT = {"l.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        (WEIGHT, {"quant_method": "fp8"}),
        (WEIGHT, {"quant_method": "fp8", "weight_block_size": [128]}),
        (WEIGHT, {"quant_method": "compressed-tensors"}),
        (WEIGHT, {"quant_method": "gptq", "bits": 4}),
        (WEIGHT, {"quant_method": "bitsandbytes"}),
        (WEIGHT, "aqlm"),
        ({"l.weight": torch.zeros(4).to(FP8)}, {}),
        ({"x": torch.zeros(4).to(torch.float8_e5m2)}, {}),
        ({"l.weight": torch.zeros(4, dtype=torch.int8)}, {}),
        ({"l.qweight": torch.zeros(4, dtype=torch.int32)}, {}),
        ({"l.weight": torch.zeros(4, 4).to(FP8)}, blocks_of(2, 2)),
        (
            {"l.weight": torch.zeros(4, 4).to(FP8), "l.weight_scale_inv": torch.ones(3, 2)},
            blocks_of(2, 2),
        ),
        ({"l.weight": torch.zeros(4, 4, dtype=torch.int8)}, blocks_of(2, 2)),
    ],
    ids=range(13),
)
def test_weights_and_settings_that_are_not_read(
    tmp_path: Path, stored: Any, settings: Any, told: Any
) -> None:
    told(
        "\n".join(problems_of(make(tmp_path / "m", {**stored, "l.bias": torch.zeros(4)}, settings)))
    )


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def test_mxfp4_experts_of_gpt_oss(tiny_family, tmp_path: Path) -> None:
    stored = tensors(tiny_family("gpt_oss"))
    experts, into, out = stored.pop(EXPERTS).shape
    blocks, scales, meant = mxfp4(experts, out, into)
    stored |= {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = json.loads((tiny_family("gpt_oss") / "config.json").read_text())
    folder = make(tmp_path / "mxfp4", stored, settings, **config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors[EXPERTS].shape == tuple(meant.shape)
    assert torch.equal(checkpoint.read(EXPERTS).float(), meant)
    assert not any(name.endswith(("_blocks", "_scales")) for name in checkpoint.tensors)
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.made_of == ("1 weights stored as MXFP4, dequantized to bfloat16",)
    del stored[f"{EXPERTS}_scales"]
    save_file(stored, folder / "model.safetensors")
    assert "lacks _scales" in problems_of(folder)[0]


SCHEMES = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "naive-quantized": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [8, 24],
    },
    "pack-quantized": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": False,
    },
    "pack-quantized, 8 bits": {
        "num_bits": 8,
        "type": "int",
        "strategy": "channel",
        "symmetric": True,
    },
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
    blocks = {
        "group": (1, GROUP),
        "tensor_group": (1, 16),
        "channel": (1, weight.shape[1]),
        "tensor": weight.shape,
    }
    rows, columns = blocks.get(weights["strategy"], (8, 24))
    parts = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2).flatten(2)
    state: dict[str, Any] = {"weight": weight}
    if kind.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(
        parts.amin(-1), parts.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    state |= {"weight_scale": scale.reshape(()) if scale.numel() == 1 else scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    stored = BaseCompressor.get_value_from_registry(kind).compress(dict(state), scheme)
    meant = fake_quantize(
        weight, state["weight_scale"], zero, args, global_scale=state.get("weight_global_scale")
    )
    return stored, meant


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.20")
    kind = name.partition(",")[0]
    weights = SCHEMES[name]
    stored, expected = compressed(kind, weights)
    parts = {f"l.{end}": tensor for end, tensor in stored.items()} | {
        "l.input_global_scale": torch.ones(1)
    }
    checkpoint = open_checkpoint(
        compressed_model(tmp_path / "m", parts, group_0=group_of(name)), "F32"
    )
    assert {*checkpoint.tensors} == {"l.weight"}
    assert checkpoint.info("l.weight").shape == expected.shape
    atol = 0.05 if kind.startswith("nvfp4") else 1e-5  # the library makes NVFP4 in bfloat16
    torch.testing.assert_close(checkpoint.read("l.weight"), expected.float(), atol=atol, rtol=0)


def test_groups_of_compressed_tensors_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    """Two formats in one checkpoint: INT8 per row, and packed without its group's order."""
    groups = {
        "a": group_of("int-quantized", "re:.*mlp.*"),
        "b": group_of("pack-quantized", "re:.*attn.*"),
    }
    stored = {
        "mlp.l.weight": torch.ones(4, 4, dtype=torch.int8),
        "mlp.l.weight_scale": torch.ones(4, 1),
        "attn.l.weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32),
        "attn.l.weight_scale": torch.ones(OUT, IN // GROUP),
        "attn.l.k_scale": torch.ones(1),
    }
    tensors = open_headers(compressed_model(tmp_path / "m", stored, **groups)).tensors
    assert {name: info.shape for name, info in tensors.items()} == {
        "mlp.l.weight": (4, 4),
        "attn.l.weight": (OUT, IN),
    }
    stored["attn.l.weight_g_idx"] = (
        torch.arange(IN, dtype=torch.int32) % 2
    )  # the library drops this order
    (problem,) = problems_of(compressed_model(tmp_path / "ordered", stored, **groups))
    assert "a column order (.weight_g_idx, from actorder 'group') is not supported" in problem


def test_a_missing_library_says_what_to_install(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.dequantized.find_spec", lambda module: None)
    open_headers(source)  # headers need no library
    stored = {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.weight_scale": torch.ones(4, 1)}
    for model in (source, compressed_model(tmp_path / "m", stored, a=group_of("int-quantized"))):
        with refused():
            open_checkpoint(model)
