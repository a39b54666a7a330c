"""Integers of 2, 3, 4 or 8 bits packed into words of 32 bits: GPTQ and AWQ.

Their libraries unpack them in kernels for GPUs only; the formulas are GPTQModel's and AutoAWQ's (GEMM):
``W[o, i] = scales[g, o] * (q[i, o] - zeros[g, o])`` where ``g`` is the group of input ``i``.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfold.convert.io.quantized.format import Format, Infos, Read, Shape

if TYPE_CHECKING:
    from torch import Tensor, dtype

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of 8 neighbors lies


def gptq_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Raises ValueError for settings that are not read here."""
    bits = _bits(settings, (2, 3, 4, 8))
    first = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # version 1 stores zeros less one
    return (_format("GPTQ", bits, (".g_idx",), partial(_gptq_shape, bits), partial(_dequantize_gptq, bits, first)),)


def awq_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Raises ValueError for settings that are not read here."""
    bits, version = _bits(settings, (4,)), str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"expected version gemm, found {version!r}")
    return (_format("AWQ", bits, (), _awq_shape, _dequantize_awq),)


def _format(name: str, bits: int, takes: tuple[str, ...], shape: Any, dequantize: Any) -> Format:
    return Format(
        label=f"{name}, {bits} bits",
        root=".qweight",
        dtypes=frozenset({"I32"}),
        needs=(".scales", ".qzeros"),
        takes=takes,
        drops=(),
        shape=shape,
        dequantize=dequantize,
        library=("torch", "torch"),
    )


def _bits(settings: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits not in known:
        raise ValueError(f"expected bits {' or '.join(map(str, known))}, found {bits!r}")
    return int(bits)


def _gptq_shape(bits: int, infos: Infos, read: Read) -> Shape:
    words, out = infos[".qweight"].shape
    return _checked(out, words * 32 // bits, bits, infos)


def _awq_shape(infos: Infos, read: Read) -> Shape:
    into, words = infos[".qweight"].shape
    return _checked(words * 8, into, 4, infos)


def _checked(out: int, into: int, bits: int, infos: Infos) -> Shape:
    scales, zeros = infos[".scales"].shape, infos[".qzeros"].shape
    groups = scales[0] if scales else 0
    if scales != (groups, out) or zeros != (groups, out * bits // 32) or not groups or into % groups:
        raise ValueError(
            f"expected scales [groups, {out}] and qzeros [groups, {out * bits // 32}] for {into} inputs, found "
            f"{list(scales)} and {list(zeros)}"
        )
    return out, into


def _dequantize_gptq(bits: int, first: int, parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype") -> "Tensor":
    import torch

    numbers = _unpacked(parts[".qweight"].T, bits).T  # [in, out]
    zeros = (_unpacked(parts[".qzeros"], bits) + first) & ((1 << bits) - 1)
    group = parts.get(".g_idx")
    if group is None:
        group = torch.arange(shape[1]) // (shape[1] // len(zeros))
    return _scaled(numbers, zeros, parts[".scales"], group.long(), dtype)


def _dequantize_awq(parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype") -> "Tensor":
    import torch

    numbers, zeros = (_ordered(_unpacked(parts[end], 4)) for end in (".qweight", ".qzeros"))
    group = torch.arange(shape[1]) // (shape[1] // len(zeros))
    return _scaled(numbers, zeros, parts[".scales"], group, dtype)


def _ordered(numbers: "Tensor") -> "Tensor":
    """Rows of 8 numbers from a word's order into that of the outputs."""
    return numbers.reshape(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].flatten(-2)


def _unpacked(words: "Tensor", bits: int) -> "Tensor":
    """``[n, w]`` words -> ``[n, w * 32 / bits]`` numbers from 0, the lowest bits of a word first.

    Numbers of 3 bits reach from one word into the next.
    """
    import torch

    if 32 % bits:
        places = torch.arange(8, dtype=torch.uint8)
        stream = (words.contiguous().view(torch.uint8).unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)
        weights = torch.tensor([1 << place for place in range(bits)], dtype=torch.uint8)
        return torch.unflatten(stream, 1, (-1, bits)).mul_(weights).sum(-1, dtype=torch.uint8)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _scaled(numbers: "Tensor", zeros: "Tensor", scales: "Tensor", group: "Tensor", dtype: "dtype") -> "Tensor":
    """``numbers [in, out]``, ``zeros`` and ``scales [groups, out]``, ``group [in]`` -> ``[out, in]``."""
    centered = numbers.float().sub_(zeros.float()[group])
    return centered.mul_(scales.float()[group]).T.to(dtype).contiguous()
