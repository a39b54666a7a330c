"""The dtype in which a checkpoint is computed."""

from types import SimpleNamespace

import pytest
import torch

from kvfold.convert import host
from kvfold.convert.device import compute_dtype

SIZES = {"a": ("F32", 5), "b": ("I64", 100), "c": ("BF16", 4), "d": ("BF16", 4)}
MIXED = SimpleNamespace(tensors={name: SimpleNamespace(dtype=dtype, nbytes=n) for name, (dtype, n) in SIZES.items()})


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "auto", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_precision(device, name, expected):
    assert compute_dtype(MIXED, torch.device(device), name) == expected


def test_whether_there_may_be_a_gpu_is_known_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host, "_DEVICES", tmp_path)
    (tmp_path / "nvme0").touch()
    assert not host.may_have_gpu()
    (tmp_path / "nvidia0").touch()
    assert host.may_have_gpu()
