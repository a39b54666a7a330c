"""Weights of compressed-tensors (llm-compressor): W8A8 in INT8 or FP8, packed INT4 or INT8, NVFP4."""

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.quantized.format import Format, Infos, Read, Shape

if TYPE_CHECKING:
    from torch import Tensor, dtype

_DROPS = tuple(
    f".{what}_{kind}" for what in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point", "global_scale")
)
_PLAIN = (".weight", frozenset({"I8", "F8_E4M3"}), (".weight_scale",), (".weight_zero_point",))
# root, its dtypes, and what must and may be beside it
_STORED = {
    "int-quantized": _PLAIN,
    "float-quantized": _PLAIN,
    "naive-quantized": _PLAIN,
    "pack-quantized": (
        ".weight_packed",
        frozenset({"I32"}),
        (".weight_scale",),
        (".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    ),
    "nvfp4-pack-quantized": (".weight_packed", frozenset({"U8"}), (".weight_scale", ".weight_global_scale"), ()),
}


def compressed_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """A format for each group of modules. Raises ValueError for one that is not read here."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("expected config_groups, found none")
    return tuple(_format(group, group.get("format") or settings.get("format")) for group in groups.values())


def _format(group: Mapping[str, Any], kind: Any) -> Format:
    if kind not in _STORED:
        raise ValueError(f"expected a format among {', '.join(_STORED)}, found {kind!r}")
    root, dtypes, needs, takes = _STORED[kind]
    weights = group["weights"]
    return Format(
        label=f"{weights['type'].upper()}{weights['num_bits']} by compressed-tensors ({kind})",
        root=root,
        dtypes=dtypes,
        needs=needs,
        takes=takes,
        drops=_DROPS,
        shape=partial(_shape, weights),
        dequantize=partial(_dequantize, kind, group),
        library=("compressed_tensors", "compressed-tensors"),
        modules=partial(_targeted, group.get("targets") or ["Linear"]),
    )


def _targeted(targets: list[str], module: str) -> bool:
    """Whether a group is about ``module``: by its name, an expression for it, or a class such as Linear."""
    return any(
        re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target in (module, "Linear")
        for target in targets
    )


def _shape(weights: Mapping[str, Any], infos: Infos, read: Read) -> Shape:
    """``[out, in]`` from the headers: of packed weights the row of scales or the packed row gives its length."""
    if ".weight_g_idx" in infos:
        raise ValueError("expected columns in groups of neighbors, found .weight_g_idx (actorder group)")
    if ".weight" in infos:
        return infos[".weight"].shape
    rows, packed = infos[".weight_packed"].shape
    if infos[".weight_packed"].dtype == "U8":
        return rows, 2 * packed
    if weights.get("strategy") == "group":
        return rows, infos[".weight_scale"].shape[-1] * int(weights["group_size"])
    return rows, packed * 32 // int(weights["num_bits"])


def _dequantize(
    kind: str, group: Mapping[str, Any], parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype"
) -> "Tensor":
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": group["weights"]})
    state = {end.removeprefix("."): part for end, part in parts.items()}
    if kind == "pack-quantized":
        state["weight_shape"] = torch.tensor(shape)
    if state["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        state["weight_scale"] = state["weight_scale"].float()  # the weight is computed in the dtype of its scales
    made: Tensor = BaseCompressor.get_value_from_registry(kind).decompress(state, scheme)["weight"]
    return made.to(dtype)
