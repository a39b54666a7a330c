"""Opening local checkpoints: what is read, what is refused and in which words."""

import hashlib
import json
import os
import struct
import time

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import read_json
from safetensors.torch import save_file

from kvfold.convert.checkpoint.digests import fingerprint_files
from kvfold.convert.checkpoint.files import list_files_besides_weights
from kvfold.convert.checkpoint.opening import open_checkpoint, open_checkpoint_headers
from kvfold.convert.checkpoint.tensors import view_as_bytes
from kvfold.convert.errors import InputError

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
# numbers as large as any model has them
CONFIG = '{"model_type": "llama", "num_hidden_layers": 1024, "model_max_length": 1%s}' % ("0" * 30)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(CONFIG)
    return tmp_path / "model"


@pytest.fixture
def sharded(folder):
    first = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    save_file(first, folder / FIRST)
    save_file({"c": torch.zeros(2, dtype=torch.int64)}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


def write_index(folder, weight_map):
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def write_header(folder, header):
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text
    (folder / "model.safetensors").write_bytes(data)


def problems_of(model):
    with pytest.raises(InputError) as caught:
        open_checkpoint_headers(model)
    problems = [caught.value.message, *caught.value.details]
    assert all("\n" not in line and len(line) < 2000 for line in problems)
    return problems


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "bool", "complex64"])
def test_reads_what_safetensors_reads_whole_and_in_steps(folder, monkeypatch, dtype):
    monkeypatch.setattr("kvfold.convert.checkpoint.files.STEP", 16)
    torch.manual_seed(1)
    made = (torch.randn(7, 5) * 9).to(getattr(torch, dtype))
    tensors = {"w": made, "scalar": made[0, 0].clone(), "none": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name, expected in tensors.items():
        found = checkpoint.read_tensor(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        found.zero_()  # owns its memory: writing to it must not fail, nor change the file
    steps = [bytes(step) for step in checkpoint.read_bytes_as("w", checkpoint.tensors["w"].dtype)]
    assert {len(step) for step in steps[:-1]} == {16}
    assert b"".join(steps) == bytes(view_as_bytes(made))


def test_model_digest_is_of_config_and_tensors_however_they_are_sharded(sharded):
    checkpoint = open_checkpoint(sharded)
    found = {checkpoint.compute_model_digest()}
    assert checkpoint.digests["b"] == hashlib.sha256(b"\0\0\x80?" * 4).hexdigest()
    tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.tensors}
    save_file(tensors, sharded / "model.safetensors")
    read = open_checkpoint(sharded)
    for name in tensors:
        read.read_tensor(name)
    assert read.compute_model_digest() in found
    for file in sharded.glob("*.safetensors*"):
        file.unlink()
    torch.save(tensors, sharded / "pytorch_model.bin")
    assert open_checkpoint(sharded).compute_model_digest() in found
    for changed in (
        {**tensors, "b": torch.tensor([1.0, 1, 1, 2])},
        {**tensors, "b": tensors["b"].reshape(2, 2)},
        {**tensors, "b": tensors["b"].view(torch.int32)},
        {"x" if name == "b" else name: tensor for name, tensor in tensors.items()},
    ):
        save_file(changed, sharded / "model.safetensors")
        found.add(open_checkpoint(sharded).compute_model_digest())
    (sharded / "config.json").write_text('{"model_type": "llama", "x": 1}')
    found.add(open_checkpoint(sharded).compute_model_digest())
    assert len(found) == 6


def test_all_is_passed_on_but_weights_training_states_code_and_what_is_written_anew(
    sharded,
):
    passed_on = ["LICENSE", "chat_template.jinja", "notes.txt", "tekken.json", "tokenizer.model"]
    left = ["README.md", "pytorch_model.bin", "tokenizer.py", "optimizer.pt", "trainer_state.json"]
    left += ["params.json", "adapter_config.json", ".gitattributes", "training_args.bin"]
    for name in (*passed_on, *left):
        (sharded / name).write_text("x")
    for folder in ("additional_chat_templates", "checkpoint-7"):
        (sharded / folder).mkdir()
        (sharded / folder / "rag.jinja").write_text("x")
    assert list_files_besides_weights(sharded) == sorted(
        [*passed_on, "additional_chat_templates/rag.jinja"]
    )


@pytest.mark.parametrize(
    "part",
    [
        "_orig_mod.",
        "module.",
        "layers.0._fsdp_wrapped_module.",
        "layers.0._orig_module.",
        "q_proj.lora_A.",
    ],
)
def test_names_of_a_wrapper_for_training_are_refused_with_the_way_out(folder, refused, part):
    save_file({f"{part}weight": torch.ones(1)}, folder / "model.safetensors")
    with refused(part.split(".")[-2], "merge_and_unload"):
        open_checkpoint(folder)


def test_missing_shards_are_one_line_and_a_quantized_file_is_named(sharded, refused):
    index = read_json(sharded / "model.safetensors.index.json")
    stale = {f"w{number}": f"model-{number}-of-9.safetensors" for number in range(9)}
    changed = json.dumps(index | {"weight_map": index["weight_map"] | stale})
    (sharded / "model.safetensors.index.json").write_text(changed)
    with refused("and 6 more") as caught:
        open_checkpoint(sharded)
    assert not caught.value.details
    save_file({"w.qweight": torch.ones(1).int()}, sharded / "model.safetensors")
    with refused("model.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("evidence", "config", "dtype"),
    [
        ("w.weight", {}, torch.float8_e4m3fn),
        ("'bits': 4", {"quantization": {"bits": 4}}, torch.float32),
        ("torchao", {"quantization_config": {"quant_method": "torchao"}}, torch.float32),
    ],
)
def test_what_shows_that_weights_are_quantized(folder, refused, evidence, config, dtype):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"w.weight": torch.ones(1).to(dtype)}, folder / "model.safetensors")
    with refused(evidence, "from_pretrained and save_pretrained"):
        open_checkpoint(folder)


def test_settings_that_a_dequantized_model_keeps_are_named(folder, refused):
    """As merging a LoRA adapter of a quantized model leaves them."""
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    save_file({"w.weight": torch.ones(1)}, folder / "model.safetensors")
    with refused("remove quantization_config from config.json"):
        open_checkpoint(folder)
    save_file({"w.weight": torch.ones(1).byte()}, folder / "model.safetensors")
    with refused() as caught:
        open_checkpoint(folder)
    assert "remove" not in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", FIRST])
def test_pointers_in_place_of_files_are_named(sharded, refused, name):
    (sharded / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with refused(name, "git lfs pull"):
        open_checkpoint(sharded)


def test_a_single_file_goes_before_an_index_as_in_transformers(sharded):
    save_file({"only": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded).tensors) == ["only"]


@pytest.mark.parametrize("name", ["x" * 300, "nul\0", "../..x/y", "config.json", "empty"])
def test_what_is_no_checkpoint_folder(folder, monkeypatch, refused, name):
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    with refused():
        open_checkpoint(name)


@pytest.mark.parametrize("file", ["config.json", "consolidated.00.pth", "model.gguf"])
def test_folders_without_a_config_or_weights(folder, refused, file):
    (folder / file).open("a").close()
    with refused():
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with refused():
        open_checkpoint(folder)


@pytest.mark.parametrize(("file", "text"), read_cases(__file__), ids=lambda value: value[:40])
def test_invalid_json_and_numbers_larger_than_any_model_has(folder, file, text):
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert file in problems_of(folder)[0]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("\ud800", [0]), ("t", [0, 2**63]), ("t", [int("9" * 4000)] * 500), ("t", [1] * 100_000)],
    ids=["surrogate", "beyond torch", "digits", "dims"],
)
def test_headers_of_names_and_shapes_that_no_tensor_has(folder, name, shape):
    """``tests/fuzz`` compares further headers with what the safetensors library takes."""
    write_header(folder, {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    began = time.process_time()
    assert problems_of(folder)[0].startswith("model.safetensors: ")
    assert time.process_time() - began < 2  # also where numbers are huge, or dims many


def test_a_name_that_occurs_twice_in_a_header(folder):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(folder, {"t": entry, "u": entry})
    assert len(open_checkpoint(folder).tensors) == 2
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"u"', b'"t"'))
    assert "twice" in problems_of(folder)[0]


def test_index_and_shards_that_disagree_are_reported_at_once(sharded):
    save_file({"b": torch.ones(1), "c": torch.ones(1), "extra": torch.ones(1)}, sharded / SECOND)
    write_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, "gone": SECOND})
    told = " ".join(problems_of(sharded))
    assert all(name in told for name in ("'gone'", "'b'", "'extra'"))
    assert "'c'" not in told
    save_file({"b": torch.ones(1), "c": torch.ones(1)}, sharded / SECOND)
    write_index(sharded, {"a": FIRST, "b": SECOND, "c": SECOND})
    (twice,) = problems_of(sharded)
    assert "'b'" in twice
    write_index(sharded, {"a": "model-7.safetensors", "b": "model-8.safetensors", "c": SECOND})
    (missing,) = problems_of(sharded)
    assert "model-7" in missing
    assert "model-8" in missing


def test_integer_buffers_are_not_quantized_weights(folder):
    buffers = {"attn.bias": torch.zeros(2, 2, dtype=torch.uint8), "position_ids": torch.arange(3)}
    save_file(buffers, folder / "model.safetensors")
    assert set(open_checkpoint(folder).tensors) == set(buffers)


def test_small_files_count_as_changed_by_their_content_and_large_ones_by_their_time(
    folder, monkeypatch
):
    config = folder / "config.json"
    before = fingerprint_files([config, folder / "missing"])
    os.utime(config, (1, 1))
    assert fingerprint_files([config]) == before
    config.write_text(config.read_text().replace("llama", "LLAMA"))
    assert fingerprint_files([config]) != before
    monkeypatch.setattr("kvfold.convert.checkpoint.digests._HASHED", 4)
    before = fingerprint_files([config])
    os.utime(config, (2, 2))
    assert fingerprint_files([config]) != before
