"""FP8 weights are read as the dense ones that they stand for."""

import json
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import fp8_blocks, fp8_settings, quantized_copy
from safetensors.torch import save_file

from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
from kvfold.convert.errors import InputError

BLOCK = (24, 40)  # neither divides the 64 rows and columns of the tiny model's matrices, nor its 48


@pytest.fixture
def source(tiny_family, tmp_path) -> Path:
    quantized_copy(tiny_family("llama"), tmp_path / "fp8", fp8_settings(BLOCK), fp8_blocks(BLOCK))
    return tmp_path / "fp8"


def test_is_seen_as_its_dense_twin(source: Path) -> None:
    expected = tensors(source.with_name("fp8-twin"))
    checkpoint = open_checkpoint(source)
    assert {*checkpoint.tensors} == {*expected}
    for name, tensor in expected.items():
        info, found = checkpoint.info(name), checkpoint.read(name)
        assert (info.shape, info.dtype, info.nbytes) == (tensor.shape, "BF16", 2 * tensor.numel())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, tensor)
        assert torch.equal(torch.cat(list(checkpoint.chunks(name, 100))), tensor.flatten())
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.made_of == ("14 weights stored as FP8 in blocks of 24 x 40, dequantized to bfloat16",)


def test_bytes_of_quantized_weights_are_never_copied(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    for name, info in checkpoint.tensors.items():
        assert (checkpoint.raw_path(info) is None) == ("_proj.weight" in name)
        assert info.made == ("dequantized" if "_proj.weight" in name else "")


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


def make(folder: Path, stored: dict[str, torch.Tensor], **settings) -> Path:
    folder.mkdir()
    config = {"quantization_config": {"quant_method": "fp8", **settings}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_scales_per_tensor_and_per_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scale = torch.randn(6, 5).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    activations = {"l.input_scale": torch.ones(()), "l.k_scale": torch.ones(())}
    stored = {"l.weight": weight, "l.weight_scale": scale, "l.bias": torch.ones(6), **activations}
    checkpoint = open_checkpoint(make(tmp_path / "m", stored), "F32")
    assert [*checkpoint.tensors] == ["l.bias", "l.weight"]
    assert torch.equal(checkpoint.read("l.weight"), weight.float() * (scale if scale.ndim == 0 else scale.view(-1, 1)))


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """E8M0: only an exponent."""
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 4.0], [1.0, 0.125]])
    stored = {"l.weight": weight, "l.weight_scale_inv": scale.to(torch.float8_e8m0fnu)}
    checkpoint = open_checkpoint(make(tmp_path / "m", stored, weight_block_size=[2, 2]))
    expected = weight.float() * scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(checkpoint.read("l.weight"), expected.bfloat16())


def test_large_weights_are_dequantized_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.formats._FP8_ELEMENTS", 100)
    parts, expected = fp8_blocks((4, 8))(torch.randn(30, 20))
    stored = {"l" + end: part for end, part in parts.items()}
    checkpoint = open_checkpoint(make(tmp_path / "m", stored, weight_block_size=[4, 8]), "F32")
    assert torch.equal(checkpoint.read("l.weight"), expected)


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_headers(folder)
    return [caught.value.message, *caught.value.details]


def test_weights_without_scales_or_with_too_few(tmp_path: Path) -> None:
    stored = {
        "a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "b.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "b.weight_scale_inv": torch.ones(3, 2),
        "c.weight": torch.zeros(4, 4, dtype=torch.int8),
    }
    assert problems_of(make(tmp_path / "m", stored, weight_block_size=[2, 2])) == [
        "model.safetensors: tensor 'a.weight' is quantized: expected .weight_scale_inv or .weight_scale beside it, "
        "found none",
        "model.safetensors: tensor 'b.weight' is quantized: expected scales [2, 2] for a weight [4, 4], found [3, 2]",
        "model.safetensors: tensor 'c.weight' is quantized in another way than quantization_config says, found I8",
    ]


def test_plain_weights_that_config_calls_quantized(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", {"a.weight": torch.zeros(4, 4)})
    assert problems_of(folder) == [
        f"{folder}: quantization_config says that the weights are quantized, found none that is; remove that key"
    ]


def test_a_block_size_that_is_none(tmp_path: Path) -> None:
    (problem,) = problems_of(make(tmp_path / "m", {"a.weight": torch.zeros(4, 4)}, weight_block_size=[128]))
    assert "(quantization_config, method 'fp8'): expected weight_block_size [rows, columns], found [128]" in problem


def test_a_missing_library_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.dequantized.find_spec", lambda module: None)
    open_headers(source)  # headers need no library
    with pytest.raises(InputError, match=r"stored as FP8 .*: expected transformers to dequantize them, .*pip install"):
        open_checkpoint(source)
