"""Legacy pytorch_model*.bin: values, shared storage, nothing executed, clear refusals."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("zipped", [True, False])
def test_values_shared_storage_and_views(folder: Path, zipped: bool) -> None:
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    state = {
        "embed": base,
        "head": base,  # tied
        "part": base[1:3],
        "turned": base.T,
        "half": torch.randn(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(7),
    }
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == list(state)
    assert checkpoint.aliases == {"head": "embed"}
    for name, expected in state.items():
        found, info = checkpoint.read(name), checkpoint.tensors[name]
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert not found.requires_grad
        assert info.nbytes == found.numel() * found.element_size()
        assert torch.equal(
            torch.cat([*checkpoint.chunks(name, 5), torch.zeros(0, dtype=found.dtype)]), found.reshape(-1)
        )
        found.zero_()
    assert torch.equal(checkpoint.read("part"), base[1:3])
    assert all(checkpoint.raw_path(info) is None for info in checkpoint.tensors.values())


def sharded(folder: Path) -> dict[str, str]:
    files = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.ones(2)},
        "pytorch_model-00002-of-00002.bin": {"b": torch.ones(3)},
    }
    for file, state in files.items():
        torch.save(state, folder / file)
    return {name: file for file, state in files.items() for name in state}


def test_sharded(folder: Path) -> None:
    weight_map = sharded(folder)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(folder)
    assert [checkpoint.read(name).tolist() for name in ("b", "a", "b")] == [[1, 1, 1], [1, 1], [1, 1, 1]]
    checkpoint.close()
    assert checkpoint.read("a").tolist() == [1, 1]


def test_index_that_disagrees(folder: Path) -> None:
    second = "pytorch_model-00002-of-00002.bin"
    weight_map = {**sharded(folder), "c": second, "d": "pytorch_model-00003-of-00003.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).splitlines() == [
        f"{folder.resolve()}: expected the file pytorch_model-00003-of-00003.bin, found none; fetch it again",
        f"  pytorch_model.bin.index.json: tensor 'c' expected in {second}, found no such tensor there",
    ]


def test_source_hash(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    first = open_checkpoint(folder).source_hash()
    assert open_checkpoint(folder).source_hash() == first
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    assert open_checkpoint(folder).source_hash() != first


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_executed(folder: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(folder)
    torch.save({"a": torch.ones(1), "b": Payload()}, "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        InputError, match=r"^pytorch_model.bin: expected a whole file of plain tensors, found: Weights only"
    ):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(InputError, match=r"^pytorch_model.bin: expected a whole file of plain tensors, found: "):
        open_checkpoint(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated(folder: Path, zipped: bool) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=zipped)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert caught.value.message.startswith("pytorch_model.bin: expected a whole file of plain tensors, found: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ([torch.ones(1)], "expected a mapping of names to tensors, found list"),
        ({"model": {"a": torch.ones(1)}}, "'model': expected a tensor, found dict"),
        ({3: torch.ones(1)}, "expected names as keys, found 3"),
        ({"a": torch.eye(2).to_sparse()}, "tensor 'a': expected a dense tensor, found torch.sparse_coo"),
    ],
)
def test_what_is_no_state_dict(folder: Path, state: object, expected: str) -> None:
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    assert caught.value.message.startswith(f"pytorch_model.bin: {expected}")
