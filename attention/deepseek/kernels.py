"""Kernels for CUDA. Triton is optional: without it, or for what a kernel does not take, torch computes the same."""

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)
_RANK, _ROPE = 512, 64


class LatentKernel(Protocol):
    """``kernels.latent_decode.decode_latent``."""

    def __call__(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        scale: float,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        splits: int | None = None,
    ) -> Tensor: ...


def triton_decode(query: Tensor, query_rope: Tensor, mask: Tensor | None) -> LatentKernel | None:
    """The Triton kernel when it takes this call: CUDA, half precision, one query, R <= 512, P <= 64, a boolean mask."""
    if query.device.type != "cuda" or not has_triton() or query.dtype not in _DTYPES or query.shape[2] != 1:
        return None
    if query.shape[-1] > _RANK or query_rope.shape[-1] > _ROPE:
        return None
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return None
    from kvfold.attention.deepseek.kernel import decode_latent

    return decode_latent


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
