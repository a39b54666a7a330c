"""Weights of bitsandbytes: 4 bits (NF4, FP4) in blocks, whose scales may be quantized too, and 8 bits (LLM.int8)."""

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfold.convert.io.quantized.format import Format, Infos, Read, Shape

if TYPE_CHECKING:
    from torch import Tensor, dtype

_LIBRARY = ("bitsandbytes", "bitsandbytes")
_BLOCKS = (".weight.absmax", ".weight.quant_map")
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


def bitsandbytes_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats of 4 and of 8 bits: a weight's tensors tell which it is."""
    four = tuple(
        Format(
            label=f"{kind.upper()} by bitsandbytes",
            root=".weight",
            dtypes=frozenset({"U8"}),
            needs=(*_BLOCKS, state),
            takes=_NESTED,
            drops=(),
            shape=partial(_shape, state),
            dequantize=_dequantize_4bit,
            library=_LIBRARY,
        )
        for kind in ("nf4", "fp4")
        for state in [f".weight.quant_state.bitsandbytes__{kind}"]
    )
    eight = Format(
        label="INT8 by bitsandbytes",
        root=".weight",
        dtypes=frozenset({"I8"}),
        needs=(".SCB",),
        takes=(),
        drops=(".weight_format",),
        shape=lambda infos, read: infos[".weight"].shape,
        dequantize=_dequantize_8bit,
        library=_LIBRARY,
    )
    return (*four, eight)


def _shape(state: str, infos: Infos, read: Read) -> Shape:
    """The packed bytes have no shape of the weight: it is in a small tensor of JSON."""
    values = json.loads(bytes(read(infos[state]).tolist()))
    return tuple(int(size) for size in values["shape"])


def _dequantize_4bit(parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype") -> "Tensor":
    from bitsandbytes.functional import QuantState, dequantize_4bit

    values = {end.removeprefix(".weight."): part for end, part in parts.items() if end != ".weight"}
    state = QuantState.from_dict(values, "cpu")
    state.dtype = dtype
    made: Tensor = dequantize_4bit(parts[".weight"], state)
    return made.reshape(shape).to(dtype)


def _dequantize_8bit(parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype") -> "Tensor":
    from bitsandbytes.functional import int8_vectorwise_dequant

    made: Tensor = int8_vectorwise_dequant(parts[".weight"], parts[".SCB"].float())
    return made.to(dtype)
