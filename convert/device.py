"""Where a checkpoint is computed, and in what precision."""

from collections import Counter

import torch

from kvfold.convert.errors import InputError
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.tensors import torch_dtype

_COMPUTED = ("F32", "BF16", "F16")


def choose_device(asked: str) -> torch.device:
    """``auto`` is the GPU where there is one. Raises InputError when CUDA is asked for and absent."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device on this machine; use --device cpu or auto")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)


def compute_dtype(checkpoint: Checkpoint, device: torch.device, asked: str = "auto") -> torch.dtype:
    """What is asked for; ``auto`` is float32 on a CPU, and on CUDA what most of the checkpoint is stored in."""
    if asked != "auto":
        named: torch.dtype = getattr(torch, asked)
        return named
    if device.type == "cpu":
        return torch.float32
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _COMPUTED:
            stored[info.dtype] += info.nbytes
    return torch_dtype(max(stored, key=lambda name: stored[name])) if stored else torch.float32
