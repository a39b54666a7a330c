"""The device and the dtype for computing with a checkpoint."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.errors import opt, option_error
from kvfold.convert.host import host_memory

_COMPUTED = ("F32", "BF16", "F16")


def choose_device(name: str) -> torch.device:
    """The device ``name``; ``auto`` is a GPU if torch finds one. Raises InputError for ``cuda`` without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise option_error(
            "device", "cuda", f": torch finds no CUDA device on this machine; use {opt('device', 'cpu')} or auto"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def compute_dtype(checkpoint: Checkpoint, device: torch.device, name: str = "auto") -> torch.dtype:
    """The dtype called ``name``; ``auto`` is float32 on a CPU, and the dtype of most checkpoint bytes on CUDA."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    # 16-bit arithmetic is slow and coarse on most CPUs; a GPU will also serve the checkpoint in 16 bits.
    if device.type == "cpu":
        return torch.float32
    return stored_dtype(checkpoint)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most of the checkpoint's bytes; float32 if none of them is F32, BF16 or F16."""
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _COMPUTED:
            stored[info.dtype] += info.nbytes
    return torch_dtype(max(stored, key=lambda kind: stored[kind])) if stored else torch.float32


def training_autocast(checkpoint: Checkpoint, device: torch.device) -> torch.dtype | None:
    """The ``torch.autocast`` dtype for training: bfloat16, or None to train in float32 without autocast."""
    stored = stored_dtype(checkpoint)
    # A CPU without bfloat16 units is slower in bfloat16 than in float32.
    if device.type == "cpu":
        return torch.bfloat16 if stored == torch.bfloat16 and has_bfloat16_units() else None
    return torch.bfloat16 if stored != torch.float32 and torch.cuda.is_bf16_supported() else None


def bfloat16_pays(device: torch.device, stored: Iterable[torch.dtype]) -> bool:
    """True if a training step on weights of the ``stored`` dtypes should use bfloat16 autocast."""
    # Weights stored in bfloat16 lose no precision; activations and gradients are rounded to 8 bits, while the
    # residual stream, its norms and the master weights stay float32. Held-out sequences are evaluated in float32.
    return device.type == "cpu" and has_bfloat16_units() and set(stored) == {torch.bfloat16}


@cache
def has_bfloat16_units() -> bool:
    """True if the CPU has units for bfloat16 matrix products (AMX)."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def free_memory(device: torch.device) -> int | None:
    """Free memory on ``device`` in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory()
