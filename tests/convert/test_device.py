"""The dtype in which a checkpoint is computed, and what is known of the machine without torch."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvfold.convert import host
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.device import compute_dtype

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
    assert compute_dtype(MIXED, torch.device(device), name) == getattr(torch, expected)


def test_a_device_file_tells_of_a_gpu_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host, "_DEVICES", tmp_path)
    (tmp_path / "nvme0").touch()
    assert not host.may_have_gpu()
    (tmp_path / "nvidia0").touch()
    assert host.may_have_gpu()


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({"cpu.max": "max 100000"}, "0::/\n", 3),
        ({"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, "0::/a/b\n", 2),
    ],
)
def test_cores_count_once_and_within_quotas(tmp_path, monkeypatch, files, own, expected):
    """Processors 4 and 5 are two threads of one core; the quotas of the group and of those above it
    count.
    """
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {1, 2, 4, 5})
    monkeypatch.setattr(host, "_CORE", tmp_path / "cpus")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "_OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for cpu, siblings in {1: "1", 2: "2", 4: "4-5", 5: "4-5"}.items():
        (topology := tmp_path / "cpus" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    assert host.count_usable_cores() == expected


def test_threads_are_set_before_torch_unless_the_user_chose_them(monkeypatch):
    for name in (*host._THREADS, *host._WAITING):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    host.set_threads()  # torch is imported: too late
    assert dict(os.environ) == before
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(host, "count_usable_cores", lambda: 3)
    monkeypatch.setattr(host.os, "environ", {"GOMP_SPINCOUNT": "5"})
    host.set_threads()
    assert host.os.environ == {"GOMP_SPINCOUNT": "5", "OMP_NUM_THREADS": "3"}
