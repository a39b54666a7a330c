"""The device and the dtype that a checkpoint is computed in."""

from collections import Counter

import torch

from kvfold.convert.errors import InputError
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.tensors import torch_dtype

_COMPUTED = ("F32", "BF16", "F16")


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU where there is one. Raises InputError for ``cuda`` without one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device on this machine; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def compute_dtype(checkpoint: Checkpoint, device: torch.device, name: str = "auto") -> torch.dtype:
    """The dtype of that name; ``auto`` is float32 on a CPU, and on CUDA the dtype of most of the checkpoint's bytes."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _COMPUTED:
            stored[info.dtype] += info.nbytes
    return torch_dtype(max(stored, key=lambda kind: stored[kind])) if stored else torch.float32
