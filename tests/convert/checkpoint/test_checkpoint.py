"""Opening local checkpoints: what is read, what is refused and in which words."""

import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvfold.convert.checkpoint.digests import stamps
from kvfold.convert.checkpoint.members import extra_names
from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
from kvfold.convert.checkpoint.tensors import count_non_finite
from kvfold.convert.errors import InputError


def entry(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> Any:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model"


@pytest.fixture
def sharded(folder: Path) -> Path:
    first = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    save_file(first, folder / FIRST)
    save_file({"c": torch.zeros(2, dtype=torch.int64)}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def problems_of(model: Path | str) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_headers(model)
    problems = [caught.value.message, *caught.value.details]
    assert all("\n" not in line and len(line) < 2000 for line in problems)
    return problems


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "bool", "complex64"])
def test_reads_what_safetensors_reads_whole_and_in_chunks(folder: Path, dtype: str) -> None:
    torch.manual_seed(1)
    made = (torch.randn(7, 5) * 9).to(getattr(torch, dtype))
    tensors = {"w": made, "scalar": made[0, 0].clone(), "none": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        found.zero_()  # owns its memory: writing to it must not fail, nor change the file
    chunks = list(checkpoint.read_chunks("w", 8))
    assert [len(chunk) for chunk in chunks] == [8, 8, 8, 8, 3]
    assert torch.equal(torch.cat(chunks).reshape(7, 5), made)
    assert torch.cat(list(checkpoint.read_chunks("none", 8))).numel() == 0


def test_tensor_positions_are_those_of_the_file(sharded: Path) -> None:
    info = open_headers(sharded).tensors["a"]
    assert (info.dtype, info.shape, info.nbytes) == ("F32", (2, 3), 24)
    raw = (sharded / info.file).read_bytes()[info.start : info.end]
    assert np.frombuffer(raw, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_model_digest_is_of_config_and_tensors_however_they_are_sharded(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    found = {checkpoint.model_digest()}
    assert checkpoint.digests["b"] == hashlib.sha256(np.ones(4, "<f4").tobytes()).hexdigest()
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    save_file(tensors, sharded / "model.safetensors")
    read = open_checkpoint(sharded)
    for name in tensors:
        list(read.read_chunks(name, 1))
    assert read.model_digest() in found
    for file in sharded.glob("*.safetensors*"):
        file.unlink()
    torch.save(tensors, sharded / "pytorch_model.bin")
    assert open_checkpoint(sharded).model_digest() in found
    for changed in (
        {**tensors, "b": torch.tensor([1.0, 1, 1, 2])},
        {**tensors, "b": tensors["b"].reshape(2, 2)},
        {**tensors, "b": tensors["b"].view(torch.int32)},
        {"x" if name == "b" else name: tensor for name, tensor in tensors.items()},
    ):
        save_file(changed, sharded / "model.safetensors")
        found.add(open_checkpoint(sharded).model_digest())
    (sharded / "config.json").write_text('{"model_type": "llama", "x": 1}')
    found.add(open_checkpoint(sharded).model_digest())
    assert len(found) == 6


def test_extra_files(sharded: Path) -> None:
    passed_on = ["LICENSE", "chat_template.jinja", "tokenizer.json", "tokenizer.model"]
    for name in (*passed_on, "README.md", "pytorch_model.bin", "tokenizer.py", "notes.txt"):
        (sharded / name).write_text("x")
    assert extra_names(sharded) == passed_on


def test_a_single_file_goes_before_an_index_as_in_transformers(sharded: Path) -> None:
    save_file({"only": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded).tensors) == ["only"]


@pytest.mark.parametrize("name", ["x" * 300, "nul\0", "../..x/y", "config.json", "empty"])
def test_what_is_no_checkpoint_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Any, name: str
) -> None:
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    with refused():
        open_checkpoint(name)


@pytest.mark.parametrize("file", ["config.json", "consolidated.00.pth", "model.gguf"])
def test_folders_without_a_config_or_weights(folder: Path, refused: Any, file: str) -> None:
    (folder / file).open("a").close()
    with refused():
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with refused():
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "\udcff"),
        ("config.json", '{"a": "\\ud800"}'),
        ("model.safetensors.index.json", '{"weight_map": {"t": "\\ud800"}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("model.safetensors.index.json", '{"weight_map": {}}'),
    ],
    ids=lambda value: value[:40],
)
def test_invalid_json(folder: Path, file: str, text: str) -> None:
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert file in problems_of(folder)[0]


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"t": entry(0, 8, "F31")}, 8),
        ({"t": entry(0, 8, shape=[3])}, 8),
        ({"t": entry(0, 4, shape=[True])}, 4),
        ({"t": entry(8, 0, shape=[2])}, 8),
        ({"t": {"dtype": "F32", "shape": [2]}}, 8),
        ({"t": entry(0, 8), "u": entry(12, 20)}, 20),
        ({"t": entry(0, 8), "u": entry(4, 12)}, 12),
        ({"t": entry(0, 8)}, 7),
        ({"t": entry(0, 8)}, 9),
        ({"t": entry(0, 0, shape=[2**63])}, 0),
        ({"t": entry(0, 0, shape=[2**32, 2**32])}, 0),
        ({"t": entry(0, 0, shape=[0, 2**63])}, 0),
        ({"t": entry(0, 0, shape=[int("9" * 4000)] * 500)}, 0),
        ({"t": entry(0, 0, shape=[1] * 100_000)}, 0),
        (b"{nope}", 0),
        (b"", -1),
        (b"12345", -1),
        (struct.pack("<Q", 500) + b"{", -1),
        (b"version https://git-lfs.github.com/spec/v1\n", -1),
        (b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', 0),
    ],
    ids=range(20),
)
def test_faulty_headers(folder: Path, header: Any, size: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = b"" if size < 0 else struct.pack("<Q", len(text)) + text + bytes(size)
    (folder / "model.safetensors").write_bytes(data or text)
    began = time.process_time()
    assert problems_of(folder)[0].startswith("model.safetensors: ")
    assert time.process_time() - began < 2  # also where numbers are huge, or names many


def test_index_and_shards_that_disagree_are_reported_at_once(sharded: Path) -> None:
    save_file({"b": torch.ones(1), "c": torch.ones(1), "extra": torch.ones(1)}, sharded / SECOND)
    write_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, "gone": SECOND})
    told = " ".join(problems_of(sharded))
    assert all(name in told for name in ("'gone'", "'b'", "'extra'"))
    assert "'c'" not in told
    write_index(sharded, {"a": "model-7.safetensors", "b": "model-8.safetensors", "c": SECOND})
    missing, other = problems_of(sharded)
    assert "model-7" in missing
    assert "model-8" in other


def test_integer_buffers_are_not_quantized_weights(folder: Path) -> None:
    buffers = {"attn.bias": torch.zeros(2, 2, dtype=torch.uint8), "position_ids": torch.arange(3)}
    save_file(buffers, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == set(buffers)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    save_file({"t": torch.ones(1000)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 500)
    with pytest.raises(
        InputError, match=r"model.safetensors ends before byte 4\d+: it changed while"
    ):
        checkpoint.read("t")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    values = torch.full((10,), torch.finfo(dtype).max, dtype=dtype)
    for count, (position, value) in enumerate([(0, "nan"), (4, "inf"), (9, "-inf")]):
        assert count_non_finite(values.reshape(5, 2).T) == count
        values[position] = float(value)
    assert count_non_finite(values) == 3
    assert [count_non_finite(torch.zeros(size, dtype=torch.int64)) for size in (0, 3)] == [0, 0]


def test_small_files_count_as_changed_by_their_content_and_large_ones_by_their_time(
    folder: Path, monkeypatch
) -> None:
    config = folder / "config.json"
    before = stamps([config, folder / "missing"])
    os.utime(config, (1, 1))
    assert stamps([config]) == before
    config.write_text(config.read_text().replace("llama", "LLAMA"))
    assert stamps([config]) != before
    monkeypatch.setattr("kvfold.convert.checkpoint.digests._HASHED", 4)
    before = stamps([config])
    os.utime(config, (2, 2))
    assert stamps([config]) != before
