"""The device and the dtype that a checkpoint is computed in."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.errors import InputError, opt
from kvfold.convert.host import host_memory

_COMPUTED = ("F32", "BF16", "F16")


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU where there is one. Raises InputError for ``cuda`` without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{opt('device', 'cuda')}: torch finds no CUDA device on this machine; use {opt('device', 'cpu')} or auto"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def compute_dtype(checkpoint: Checkpoint, device: torch.device, name: str = "auto") -> torch.dtype:
    """The dtype of that name; ``auto`` is float32 on a CPU, and on CUDA the dtype of most of the checkpoint's bytes."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    # 16-bit arithmetic is slow and coarse on most CPUs; on a GPU it is what the checkpoint will be served in.
    if device.type == "cpu":
        return torch.float32
    return stored_dtype(checkpoint)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most of the checkpoint's bytes, float32 when it holds no numbers."""
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _COMPUTED:
            stored[info.dtype] += info.nbytes
    return torch_dtype(max(stored, key=lambda kind: stored[kind])) if stored else torch.float32


def training_autocast(checkpoint: Checkpoint, device: torch.device) -> torch.dtype | None:
    """bfloat16 for the matrix products of training under ``torch.autocast``, or None for float32 everywhere."""
    stored = stored_dtype(checkpoint)
    # A CPU without units for bfloat16 is slower in it than in float32.
    if device.type == "cpu":
        return torch.bfloat16 if stored == torch.bfloat16 and has_bfloat16_units() else None
    return torch.bfloat16 if stored != torch.float32 and torch.cuda.is_bf16_supported() else None


def bfloat16_pays(device: torch.device, stored: Iterable[torch.dtype]) -> bool:
    """True if a training step with weights of the dtypes ``stored`` is to run in bfloat16 under ``torch.autocast``."""
    # Weights that are stored in bfloat16 lose nothing by it; activations and gradients are rounded to 8 bits, while the
    # residual stream, its norms and the masters stay float32. Held-out sequences are always judged in float32.
    return device.type == "cpu" and has_bfloat16_units() and set(stored) == {torch.bfloat16}


@cache
def has_bfloat16_units() -> bool:
    """True if the processor has units for matrix products in bfloat16 (AMX)."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def free_memory(device: torch.device) -> int | None:
    """Bytes of memory that a run may still take on ``device``, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory()
