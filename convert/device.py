"""The device and the dtype for computing with a checkpoint."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from time import process_time

import torch

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.tensors import TORCH_DTYPES
from kvfold.convert.errors import option_error

# A training step casts its activations too: below this ratio the products' gain is about lost. A
# choice, not tuned; measured ratios are around 1, or 2 and more.
BFLOAT16_PAYS = 1.5
# Fits stay on a GPU from this ratio on: data center cards have a half or more, consumer cards 1/32
# or 1/64, which a CPU of a few cores exceeds. Chosen.
FLOAT64_PAYS = 1 / 8
# Rows of a timed product, and the most of its other two dims, by device. Chosen: enough for
# products to be limited by arithmetic, and few enough where a CPU emulates bfloat16, at 1 GFLOP/s.
# And the number of timings.
_TIMED_SHAPE = {"cpu": (128, 1024), "cuda": (1024, 4096)}
_TIMED = 3
# Outputs and inputs of the timed product for fits: the widths of 7B and 8B.
_TIMED_FITS = (4096, 4096)


def choose_device(name: str) -> torch.device:
    """The torch device called ``name``; ``auto`` is a GPU if there is one. Raises InputError for
    ``cuda`` without a GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise option_error(
            "device",
            name,
            ": torch finds no CUDA device on this machine; use --device cpu or auto",
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_compute_dtype(checkpoint: Checkpoint, device: torch.device, name: str) -> torch.dtype:
    """The torch dtype called ``name``; ``auto`` is float32 on a CPU, and on CUDA the dtype that
    most of the checkpoint is stored in.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    # 16-bit arithmetic is slow and coarse on most CPUs; a GPU will also serve the checkpoint in 16
    # bits.
    if device.type == "cpu":
        return torch.float32
    return find_stored_dtype(checkpoint)


def find_stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype in which most of the checkpoint's bytes are stored; float32 if none of them is F32,
    BF16 or F16.
    """
    sizes = checkpoint.count_float_bytes()
    del sizes["F64"]
    return TORCH_DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32


def choose_autocast_dtype(
    checkpoint: Checkpoint, device: torch.device, precision: str = "auto"
) -> torch.dtype | None:
    """The dtype for ``torch.autocast`` in training steps and calibration passes; None means float32
    without autocast.

    ``auto`` is bfloat16 if the checkpoint is stored in 16 bits and ``device`` multiplies its
    matrices faster in it.
    """
    if precision != "auto":
        return None if precision == "float32" else torch.bfloat16
    # Weights that are stored in bfloat16 lose nothing; activations and gradients are rounded to 8
    # bits, while the residual stream, its norms and the master weights stay float32.
    stored = find_stored_dtype(checkpoint)
    if stored != torch.bfloat16 and (stored != torch.float16 or device.type == "cpu"):
        return None
    bytes_by_shape: Counter[tuple[int, ...]] = Counter()
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 2:
            bytes_by_shape[tensor.shape] += tensor.nbytes
    outputs, inputs = bytes_by_shape.most_common(1)[0][0]
    speedup = measure_speedup(device, torch.bfloat16, outputs, inputs)
    return torch.bfloat16 if speedup >= BFLOAT16_PAYS else None


def choose_fit_device(device: torch.device) -> torch.device:
    """The device that decomposes a layer's statistics in float64 for passes on ``device``: the same
    one, or the CPU if ``device`` is a GPU that is slow in float64, as consumer cards are.
    """
    if device.type != "cuda":
        return device
    speed = measure_speedup(device, torch.float64, *_TIMED_FITS)
    return device if speed >= FLOAT64_PAYS else torch.device("cpu")


@cache
def measure_speedup(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> float:
    """How many times faster ``device`` multiplies matrices ``[n, inputs] [inputs, outputs]`` in
    ``dtype`` than in float32, measured.
    """
    from torch.utils.benchmark import Timer, timer

    # Measured, because no list of processors is complete: AMX, AVX512-BF16 and Arm's units have no
    # flag in common, and without any a product in bfloat16 takes many times as long.
    rows, most = _TIMED_SHAPE[device.type]
    inner = min(inputs, most)
    # Processor time on a CPU: beside other work the clock gave ratios from 1.4 to 22 for one of
    # 2.1.
    clock = process_time if device.type == "cpu" else timer
    seconds = []
    for timed in (torch.float32, dtype):
        left = torch.ones(rows, inner, dtype=timed, device=device)
        right = torch.ones(inner, min(outputs, most), dtype=timed, device=device)
        product = Timer(
            "left @ right",
            timer=clock,
            globals={"left": left, "right": right},
            num_threads=torch.get_num_threads(),
        )
        seconds.append(min(product.timeit(2).mean for _ in range(_TIMED)))
    return seconds[0] / seconds[1]


def measure_free_memory(device: torch.device) -> int | None:
    """The free memory of ``device`` in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = search_proc("meminfo", r"MemAvailable: *(\d+)")
    return None if available is None else int(available) * 1024


def search_proc(file: str, pattern: str) -> str | None:
    """The first group of ``pattern`` in the file ``/proc/FILE``; None where it is not there, as on
    systems other than Linux.
    """
    path = Path("/proc", file)
    match = re.search(pattern, path.read_text() if path.exists() else "")
    return None if match is None else match[1]
