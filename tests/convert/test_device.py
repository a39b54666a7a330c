"""The dtype in which a checkpoint is computed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.device import choose_compute_dtype

SIZES = {"a": ("F32", 5), "b": ("I64", 100), "c": ("BF16", 4), "d": ("BF16", 4)}
TENSORS = {
    name: SimpleNamespace(dtype=dtype, nbytes=count) for name, (dtype, count) in SIZES.items()
}
MIXED = Checkpoint(Path(), config={}, tensors=TENSORS, origin="mixed", config_hash="")


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cuda", "float32", "float32")],
)
def test_the_compute_dtype_follows_the_device_and_the_checkpoint(device, name, expected):
    assert choose_compute_dtype(MIXED, torch.device(device), name) == getattr(torch, expected)
