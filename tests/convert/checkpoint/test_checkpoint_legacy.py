"""Legacy pytorch_model*.bin: values, shared storage, nothing executed, clear refusals."""

import json
import os
import pickle
import zipfile

import pytest
import torch

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.tensors import view_as_bytes
from kvfold.convert.errors import InputError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("zipped", [True, False])
def test_values_shared_storage_and_views(folder, monkeypatch, zipped):
    monkeypatch.setattr("kvfold.convert.checkpoint.opening.STEP", 16)
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    state = {
        "embed": base,
        "head": base,  # tied
        "part": base[1:3],
        "turned": base.T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(7),
    }
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == list(state)
    for name, expected in state.items():
        found = checkpoint.read_tensor(name)
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert not found.requires_grad
        assert checkpoint.tensors[name].nbytes == found.nbytes
        steps = checkpoint.read_bytes_as(name, checkpoint.tensors[name].dtype)
        assert b"".join(steps) == bytes(view_as_bytes(found))
        found.zero_()
    assert torch.equal(checkpoint.read_tensor("part"), base[1:3])


def test_sharded(folder):
    weight_map = {}
    for name in "ab":
        weight_map[name] = f"pytorch_model-{name}.bin"
        torch.save({name: torch.full((2,), ord(name))}, folder / weight_map[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(folder)
    assert [checkpoint.read_tensor(name)[0] for name in "bab"] == [98, 97, 98]
    checkpoint.close()
    assert checkpoint.read_tensor("a")[0] == 97


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_executed_and_no_part_is_read(folder, monkeypatch, refused, zipped):
    monkeypatch.chdir(folder)
    path = folder / "pytorch_model.bin"
    state = {"a": torch.ones(1000), "b": Payload()}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with refused():
        open_checkpoint(folder)
    path.write_bytes(pickle.dumps(Payload()))
    with refused():
        open_checkpoint(folder)
    assert not (folder / "executed").exists()
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=zipped)
    os.truncate(path, path.stat().st_size - 1000)
    with refused():
        open_checkpoint(folder)


def test_an_archive_that_unpacks_to_far_more(folder):
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    with pytest.raises(InputError, match="unpack to 50000000"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "state",
    [
        [torch.ones(1)],
        {"model": {"a": torch.ones(1)}},
        {3: torch.ones(1)},
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
        {"a": torch.ones(1).as_strided([2**20, 2**20], [0, 0])},
        {"\ud800": torch.ones(1)},
    ],
    ids=["list", "nested", "number", "sparse", "ragged", "repeated", "surrogate"],
)
def test_what_is_no_state_dict(folder, refused, state):
    torch.save(state, folder / "pytorch_model.bin")
    with refused():
        open_checkpoint(folder)
