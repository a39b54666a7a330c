"""The three matrix products in a block of attention, in the form that is fastest on a CPU.

Shapes: ``n`` pairs of a sequence and a key head, ``r`` rows (queries), ``w`` keys, ``d`` head dims.
The functions work around two weaknesses of torch on CPUs; float32, float64 and GPUs are not
affected:

* float16 matrix products are ten times slower than float32 products, so the matrices are widened to
  float32;
* for bfloat16, oneDNN compiles a program for every new shape (a millisecond and a megabyte each),
  and the number of keys changes at every decoding step. So a multiple of ``shape_step`` keys is
  multiplied in bfloat16 and the remainder in float32.
"""

import torch
from torch import Tensor

# chosen, not measured: at most 63 keys are left to float32, and short contexts have few shapes
FEWEST_IN_STEP = 64


def shape_step(tensor: Tensor, keys: int) -> int:
    """Step for splitting ``keys`` keys: a multiple of it is multiplied in the dtype of ``tensor``,
    the rest in float32.

    The step is 1 where a new shape costs nothing, otherwise a power of two.
    """
    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return 1
    # at most 32 shapes for a context of any length
    return max(FEWEST_IN_STEP, 1 << max(0, (keys // 16).bit_length() - 1))


def is_slow(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def fast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 if products in its own dtype are slow, otherwise unchanged."""
    return tensor.float() if is_slow(tensor) else tensor


def row_products(rows: Tensor, keys: Tensor, scale: float, out: Tensor, add: bool = False) -> None:
    """Write ``scale * rows keys^T`` to ``out``, or add it to ``out`` if ``add`` is true.

    ``rows [n, r, d]``, ``keys [n, w, d]``, ``out [n, r, w]``.
    """
    width = keys.shape[1]
    beta = int(add)
    even = width - width % shape_step(keys, width)
    if even == width:
        torch.baddbmm(out, rows, keys.mT, beta=beta, alpha=scale, out=out)
        return
    if even:
        out[..., :even] = torch.baddbmm(
            out[..., :even], rows, keys[:, :even].mT, beta=beta, alpha=scale
        )
    # the remainder has a new shape at every step: float32 products need no compilation
    rest = torch.bmm(rows.float(), keys[:, even:].float().mT).mul_(scale)
    out[..., even:] = rest.add_(out[..., even:]) if add else rest


def mix(weights: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * weights values``: ``[n, r, w]``, ``[n, w, d]`` -> ``[n, r, d]``, in the ``values``
    dtype or wider.
    """
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
    """Add ``scale * weights^T rows`` to ``total [n, w, d]``; ``weights [n, r, w]``, ``rows [n, r,
    d]``.
    """
    width = weights.shape[-1]
    even = width - width % shape_step(rows, width)
    if even:
        total[:, :even].add_(torch.bmm(weights[..., :even].mT, rows), alpha=scale)
    if even < width:
        total[:, even:].add_(torch.bmm(weights[..., even:].float().mT, rows.float()), alpha=scale)
