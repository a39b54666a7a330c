"""Weights packed as integers (GPTQ, AWQ), and those of compressed-tensors and bitsandbytes, read as dense ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.io.checkpoint import Checkpoint, Reading, open_checkpoint, open_headers

OUT, IN, GROUP = 32, 64, 32


def make(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, Reading(dtype="F32"))


def words(numbers: Tensor, bits: int) -> Tensor:
    """``[n, m]`` numbers -> ``[n, m * bits / 32]`` words, by Python's integers."""
    streams = [sum(value << (bits * place) for place, value in enumerate(row)) for row in numbers.tolist()]
    count = numbers.shape[1] * bits // 32
    rows = [[stream >> (32 * word) & 0xFFFFFFFF for word in range(count)] for stream in streams]
    return torch.tensor(
        [[value - (1 << 32) if value >= 1 << 31 else value for value in row] for row in rows], dtype=torch.int32
    )


def numbers(bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random weights ``[in, out]``, zeros and scales ``[groups, out]``."""
    torch.manual_seed(bits)
    high = 1 << bits
    scales = (torch.rand(IN // GROUP, OUT) + 0.5).half()
    return torch.randint(high, (IN, OUT)), torch.randint(high, (IN // GROUP, OUT)), scales


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, version: str) -> None:
    weight, zeros, scales = numbers(bits)
    group = torch.randperm(IN) // GROUP  # in the order of activations
    stored_zeros = zeros if version == "gptq_v2" else (zeros - 1) % (1 << bits)
    stored = {
        "l.qweight": words(weight.T, bits).T,
        "l.qzeros": words(stored_zeros, bits),
        "l.scales": scales,
        "l.g_idx": group.int(),
        "l.bias": torch.ones(OUT).half(),
        "n.weight": torch.rand(IN).half(),
    }
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": True,
        "checkpoint_format": version,
    }
    checkpoint = opened(make(tmp_path / "m", stored, settings))
    expected = torch.empty(OUT, IN)
    for out in range(OUT):
        for into in range(IN):
            scale, zero = scales[group[into], out].float(), zeros[group[into], out]
            expected[out, into] = scale * (weight[into, out] - zero)
    assert {*checkpoint.tensors} == {"l.weight", "l.bias", "n.weight"}
    assert torch.equal(checkpoint.read("l.weight"), expected)
    assert torch.equal(checkpoint.read("n.weight"), stored["n.weight"].float())
    assert checkpoint.info("n.weight").made == "cast"
    assert checkpoint.made_of == (f"1 weights stored as GPTQ, {bits} bits, dequantized to float32",)


def awq(tmp_path: Path) -> tuple[Path, dict[str, Tensor], Tensor]:
    weight, zeros, scales = numbers(4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word

    def packed(values: Tensor) -> Tensor:
        return words(values.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    stored = {"l.qweight": packed(weight), "l.qzeros": packed(zeros), "l.scales": scales}
    expected = (weight - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return make(tmp_path / "m", stored, settings), stored, expected.T


def test_awq(tmp_path: Path) -> None:
    folder, _, expected = awq(tmp_path)
    assert torch.equal(opened(folder).read("l.weight"), expected)


def test_awq_as_compressed_tensors_reads_it(tmp_path: Path) -> None:
    """AutoAWQ's packing by another reader than ours."""
    pytest.importorskip("compressed_tensors", minversion="0.20")
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    _, stored, expected = awq(tmp_path)
    converter = AutoAWQConverter(group_size=GROUP)
    weight, scale, zero = converter._convert_gemm_module(stored["l.qweight"], stored["l.scales"], stored["l.qzeros"])
    each = [tensor.float().repeat_interleave(GROUP, 1) for tensor in (zero, scale)]
    assert torch.equal((weight.float() - each[0]) * each[1], expected)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "gptq", "bits": 5}, "expected bits 2 or 3 or 4 or 8, found 5"),
        ({"quant_method": "awq", "version": "gemv"}, "expected version gemm, found 'gemv'"),
        ({"quant_method": "compressed-tensors"}, "expected config_groups, found none"),
    ],
)
def test_settings_that_are_not_read(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    folder = make(tmp_path / "m", {"l.weight": torch.zeros(2, 2)}, settings)
    with pytest.raises(InputError) as caught:
        open_headers(folder)
    assert f"(quantization_config, method {settings['quant_method']!r}): {problem}; convert" in caught.value.message


def test_scales_of_another_weight(tmp_path: Path) -> None:
    stored = {
        "l.qweight": torch.zeros(8, OUT, dtype=torch.int32),
        "l.qzeros": torch.zeros(2, OUT // 8, dtype=torch.int32),
        "l.scales": torch.ones(2, OUT + 8).half(),
    }
    folder = make(tmp_path / "m", stored, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        InputError, match=r"'l.qweight' is quantized: expected scales \[groups, 32\] .* found \[2, 40\]"
    ):
        open_headers(folder)


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


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    data, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    expected = functional.dequantize_4bit(data, state)
    stored = {f"l.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    checkpoint = opened(make(tmp_path / "m", {"l.weight": data, **stored}, {"quant_method": "bitsandbytes"}))
    assert {*checkpoint.tensors} == {"l.weight"}
    assert checkpoint.info("l.weight").shape == (OUT, IN)
    torch.testing.assert_close(checkpoint.read("l.weight"), expected, atol=1e-6, rtol=1e-5)
    assert (expected - weight).abs().mean() < 0.2


def test_bitsandbytes_8_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    weight, scale = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), torch.rand(OUT)
    stored = {"l.weight": weight, "l.SCB": scale, "l.weight_format": torch.tensor(0, dtype=torch.uint8)}
    checkpoint = opened(make(tmp_path / "m", stored, {"quant_method": "bitsandbytes", "load_in_8bit": True}))
    assert {*checkpoint.tensors} == {"l.weight"}
    torch.testing.assert_close(checkpoint.read("l.weight"), weight.float() * scale[:, None] / 127)


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.io.quantized.dense.find_spec", lambda module: None)
    stored = {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.SCB": torch.ones(4)}
    folder = make(tmp_path / "m", stored, {"quant_method": "bitsandbytes"})
    with pytest.raises(InputError, match=r"expected bitsandbytes to dequantize them, .*pip install 'bitsandbytes'"):
        open_checkpoint(folder)
