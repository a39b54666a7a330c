"""The three matrix products of a block, in the form that is fast on a CPU.

Shapes: ``n`` pairs of sequence and key head, ``r`` rows (queries), ``w`` keys, ``d`` dims of a head. Two weaknesses of
torch on CPUs are worked around; float32, float64 and GPUs are not affected:

* float16 matrices are multiplied ten times slower than float32 ones: they are widened;
* for bfloat16, oneDNN compiles a program for every new shape, a millisecond and a megabyte each, and every decoding
  step has a new number of keys. So a multiple of ``shape_step`` keys is multiplied in bfloat16, the remainder in
  float32.
"""

import torch
from torch import Tensor

_FEWEST = 64


def shape_step(tensor: Tensor, keys: int) -> int:
    """Granularity of the number of ``keys`` that are multiplied in the dtype of ``tensor``.

    One where a new shape costs nothing, else a power of two.
    """
    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return 1
    # at most 32 shapes for a context of any length
    return max(_FEWEST, 1 << max(0, (keys // 16).bit_length() - 1))


def is_slow(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def fast(tensor: Tensor) -> Tensor:
    """``tensor`` in a dtype whose matrix products are fast."""
    return tensor.float() if is_slow(tensor) else tensor


def row_products(rows: Tensor, keys: Tensor, scale: float, out: Tensor, add: bool = False) -> None:
    """``out = scale * rows keys^T``, or with ``add`` ``out += ...``.

    ``rows [n, r, d]``, ``keys [n, w, d]``, ``out [n, r, w]``.
    """
    width, beta = keys.shape[1], int(add)
    even = width - width % shape_step(keys, width)
    if even == width:
        torch.baddbmm(out, rows, keys.mT, beta=beta, alpha=scale, out=out)
        return
    if even:
        out[..., :even] = torch.baddbmm(out[..., :even], rows, keys[:, :even].mT, beta=beta, alpha=scale)
    # the remainder has a new shape at every step: float32 products need no compilation
    rest = torch.bmm(rows.float(), keys[:, even:].float().mT).mul_(scale)
    out[..., even:] = rest.add_(out[..., even:]) if add else rest


def mix(weights: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * weights values``: ``[n, r, w]``, ``[n, w, d]`` -> ``[n, r, d]``, ``values``' dtype or wider."""
    width = values.shape[1]
    even = width - width % shape_step(values, width)
    if even == width:
        return torch.bmm(weights, values) if scale == 1 else torch.bmm(weights, values).mul_(scale)
    rest = torch.bmm(weights[..., even:].float(), values[:, even:].float())
    # the larger part last: it is rounded to bfloat16 once
    if even:
        rest.add_(torch.bmm(weights[..., :even].contiguous(), values[:, :even]))
    return rest.mul_(scale)


def add_spread(total: Tensor, weights: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """``total += scale * weights^T rows``: ``[n, w, d]``, ``[n, r, w]``, ``[n, r, d]``."""
    width = weights.shape[-1]
    even = width - width % shape_step(rows, width)
    if even:
        total[:, :even].add_(torch.bmm(weights[..., :even].mT, rows), alpha=scale)
    if even < width:
        total[:, even:].add_(torch.bmm(weights[..., even:].float().mT, rows.float()), alpha=scale)
