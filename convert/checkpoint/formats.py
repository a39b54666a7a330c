"""Quantized weight formats: FP8, MXFP4 and compressed-tensors. Imports torch only when a weight is
dequantized.

A format names the stored tensors that make up one weight, the shape of the dense weight, and the
function that dequantizes it: if possible, one from the library that wrote the format.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import short

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Parts = Mapping[
    str, TensorInfo
]  # the stored tensors of a weight, by the ends of their names (".weight_scale")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """One way to store the weight ``NAME`` + ``dense``: a tensor ``NAME`` + ``root`` and others
    with the same ``NAME``.

    ``needs`` and ``takes`` are the name endings of tensors that must or may accompany the root;
    ``drops`` are those of activation and cache scales, which a dense model does not have. ``shape``
    raises ValueError if the stored shapes do not fit together. ``targets`` are modules: names,
    regular expressions ("re:..."), or "Linear" for all.
    """

    label: str
    root: str
    dtypes: frozenset[str]
    needs: tuple[str, ...]
    shape: Callable[[Parts], Shape]  # of the dense weight
    dequantize: "Callable[[Mapping[str, Tensor], Shape, torch.dtype], Tensor]"
    library: tuple[str, str]  # the module that dequantizes, and the requirement to install it
    takes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    dense: str = ".weight"
    targets: tuple[str, ...] = ("Linear",)
    keeps: Callable[[Parts], bool] = lambda parts: (
        False
    )  # stock classes load it as it is stored next to dense ones

    def is_root(self, info: TensorInfo) -> bool:
        if not info.name.endswith(self.root) or info.dtype not in self.dtypes:
            return False
        module = info.name.removesuffix(self.root)
        return any(
            (
                re.match(target.removeprefix("re:"), module)
                if target.startswith("re:")
                else target in (module, "Linear")
            )
            for target in self.targets
        )


@dataclass(frozen=True)
class StoredWeight:
    """A stored quantized weight: its format, its root tensor, and all its tensors by the endings of
    their names.
    """

    format: Format
    root: TensorInfo
    parts: dict[str, TensorInfo]


def stored_weights(
    formats: tuple[Format, ...], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, StoredWeight], list[str]]:
    """The quantized weights among ``tensors`` by dense name, each in the first complete format; and
    the problems.
    """
    weights: dict[str, StoredWeight] = {}
    problems = []
    for name, info in tensors.items():
        fitting = [each for each in formats if each.is_root(info)]
        for form in fitting:
            stem = name.removesuffix(form.root)
            if all(stem + end in tensors for end in form.needs):
                ends = [
                    end for end in (form.root, *form.needs, *form.takes) if stem + end in tensors
                ]
                weights[stem + form.dense] = StoredWeight(
                    form, info, {end: tensors[stem + end] for end in ends}
                )
                break
        else:
            if fitting:
                needed = " or ".join(dict.fromkeys(" and ".join(each.needs) for each in fitting))
                problems.append(
                    f"{info.file}: quantized tensor {name!r} lacks {needed}; download the file"
                    " again"
                )
    return weights, problems


# FP8 with a scale per block (DeepSeek-V3, Qwen3-FP8), per output channel or per tensor

_FP8_DROPS = (
    ".input_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".input_scale_ub",
)
_FP8_ELEMENTS = 1 << 22  # dequantized at a time: about 60 MB of temporary memory


def fp8_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats for ``quant_method`` fp8 and fbgemm_fp8. Raises ValueError if ``settings`` are
    not valid.
    """
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"weight_block_size {block!r} must be [rows, columns]")

    def shape(scale: str, parts: Parts) -> Shape:
        _block_size(parts[".weight"].shape, parts[scale].shape, block)
        return parts[".weight"].shape

    def keeps(parts: Parts) -> bool:
        # transformers 5.23 takes the size of a block from the number of scales, so that it misreads
        # a cut one
        weight = parts[".weight"]
        whole = block is not None and not any(
            size % side for size, side in zip(weight.shape, block, strict=True)
        )
        return whole and weight.dtype == "F8_E4M3" and ".weight_scale_inv" in parts

    return tuple(
        Format(
            label="FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}",
            root=".weight",
            dtypes=frozenset({"F8_E4M3", "F8_E5M2"}),
            needs=(scale,),
            drops=_FP8_DROPS,
            shape=partial(shape, scale),
            dequantize=partial(_dequantize_fp8, scale, block),
            library=("transformers.integrations.finegrained_fp8", "transformers>=5.23"),
            keeps=keeps,
        )
        for scale in (".weight_scale_inv", ".weight_scale")
    )


def _block_size(shape: Shape, scales: Shape, block: Sequence[int] | None) -> tuple[int, int]:
    """The rows and columns that share a scale (one scale in all: a row). ValueError if the scales
    do not fit.
    """
    if len(shape) != 2:
        raise ValueError(f"its shape {list(shape)} must have two dimensions")
    if prod(scales) == 1:
        return 1, shape[1]
    rows, columns = (1, shape[1]) if block is None else block
    grid = (-(-shape[0] // rows), -(-shape[1] // columns))
    if [size for size in scales if size != 1] != [size for size in grid if size != 1]:
        raise ValueError(
            f"shape {list(shape)} needs scales of shape {list(grid)}, not {list(scales)}"
        )
    return rows, columns


def _dequantize_fp8(
    scale: str,
    block: Sequence[int] | None,
    parts: "Mapping[str, Tensor]",
    shape: Shape,
    dtype: "torch.dtype",
) -> "Tensor":
    """Return the dense weight ``[out, in]`` in ``dtype``, computed in strips of whole blocks to
    limit memory use.
    """
    import torch
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = parts[".weight"]
    scales = parts[scale]
    rows, columns = _block_size(shape, tuple(scales.shape), block)
    grid = (-(-shape[0] // rows), -(-shape[1] // columns))
    scales = scales.reshape(1, 1).expand(grid) if scales.numel() == 1 else scales.reshape(grid)
    if scales.dtype != torch.uint8:  # uint8 holds exponents, which transformers decodes
        scales = scales.float()
    dense = torch.empty(shape, dtype=dtype)
    operation = Fp8Dequantize(None)
    strip = max(1, _FP8_ELEMENTS // (rows * shape[1]))  # rows of blocks
    for first in range(0, grid[0], strip):
        some = weight[first * rows : (first + strip) * rows]
        # transformers divides the shape by the number of scales, which is wrong where the last
        # block is cut: pad with zeros (byte 0 is 0.0) to whole blocks
        missing = (0, -shape[1] % columns, 0, -len(some) % rows)
        whole = pad(some.view(torch.uint8), missing).view(weight.dtype)
        made = operation.convert(
            {"weight": whole, "weight_scale_inv": scales[first : first + strip]}
        )["weight"]
        made = made[0] if isinstance(made, list) else made  # transformers 5.17 returns a list
        dense[first * rows : first * rows + len(some)] = made[: len(some), : shape[1]]
    return dense


# MXFP4 (the experts of gpt-oss): 4-bit floats in blocks of 32 that share an exponent


def mxfp4_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """The format whose ``NAME_blocks`` and ``NAME_scales`` store one dense tensor ``NAME``, all
    experts of a layer.
    """

    def dense_shape(parts: Parts) -> Shape:
        # blocks hold two numbers a byte; the dense tensor is [experts, in, out]
        blocks = parts["_blocks"].shape
        scales = parts["_scales"].shape
        if len(blocks) != 4 or scales != blocks[:-1]:
            shapes = f"_blocks {list(blocks)} and _scales {list(scales)}"
            raise ValueError(
                f"{shapes} must be [experts, out, groups, bytes] and [experts, out, groups]"
            )
        experts, out, groups, size = blocks
        return experts, 2 * groups * size, out

    def dequantize(parts: "Mapping[str, Tensor]", shape: Shape, dtype: "torch.dtype") -> "Tensor":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        made: Tensor = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=dtype)
        return made.reshape(shape)

    return (
        Format(
            label="MXFP4",
            root="_blocks",
            dtypes=frozenset({"U8"}),
            needs=("_scales",),
            shape=dense_shape,
            dequantize=dequantize,
            library=("transformers.integrations.mxfp4", "transformers>=5.23"),
            dense="",
            keeps=lambda parts: True,
        ),
    )


# compressed-tensors (llm-compressor): W8A8 in INT8 or FP8, packed INT4 or INT8, NVFP4

_COMPRESSED_DROPS = tuple(
    f".{what}_{kind}"
    for what in ("input", "output", "q", "k", "v")
    for kind in ("scale", "zero_point", "global_scale")
)
_ONE_BYTE = (".weight", frozenset({"I8", "F8_E4M3"}), (".weight_scale",), (".weight_zero_point",))
# root, its dtypes, needs and takes of each format of the library
_COMPRESSED = {
    "int-quantized": _ONE_BYTE,
    "float-quantized": _ONE_BYTE,
    "naive-quantized": _ONE_BYTE,
    "pack-quantized": (
        ".weight_packed",
        frozenset({"I32"}),
        (".weight_scale",),
        (".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    ),
    "nvfp4-pack-quantized": (
        ".weight_packed",
        frozenset({"U8"}),
        (".weight_scale", ".weight_global_scale"),
        (),
    ),
}


def compressed_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Return one format per group of modules in the config. Raises ValueError if a format is not
    supported.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("'config_groups' is missing or empty")
    formats = []
    for name, group in groups.items():
        if wrong := _group_problem(group):
            raise ValueError(f"config_groups {short(name)}: {wrong}")
        kind = group.get("format") or settings.get("format")
        weights = group["weights"]
        if not isinstance(kind, str) or kind not in _COMPRESSED:
            raise ValueError(f"format {kind!r} must be one of {', '.join(_COMPRESSED)}")
        root, dtypes, needs, takes = _COMPRESSED[kind]
        formats.append(
            Format(
                label=(
                    f"{weights['type'].upper()}{weights['num_bits']} by compressed-tensors ({kind})"
                ),
                root=root,
                dtypes=dtypes,
                needs=needs,
                shape=partial(_compressed_shape, weights),
                dequantize=partial(_dequantize_compressed, kind, group),
                library=("compressed_tensors", "compressed-tensors"),
                takes=takes,
                drops=_COMPRESSED_DROPS,
                targets=tuple(group.get("targets") or ["Linear"]),
            )
        )
    return tuple(formats)


def _group_problem(group: Any) -> str | None:
    """What is wrong with one of the ``config_groups``, or None."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return f"{short(group)} must be an object with 'weights', which say how a weight is stored"
    if weights.get("type") not in ("int", "float"):
        return f"type {short(weights.get('type'))} of its weights must be 'int' or 'float'"
    if weights.get("num_bits") not in (4, 8):
        return f"num_bits {short(weights.get('num_bits'))} of its weights must be 4 or 8"
    size = weights.get("group_size")
    if type(size) not in (int, type(None)) or (
        weights.get("strategy") == "group" and (size or 0) < 1
    ):
        return f"group_size {short(size)} of its weights must be a whole number above 0"
    targets = group.get("targets")
    if targets is not None and not (
        isinstance(targets, list) and all(isinstance(each, str) for each in targets)
    ):
        return f"targets {short(targets)} must be a list of module names"
    for target in targets or ():
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            return f"target {short(target)} is no regular expression: {error}"
    return None


def _compressed_shape(weights: Mapping[str, Any], parts: Parts) -> Shape:
    """The dense shape ``[out, in]``. For a packed weight, ``in`` follows from the length of a row
    or of its scales.
    """
    if ".weight_g_idx" in parts:
        # the library drops this order when it decompresses
        raise ValueError("a column order (.weight_g_idx, from actorder 'group') is not supported")
    if ".weight" in parts:
        shape = parts[".weight"].shape
        scales = parts[".weight_scale"].shape if ".weight_scale" in parts else ()
        # A scale for all, or for each row, or for each of equally long pieces of a row.
        if len(scales) > len(shape) or any(
            size % max(1, each) for size, each in zip(shape, scales, strict=False)
        ):
            raise ValueError(
                f"scales of shape {list(scales)} do not divide a weight of shape {list(shape)}"
            )
        return shape
    rows, packed = parts[".weight_packed"].shape
    if parts[".weight_packed"].dtype == "U8":
        return rows, 2 * packed
    if weights.get("strategy") == "group":
        return rows, parts[".weight_scale"].shape[-1] * int(weights["group_size"])
    return rows, packed * 32 // int(weights["num_bits"])


def _dequantize_compressed(
    kind: str,
    group: Mapping[str, Any],
    parts: "Mapping[str, Tensor]",
    shape: Shape,
    dtype: "torch.dtype",
) -> "Tensor":
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": group["weights"]})
    state = {end.removeprefix("."): part for end, part in parts.items()}
    if kind == "pack-quantized":
        state["weight_shape"] = torch.tensor(shape)
    if state["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        state["weight_scale"] = state[
            "weight_scale"
        ].float()  # the library computes in the dtype of the scales
    made: Tensor = BaseCompressor.get_value_from_registry(kind).decompress(state, scheme)["weight"]
    return made.to(dtype)


# The formats that config.json's settings describe, by ``quant_method``
FORMATS: dict[str, Callable[[Mapping[str, Any]], tuple[Format, ...]]] = {
    "fp8": fp8_formats,
    "fbgemm_fp8": fp8_formats,
    "compressed-tensors": compressed_formats,
    "mxfp4": mxfp4_formats,
}
