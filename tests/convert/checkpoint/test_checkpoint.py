"""Opening local checkpoints: what is read, what is refused and in which words."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import run_python
from safetensors.torch import load_file, save_file

from kvfold.convert.checkpoint.folder import DEQUANTIZE
from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
from kvfold.convert.checkpoint.tensors import count_non_finite
from kvfold.convert.errors import InputError, KvfoldError


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    """A safetensors file of exactly this header (JSON value or bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model"


@pytest.fixture
def sharded(folder: Path) -> Path:
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)},
        "model-00002-of-00002.safetensors": {"c": torch.zeros(2, dtype=torch.int64)},
    }
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def problems_of(model: Path | str) -> list[str]:
    """All lines of the error; opening whole and opening headers must agree."""
    with pytest.raises(InputError) as whole:
        open_checkpoint(model)
    with pytest.raises(InputError) as headers:
        open_headers(model)
    found = [whole.value.message, *whole.value.details]
    assert found == [headers.value.message, *headers.value.details]
    assert all("\n" not in line for line in found)
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool", "complex64"])
def test_reads_what_safetensors_reads(folder: Path, dtype: str) -> None:
    torch.manual_seed(1)
    made = (torch.randn(3, 5) * 9).to(getattr(torch, dtype))
    tensors = {"w": made, "scalar": made[0, 0].clone(), "none": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        found.zero_()  # owns its memory: writing to it must not fail, nor change the file
    assert torch.equal(checkpoint.read("w"), load_file(folder / "model.safetensors")["w"])


def test_chunks_make_up_the_tensor(folder: Path) -> None:
    tensor = torch.randn(7, 5, dtype=torch.float64)
    save_file({"w": tensor, "none": torch.zeros(0)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    chunks = list(checkpoint.chunks("w", 8))
    assert [len(chunk) for chunk in chunks] == [8, 8, 8, 8, 3]
    assert torch.equal(torch.cat(chunks).reshape(7, 5), tensor)
    assert list(checkpoint.chunks("none", 8)) == []


def test_tensor_positions_are_those_of_the_file(sharded: Path) -> None:
    checkpoint = open_headers(sharded)
    assert list(checkpoint.tensors) == ["a", "b", "c"]
    info = checkpoint.tensors["a"]
    assert (info.dtype, info.shape, info.nbytes) == ("F32", (2, 3), 24)
    raw = (sharded / info.file).read_bytes()[info.start : info.end]
    assert np.frombuffer(raw, "<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert checkpoint.raw_path(info) == sharded / info.file
    assert checkpoint.origin == "model"


def test_a_tensor_that_is_not_there(sharded: Path) -> None:
    with pytest.raises(KvfoldError, match=r"model: expected a tensor 'nope', found none"):
        open_checkpoint(sharded).read("nope")


def test_source_hash_follows_config_and_headers(sharded: Path) -> None:
    first = open_headers(sharded).source_hash()
    assert len(first) == 64
    assert open_checkpoint(sharded).source_hash() == first
    (sharded / "config.json").write_text('{"model_type": "llama", "x": 1}')
    second = open_headers(sharded).source_hash()
    save_file({"c": torch.zeros(3, dtype=torch.int64)}, sharded / "model-00002-of-00002.safetensors")
    assert len({first, second, open_headers(sharded).source_hash()}) == 3


def test_extra_files(sharded: Path) -> None:
    tokenizers = "sentencepiece.bpe.model special_tokens_map.json tokenizer.json tokenizer.model tokenizer_config.json"
    others = "LICENSE LICENSE.txt NOTICE.md added_tokens.json chat_template.jinja generation_config.json merges.txt"
    passed_on = [*others.split(), "preprocessor_config.json", *tokenizers.split(), "vocab.json"]
    left = "README.md pytorch_model.bin tokenizer.py modeling_x.py tf_model.h5 notes.txt"
    for name in [*passed_on, *left.split()]:
        (sharded / name).write_text("x")
    checkpoint = open_checkpoint(sharded)
    assert [path.name for path in checkpoint.extra_files()] == passed_on
    assert [path.name for path in checkpoint.python_files()] == ["modeling_x.py", "tokenizer.py"]


def test_a_single_file_goes_before_an_index_as_in_transformers(sharded: Path) -> None:
    save_file({"only": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded).tensors) == ["only"]


def test_missing_folder(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert problems_of(path) == [
        f"{path}: expected a checkpoint's folder or a hub id (owner/name), found no such folder"
    ]


@pytest.mark.parametrize("name", ["x" * 300, "nul\0character", "../..x/y", "owner/name/more", "owner/", "."])
def test_names_of_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    empty = folder / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    (problem,) = problems_of(name)
    assert "expected a checkpoint" in problem


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    path = folder / "config.json"
    assert problems_of(path) == [f"{path}: expected a checkpoint's folder, found a file; give the folder it lies in"]


def test_folder_without_config(tmp_path: Path) -> None:
    expected = "expected a checkpoint with a config.json, found no config.json; give the folder that holds it"
    assert problems_of(tmp_path) == [f"{tmp_path}: {expected}"]
    (tmp_path / "model.safetensors").touch()
    assert problems_of(tmp_path)[0].endswith(
        "put the model's config.json beside its weights, or save it with save_pretrained"
    )
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    (tmp_path / "snapshots" / "0123" / "config.json").touch()
    assert problems_of(tmp_path)[0].endswith(f"did you mean {tmp_path / 'snapshots' / '0123'}?")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSON, found what does not parse: Expecting property name"),
        ("[1]", "a JSON object, found list"),
        ("\udcff", "JSON, found what does not parse: 'utf-8' codec can't decode"),
        ("[" * 100_000, "JSON, found what does not parse: "),
    ],
)
def test_invalid_config(folder: Path, text: str, found: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{folder / 'config.json'}: expected {found}")


def test_folder_without_weights(folder: Path) -> None:
    wanted = "expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    advice = "save the model with save_pretrained"
    assert problems_of(folder) == [f"{folder}: {wanted}, found no weights; {advice}"]
    (folder / "consolidated.00.pth").touch()
    assert problems_of(folder) == [f"{folder}: {wanted}, found consolidated.00.pth; {advice}"]


@pytest.mark.parametrize(
    ("header", "size", "expected"),
    [
        ({"t": entry(0, 8, "F31")}, 8, ["tensor 't': unknown dtype 'F31'; expected one of BOOL"]),
        (
            {"t": entry(0, 8, shape=[3])},
            8,
            ["tensor 't': dtype F32 and shape [3] need 12 bytes, its data_offsets span 8"],
        ),
        ({"t": entry(0, 8, shape=[-2])}, 8, ["tensor 't': expected a shape of whole numbers, found [-2]"]),
        ({"t": entry(0, 4, shape=[True])}, 4, ["tensor 't': expected a shape of whole numbers"]),
        ({"t": entry(8, 0, shape=[2])}, 8, ["tensor 't': expected data_offsets [begin, end] with begin <= end, found"]),
        ({"t": {"dtype": "F32", "shape": [2]}}, 8, ["tensor 't': expected exactly dtype, shape and data_offsets"]),
        ({"t": entry(0, 8), "u": entry(12, 20)}, 20, ["tensor 'u' leaves a gap before it: expected to start at byte"]),
        ({"t": entry(0, 8), "u": entry(4, 12)}, 12, ["tensor 'u' overlaps the tensor before it: expected to start at"]),
        ({"t": entry(0, 8)}, 7, ["truncated: expected 77 bytes, found 76; fetch it again"]),
        ({"t": entry(0, 8)}, 9, ["expected 77 bytes, found 78: 1 belong to no tensor"]),
        (
            {"t": entry(0, 8, "F31"), "u": entry(8, 16, shape=[1]), "v": entry(16, 24)},
            24,
            ["tensor 't': unknown dtype 'F31'", "tensor 'u': dtype F32 and shape [1] need 4 bytes"],
        ),
        (b"[1]", 0, ["expected the header to be a JSON object; fetch it again"]),
        (b"{nope}", 0, ["expected a JSON header, found Expecting property name"]),
        (b'{"t":1,"t":1}', 8, ["expected a JSON header, found the name 't' twice; fetch it again"]),
    ],
)
def test_faulty_headers(folder: Path, header: Any, size: int, expected: list[str]) -> None:
    raw_file(folder / "model.safetensors", header, bytes(size))
    for problem, start in zip(problems_of(folder), expected, strict=True):
        assert problem.startswith(f"model.safetensors: {start}"), problem


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "truncated: expected at least 8 bytes, found 0; fetch it again"),
        (b"12345", "truncated: expected at least 8 bytes, found 5; fetch it again"),
        (struct.pack("<Q", 500) + b"{", "truncated inside its header: expected 508 bytes or more, found 9; fetch it"),
        (b"version https://git-lfs.github.com/spec/v1\n", "expected a safetensors header of at most 100000000 bytes"),
    ],
)
def test_files_without_a_header(folder: Path, content: bytes, expected: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    (problem,) = problems_of(folder)
    assert problem.startswith(f"model.safetensors: {expected}")


def test_header_without_metadata_and_with_padding(folder: Path) -> None:
    raw_file(folder / "model.safetensors", b'{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     ', bytes(8))
    assert open_checkpoint(folder).read("t").tolist() == [0, 0]


def test_index_and_shards_that_disagree_are_reported_at_once(sharded: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"b": torch.ones(1), "c": torch.ones(1), "extra": torch.ones(1)}, sharded / second)
    (sharded / "model-00003-of-00009.safetensors").touch()
    write_index(sharded, {"a": first, "b": first, "c": second, "gone": second, "d": "model-7.safetensors"})
    index = "model.safetensors.index.json"
    assert sorted(problems_of(sharded)) == sorted(
        [
            f"model-00003-of-00009.safetensors: a shard that {index} does not name; remove it, or fix the index",
            f"{sharded}: expected the file model-7.safetensors, found none; fetch it again",
            f"{index}: tensor 'gone' expected in {second}, found no such tensor there",
            f"{second}: tensor 'extra' is not named by {index}",
            f"tensor 'b' is stored more than once: in {first} and {second}",
        ]
    )


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
def test_index_without_a_weight_map(sharded: Path, text: str) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(text)
    expected = f"{path}: expected a weight_map from tensor names to file names, found none; fetch it again"
    assert problems_of(sharded) == [expected]


def test_quantized_by_config(sharded: Path) -> None:
    (sharded / "config.json").write_text('{"quantization_config": {"quant_method": "aqlm"}}')
    expected = "quantized checkpoint (quantization_config, method 'aqlm'); expected plain weights, or one of fp8, "
    (problem,) = problems_of(sharded)
    assert problem.startswith(f"{sharded}: {expected}")
    assert problem.endswith(DEQUANTIZE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("l.weight", "float8_e4m3fn"), ("x", "float8_e5m2"), ("l.weight", "int8"), ("l.qweight", "int32")],
)
def test_quantized_by_dtype(folder: Path, name: str, dtype: str) -> None:
    tensors = {name: torch.zeros(4).to(getattr(torch, dtype)), "l.bias": torch.zeros(4)}
    save_file(tensors, folder / "model.safetensors")
    (problem,) = problems_of(folder)
    assert problem.startswith(f"model.safetensors: tensor {name!r} is quantized: expected F16, BF16, F32 or F64, found")


def test_integer_buffers_are_not_quantized_weights(folder: Path) -> None:
    buffers = {"attn.bias": torch.zeros(2, 2, dtype=torch.uint8), "position_ids": torch.arange(3)}
    save_file(buffers, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == set(buffers)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    save_file({"t": torch.ones(1000)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 500)
    with pytest.raises(InputError, match=r"model.safetensors: expected 4\d+ bytes, found the end of the file"):
        checkpoint.read("t")


def test_headers_of_140_gb_in_a_fresh_process_without_torch(folder: Path) -> None:
    """80 layers of 70B shapes in 30 sparse files: only the headers exist."""
    shapes = {"q": [8192, 8192], "k": [1024, 8192], "v": [1024, 8192], "o": [8192, 8192]} | {
        name: [28672, 8192] for name in ("gate", "up", "down")
    }
    weight_map, total = {}, 0
    names = [(f"model.layers.{layer}.{name}.weight", shape) for layer in range(80) for name, shape in shapes.items()]
    for index in range(30):
        file, position, header = f"model-{index + 1:05}-of-00030.safetensors", 0, {}
        for name, shape in names[index::30]:
            size = 2 * shape[0] * shape[1]
            header[name] = entry(position, position + size, "BF16", shape)
            weight_map[name] = file
            position += size
        raw_file(folder / file, header)
        os.truncate(folder / file, (folder / file).stat().st_size + position)
        total += position
    assert total > 135e9
    write_index(folder, weight_map)
    script = (
        "import sys, time; start = time.process_time()\n"
        "from kvfold.convert.checkpoint.opening import open_headers\n"
        f"checkpoint = open_headers({str(folder)!r})\n"
        "print(time.process_time() - start, sum(tensor.nbytes for tensor in checkpoint.tensors.values()),\n"
        "      *{'torch', 'transformers', 'huggingface_hub', 'safetensors', 'numpy'} & set(sys.modules))"
    )
    seconds, size, *imported = run_python("-c", script).stdout.split()
    assert imported == []
    assert int(size) == total
    assert float(seconds) < 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_counted_anywhere(dtype: torch.dtype, value: float) -> None:
    for size in (1, 7, 64, 1001):
        tensor = torch.linspace(-3, 3, size).to(dtype)
        assert count_non_finite(tensor) == 0
        for position in {0, size // 3, size // 2, size - 1}:
            bad = tensor.clone()
            bad[position] = value
            assert count_non_finite(bad) == 1


def test_values_that_are_not_finite_are_counted() -> None:
    largest = torch.full((10,), torch.finfo(torch.float32).max)
    assert count_non_finite(largest) == 0
    largest[2:5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert count_non_finite(largest.reshape(5, 2).T) == 3
    for tensor in (torch.zeros(0), torch.arange(3), torch.ones(3, dtype=torch.bool)):
        assert count_non_finite(tensor) == 0
