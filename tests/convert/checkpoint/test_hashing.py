"""Hashes of shards that are made while these are written."""

import hashlib
import threading
from pathlib import Path

import pytest
import torch

from kvfold.convert.checkpoint.hashing import hashing
from kvfold.convert.checkpoint.shards import OutputTensor, assign_shards
from kvfold.convert.checkpoint.writer import ShardWriter


@pytest.mark.parametrize("order", ["abcd", "dcba"])
def test_the_hashes_are_those_of_the_files(tmp_path: Path, order: str) -> None:
    tensors = {name: torch.randn(300, 400) for name in "abcd"}
    shards = assign_shards([OutputTensor(name, "F32", (300, 400), None) for name in "abcd"], 1_000_000)
    writer = ShardWriter(tmp_path, shards)
    with hashing(tmp_path, shards, writer.written) as hashes:
        for name in order:
            writer.write_own({name: tensors[name]})
        writer.finish()
        found = hashes()
    assert found == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert len(found) == 2


def test_a_failure_ends_the_thread(tmp_path: Path) -> None:
    shards = assign_shards([OutputTensor("a", "F32", (3,), None)], 10**9)
    writer = ShardWriter(tmp_path, shards)
    with pytest.raises(KeyboardInterrupt), hashing(tmp_path, shards, writer.written):
        raise KeyboardInterrupt
    assert not any(thread.name.startswith("kvfold-hash") for thread in threading.enumerate())
