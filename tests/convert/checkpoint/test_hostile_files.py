"""Files that no trainer writes: each is refused before any work, in words, at the cost of reading it once."""

import json
import os
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.checkpoint.folder import parse_json
from kvfold.convert.checkpoint.headers import Header, parse_header
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor, assign_shards
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.cli import main
from kvfold.convert.console import append_line
from kvfold.convert.errors import InputError, KvfoldError, short, system_failure
from kvfold.convert.recipes import read_recipe
from kvfold.convert.text.corpus import open_corpus

HALF = '"\\ud800"'  # half of a surrogate pair, as JSON spells it


def header_of(text: str) -> Header:
    raw = text.encode()
    data = struct.pack("<Q", len(raw)) + raw
    return parse_header("x.safetensors", len(data), lambda start, length: data[start : start + length])


def seconds(text: str) -> float:
    start = time.process_time()
    assert header_of(text).problems
    return time.process_time() - start


def refused(folder: Path) -> list[str]:
    with pytest.raises(InputError) as raised:
        open_checkpoint(folder)
    return [raised.value.message, *raised.value.details]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_half_a_character_in_json(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / name).write_text(f'{{"weight_map": {{"t": {HALF}}}}}')
    found = refused(folder)[0]
    assert name in found
    assert "found what does not parse: half of a surrogate pair, \\ud800, which is no character" in found


def test_pairs_of_halves_are_characters() -> None:
    value = parse_json(Path("c"), b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}')
    assert value == {"a": "\U0001f600", "b": "\\ud800"}


def test_half_a_character_in_a_tensor_name() -> None:
    problems = header_of(f'{{{HALF}: {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}}}').problems
    assert problems == [
        "x.safetensors: expected a JSON header, found half of a surrogate pair, \\ud800, which is no character; "
        "fetch it again"
    ]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (f'{{"text": {HALF}}}', "expected Unicode text, found half of a surrogate pair, \\ud800"),
        (f'{{"messages": [{HALF}]}}', "expected Unicode text, found half of a surrogate pair, \\ud800"),
        ("[" * 100_000, "expected a JSON object, found one that is nested too deeply"),
    ],
)
def test_a_row_that_is_no_text(tmp_path: Path, row: str, found: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "good"}}\n{row}\n')
    with pytest.raises(InputError, match="line 2") as raised:
        open_corpus(str(path), lambda messages: str(messages[0]), 0).documents(1000)
    assert found in raised.value.message


def test_a_folder_whose_name_is_no_text(folder: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(folder.parent) + b"/caf\xe9"))
    folder.rename(odd)
    assert open_checkpoint(odd).origin == "caf\N{REPLACEMENT CHARACTER}"


def test_many_equal_names_take_linear_time() -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    few, many = ("{" + ",".join(f'"{i % (count - 1)}":{entry}' for i in range(count)) + "}" for count in (4000, 16000))
    slow, quick = (min(seconds(text) for _ in range(3)) for text in (many, few))  # others may use the machine too
    assert slow < max(8 * quick, 0.5)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ("[9223372036854775808]", "expected fewer than 2**63 elements and bytes"),
        ("[4294967296, 4294967296]", "expected fewer than 2**63 elements and bytes"),
        ("[0, 9223372036854775808]", "expected fewer than 2**63 elements and bytes"),
        (f"[{','.join(['9' * 4000] * 500)}]", "expected fewer than 2**63 elements and bytes"),
        ("[" + ",".join(["1"] * 100_000) + "]", "need 4 bytes, its data_offsets span 0"),
    ],
)
def test_impossible_shapes(shape: str, problem: str) -> None:
    text = f'{{"t": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 0]}}}}'
    assert seconds(text) < 1
    (found,) = header_of(text).problems
    assert problem in found
    assert len(found) < 2000


def test_side_files_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "tokenizer.json":  # by its mode it could be: tests may run as root, who reads everything
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    (folder / "tokenizer.json").touch()
    monkeypatch.setattr(Path, "open", denied)
    expected = f"{folder}/tokenizer.json: expected to be able to read it, found: Permission denied"
    assert refused(folder) == [expected]


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "circle"])
def test_names_that_no_file_can_have(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "circle").symlink_to("circle")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    assert "expected a file" in refused(folder)[0]


def test_a_config_that_never_ends(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert refused(folder) == [f"{folder}/config.json: expected at most 16.8 MB, found more; fetch it again"]


def test_a_legacy_archive_that_unpacks_to_far_more(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = refused(folder)
    assert "an archive of" in found
    assert found.endswith("unpacks to 50000000; fetch it again, or save the model with save_pretrained")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB, of which torch's import is most


def test_a_model_of_more_shards_than_a_process_may_open(tmp_path: Path) -> None:
    count = 60
    shards = assign_shards([OutputTensor(f"t{i}", "F32", (1,), None) for i in range(count)], 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1]))
    try:
        ShardWriter(tmp_path, shards).sync()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.iterdir())) == count


def test_a_shard_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    shards = assign_shards([OutputTensor("t", "F32", (1,), None)], 100)
    writer = ShardWriter(tmp_path, shards)
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("secret")
    with pytest.raises(KvfoldError, match="Too many levels of symbolic links"):
        writer.sync()


def test_the_log_is_a_regular_file(tmp_path: Path) -> None:
    append_line(tmp_path / "log", "one")
    append_line(tmp_path / "log", "two")
    (tmp_path / "link").symlink_to("log")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=f"{name}|not a regular file"):
            append_line(tmp_path / name, "three")
    os.close(reader)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


READING = "cannot be read or written"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(28, "No space left on device", "/out/x"),
            f"/out/x: {READING} (No space left on device); free some space",
        ),
        (
            RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
            f"a file: {READING} (No space left on device); free some space",
        ),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
            "a file cannot be written (PytorchStreamWriter failed writing file data/0",
        ),
        (MemoryError(), "no memory left (MemoryError); free some memory, or use a larger machine"),
    ],
)
def test_what_the_system_refuses_is_named(error: Exception, message: str) -> None:
    assert str(system_failure(error)).startswith(message)
    assert system_failure(ValueError("a fault of kvfold")) is None


@pytest.mark.parametrize("content", [f"kv_heads = {'9' * 5000}", "[" * 100_000])
def test_recipes_that_python_does_not_parse(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(InputError, match=r"r.toml is no valid TOML: "):
        read_recipe(str(tmp_path / "r.toml"))


def test_recipes_that_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(InputError, match="must be a TOML file, not a pipe or a device"):
            read_recipe(str(tmp_path / f"{name}.toml"))
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="must be at most 1 MiB"):
        read_recipe(str(tmp_path / "large.toml"))


@pytest.mark.parametrize("steps", ["\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_steps_that_are_no_number(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "m", "o", "--to", "mqa", "--refine", steps])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --refine must be a number of steps or auto, not ")


def test_long_values_are_shortened() -> None:
    value: Any = {"a": [list(range(1000))] * 5, "b": "x" * 10**6}
    assert len(short(value)) < 800
    assert short([1, 2]) == "[1, 2]"
