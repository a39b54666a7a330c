"""Checkpoints in quantized formats, made by hand from dense ones, and the dense twins that they
stand for.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.checkpoints import tensors

Stored = dict[str, Tensor]  # by the end of their names
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized_copy(
    source: Path,
    out: Path,
    settings: dict[str, Any],
    quantize: Callable[[Tensor], tuple[Stored, Tensor]],
) -> Path:
    """``source`` with the matrices of its layers as ``quantize(weight)`` stores them; its dense
    twin in ``out``-twin.

    ``quantize`` returns the stored tensors by the end of their names (``.weight_scale``), and the
    weight in float32 that they stand for. Everything that is not quantized, and the twin, is
    bfloat16.
    """
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors(source).items():
        if name.split(".")[-2] in MATRICES and name.endswith(".weight"):
            parts, meant = quantize(tensor.float())
            stored |= {
                name.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()
            }
            dense[name] = meant.bfloat16()
        else:
            stored[name] = dense[name] = tensor.bfloat16()
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    twin = out.with_name(out.name + "-twin")
    write(source, out, stored, config | {"quantization_config": settings})
    write(source, twin, dense, config)
    return twin


def write(source: Path, out: Path, values: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A checkpoint with the tokenizer of ``source``, in two files."""
    out.mkdir()
    for path in source.glob("*token*"):
        shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config))
    names = sorted(values)
    files = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for file, some in files.items():
        save_file({name: values[name] for name in some}, out / file, {"format": "pt"})
    weight_map = {name: file for file, some in files.items() for name in some}
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def fp8_blocks(block: tuple[int, int]) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """Quantizes to FP8 with a scale per block, the last blocks of rows and columns cut."""

    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
        scale = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                part = weight[
                    row * block[0] : (row + 1) * block[0],
                    column * block[1] : (column + 1) * block[1],
                ]
                scale[row, column] = part.abs().max() / 448
        each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
            : weight.shape[0], : weight.shape[1]
        ]
        stored = (weight / each).to(torch.float8_e4m3fn)
        return {".weight": stored, ".weight_scale_inv": scale}, stored.float() * each

    return quantize


def fp8_settings(block: tuple[int, int]) -> dict[str, Any]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }


MXFP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(experts: int, out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks, scales, and the weight ``[experts, into, out]`` that they stand for."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(
        16, (experts, out, into // 32, 32), generator=generator, dtype=torch.uint8
    )
    scales = torch.randint(
        120, 131, (experts, out, into // 32), generator=generator, dtype=torch.uint8
    )
    signed = torch.where(codes > 7, -1.0, 1.0) * MXFP4[codes.long() % 8]
    meant = (signed * torch.exp2(scales.float() - 127)[..., None]).reshape(experts, out, into).mT
    return (
        codes[..., ::2] | (codes[..., 1::2] << 4),
        scales,
        meant,
    )  # the first of two numbers in the low bits


def mxfp4_experts(source: Path, out: Path) -> None:
    """A gpt-oss whose experts are random MXFP4."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors(source).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, rows = tensor.shape
            stored[f"{name}_blocks"], stored[f"{name}_scales"], _ = mxfp4(experts, rows, into)
        else:
            stored[name] = tensor.bfloat16()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    write(source, out, stored, config | {"quantization_config": settings})
