"""Shards: where tensors go, what is copied, cast or written, and what a half-written folder is worth."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import tensors as loaded
from helpers.processes import PATIENCE, run_python
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvfold.convert.checkpoint import writer as writing
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor, Shard, assign_shards
from kvfold.convert.checkpoint.tensors import dtype_name, torch_dtype
from kvfold.convert.checkpoint.writer import ShardWriter, write_index
from kvfold.convert.errors import InputError, KvfoldError

GB = 10**9


def source(folder: Path, files: list[dict[str, torch.Tensor]]) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight_map = {}
    for index, tensors in enumerate(files):
        file = f"model-{index}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_checkpoint(folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    torch.manual_seed(0)
    first = {name: torch.randn(16, 8).bfloat16() for name in "abcd"} | {"odd": torch.randn(7).bfloat16()}
    second = {"mask": torch.ones(3, dtype=torch.bool), "e": torch.randn(5, 5), "none": torch.zeros(0, 4)}
    return source(tmp_path / "source", [first, second])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def copies(checkpoint: Checkpoint, **dtypes: str) -> list[OutputTensor]:
    """Outputs that are all copied; ``dtypes`` maps a stored dtype to the one wanted."""
    infos = checkpoint.tensors.values()
    return [OutputTensor(info.name, dtypes.get(info.dtype, info.dtype), info.shape, info.name) for info in infos]


def copied(checkpoint: Checkpoint, out: Path, outputs: list[OutputTensor]) -> dict[str, torch.Tensor]:
    """The tensors of ``outputs``, written from ``checkpoint`` to one file."""
    writer = ShardWriter(out, assign_shards(outputs, GB))
    writer.copy_rest(checkpoint)
    assert writer.written == {tensor.name for tensor in outputs}
    writer.finish()
    return loaded(out)


def test_a_copy_of_everything_is_the_same_file_as_safetensors_makes(checkpoint: Checkpoint, out: Path) -> None:
    tensors = {name: torch.randn(3, 4) for name in "abc"}
    save_file(tensors, out / "theirs.safetensors", metadata={"format": "pt"})
    shards = assign_shards([OutputTensor(name, "F32", (3, 4), None) for name in "abc"], GB)
    writer = ShardWriter(out, shards)
    for name in "cab":
        writer.write(name, tensors[name])
    writer.finish()
    assert (out / "model.safetensors").read_bytes() == (out / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("limit", [400, 700, 1000, 1500, 100_000])
def test_no_shard_exceeds_the_limit(checkpoint: Checkpoint, out: Path, limit: int) -> None:
    shards = assign_shards(copies(checkpoint), limit)
    writer = ShardWriter(out, shards)
    writer.copy_rest(checkpoint)
    writer.finish()
    write_index(out, shards)
    for shard in shards:
        assert (out / shard.file).stat().st_size <= limit or len(shard.tensors) == 1
        with safe_open(out / shard.file, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    if len(shards) == 1:
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    else:
        assert [shard.file for shard in shards] == [
            f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
        ]
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in copies(checkpoint))}
        assert index["weight_map"] == {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    (out / "config.json").write_text("{}")
    again = open_checkpoint(out)
    assert all(torch.equal(again.read(name), checkpoint.read(name)) for name in checkpoint.tensors)


def test_shards_are_filled_in_the_given_order() -> None:
    outputs = [OutputTensor(name, "F32", (100,), None) for name in "edcba"]
    shards = assign_shards(outputs, 1200)
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [["e", "d"], ["c", "b"], ["a"]]
    assert assign_shards([], 1200) == []


def test_tensors_begin_at_multiples_of_their_item_size(out: Path) -> None:
    outputs = [OutputTensor(str(i), dtype, (3,), None) for i, dtype in enumerate(["U8", "BF16", "F64", "F32", "BF16"])]
    shards = assign_shards(outputs, GB)
    assert [tensor.name for tensor in shards[0].tensors] == ["2", "3", "1", "4", "0"]
    values = [torch.uint8, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    writer = ShardWriter(out, shards)
    for name, dtype in enumerate(values):
        writer.write(str(name), torch.ones(3, dtype=dtype))
    writer.finish()
    (out / "config.json").write_text("{}")
    sizes = [info.start % (info.nbytes // 3) for info in open_checkpoint(out).tensors.values() if info.dtype != "U8"]
    assert sizes == [0, 0, 0, 0]


def test_names_that_need_escapes(out: Path) -> None:
    name = 'quote " backslash \\ and ünïcode'
    writer = ShardWriter(out, assign_shards([OutputTensor(name, "F32", (1,), None)], GB))
    writer.write(name, torch.ones(1))
    writer.finish()
    assert list(load_file(out / "model.safetensors")) == [name]


def test_neighbors_are_copied_in_one_piece(checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [OutputTensor("c", "BF16", (4, 8), None) if t.name == "c" else t for t in copies(checkpoint)]
    pieces: list[int] = []
    real = writing.copy_range

    def counting(source: int, start: int, target: int, position: int, length: int, progress) -> None:
        pieces.append(length)
        real(source, start, target, position, length, progress)

    monkeypatch.setattr(writing, "copy_range", counting)
    writer = ShardWriter(out, assign_shards(outputs, GB))
    writer.write("c", torch.zeros(4, 8).bfloat16())
    writer.copy_rest(checkpoint)
    writer.finish()
    # e and none (F32) first, then a b | d odd (BF16) of the first file, mask
    assert sorted(pieces) == sorted([100, 512, 256 + 14, 3])
    found = loaded(out)
    assert found["c"].shape == (4, 8)
    assert all(torch.equal(found[name], checkpoint.read(name)) for name in checkpoint.tensors if name != "c")


def test_progress_counts_source_bytes(checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.file_bytes.BUFFER", 100)
    steps: list[int] = []
    writer = ShardWriter(out, assign_shards(copies(checkpoint, F32="F16"), GB))
    writer.copy_rest(checkpoint, steps.append)
    writer.finish()
    assert sum(steps) == sum(info.nbytes for info in checkpoint.tensors.values())
    assert max(steps) <= 100
    assert torch.equal(loaded(out)["a"], checkpoint.read("a"))


def test_tensors_renamed_and_put_together_of_several_and_zeros(checkpoint: Checkpoint, out: Path) -> None:
    """Their parts are copied in the order of the source's bytes, in one run with their neighbors there, or cast."""
    outputs = [
        OutputTensor("stack", "BF16", (2, 16, 8), ("d", "a")),
        OutputTensor("cast", "F32", (3, 16, 8), ("b", "a", "c")),
        OutputTensor("renamed", "BF16", (16, 8), "b"),
        OutputTensor("again", "BF16", (16, 8), "b"),
        OutputTensor("zeros", "BF16", (4, 4), ()),
        OutputTensor("empty", "BF16", (0, 8), ()),
    ]
    made, read = copied(checkpoint, out, outputs), checkpoint.read
    assert torch.equal(made["stack"], torch.stack([read("d"), read("a")]))
    assert torch.equal(made["cast"], torch.stack([read("b"), read("a"), read("c")]).float())
    assert torch.equal(made["renamed"], read("b"))
    assert torch.equal(made["again"], read("b"))
    assert not made["zeros"].any()
    assert made["empty"].shape == (0, 8)


def with_computed(checkpoint: Checkpoint, name: str) -> list[OutputTensor]:
    """Outputs that are all copied but one."""
    return [replace(tensor, source=None) if tensor.name == name else tensor for tensor in copies(checkpoint)]


def test_copying_beside_computing(checkpoint: Checkpoint, out: Path) -> None:
    steps: list[int] = []
    writer = ShardWriter(out, assign_shards(with_computed(checkpoint, "c"), 700))
    with writer.copying_rest(checkpoint, steps.append):
        writer.write("c", -checkpoint.read("c"))
    writer.finish()
    found = loaded(out)
    assert torch.equal(found.pop("c"), -checkpoint.read("c"))
    assert all(torch.equal(tensor, checkpoint.read(name)) for name, tensor in found.items())
    assert sum(steps) == sum(info.nbytes for info in checkpoint.tensors.values()) - checkpoint.tensors["c"].nbytes


def test_an_error_beside_the_copy_stops_it(checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.checkpoint.file_bytes.BUFFER", 8)
    first, stopped = threading.Event(), threading.Event()
    steps: list[int] = []

    class Told(threading.Event):
        def set(self) -> None:
            super().set()
            stopped.set()

    monkeypatch.setattr("kvfold.convert.checkpoint.writer.threading", SimpleNamespace(Event=Told))

    def progress(count: int) -> None:
        steps.append(count)
        first.set()
        stopped.wait(PATIENCE)

    def run(writer: ShardWriter) -> None:
        with writer.copying_rest(checkpoint, progress):
            first.wait(PATIENCE)
            raise ZeroDivisionError

    writer = ShardWriter(out, assign_shards(copies(checkpoint), GB))
    with pytest.raises(ZeroDivisionError):
        run(writer)
    assert steps == [8]


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_of_the_copy_reaches_the_next_write_or_the_end(checkpoint: Checkpoint, out: Path, wait: bool) -> None:
    (checkpoint.folder / "model-0.safetensors").write_bytes(b"")

    def run(writer: ShardWriter) -> None:
        with writer.copying_rest(checkpoint):
            if wait:
                assert writer._copying is not None
                writer._copying.exception(PATIENCE)
                writer.write("e", checkpoint.read("e"))
                pytest.fail("the next write must raise")

    shards = assign_shards(with_computed(checkpoint, "e"), GB)
    writer = ShardWriter(out, shards)
    with pytest.raises(InputError, match="found the end of the file"):
        run(writer)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_casts_in_chunks(checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(writing, "_CAST_ELEMENTS", 10)
    wanted = getattr(torch, dtype)
    for name, tensor in copied(checkpoint, out, copies(checkpoint, BF16=dtype_name(wanted))).items():
        original = checkpoint.read(name)
        expected = original.to(wanted) if original.dtype == torch.bfloat16 else original
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_a_cast_that_overflows(tmp_path: Path, out: Path) -> None:
    """Infinity stays infinity; a finite value must not become it."""
    values = torch.tensor([1.0, -70000.0, float("inf")])
    checkpoint = source(tmp_path / "source", [{"infinite": values[2:].clone(), "w": values}])
    expected = "tensor 'w': expected values up to 65504 to store it as F16, found 70000; choose bfloat16 or float32 as"
    writer = ShardWriter(out, assign_shards(copies(checkpoint, F32="F16"), GB))
    with pytest.raises(InputError, match=f"^{expected}"):
        writer.copy_rest(checkpoint)
    assert writer.written == {"infinite"}
    assert loaded(out)["infinite"].tolist() == [float("inf")]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_legacy_sources(tmp_path: Path, out: Path, dtype: str) -> None:
    folder = tmp_path / "legacy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    base = torch.randn(6, 4)
    torch.save({"embed": base, "head": base, "turned": base.T}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    writer = ShardWriter(out, assign_shards(copies(checkpoint, F32=dtype), 150))
    with writer.copying_rest(checkpoint):
        checkpoint.read("turned")
    writer.finish()
    wanted = base if dtype == "F32" else base.bfloat16()
    found = loaded(out)
    assert torch.equal(found["embed"], wanted)
    assert torch.equal(found["head"], wanted)
    assert torch.equal(found["turned"], wanted.T)


def test_views_and_gradients_can_be_written(out: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    writer = ShardWriter(out, assign_shards([OutputTensor("t", "F32", (6, 4), None)], GB))
    writer.write("t", base.T)
    writer.finish()
    assert torch.equal(loaded(out)["t"], base.T)


def plan_of_two(out: Path) -> ShardWriter:
    return ShardWriter(out, assign_shards([OutputTensor(name, "F32", (2,), None) for name in "ab"], GB))


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("c", torch.ones(2), "tensor 'c': expected a tensor of the plan, found none of that name"),
        ("a", torch.ones(2).half(), "tensor 'a': expected F32 (2,), found F16 (2,)"),
        ("a", torch.ones(2, 1), "tensor 'a': expected F32 (2,), found F32 (2, 1)"),
    ],
)
def test_writes_that_do_not_follow_the_plan(out: Path, name: str, tensor: torch.Tensor, expected: str) -> None:
    writer = plan_of_two(out)
    with pytest.raises(KvfoldError) as caught:
        writer.write(name, tensor)
    assert str(caught.value) == expected


def test_plans_that_are_not_followed(out: Path) -> None:
    writer = plan_of_two(out)
    writer.write("a", torch.ones(2))
    with pytest.raises(KvfoldError) as caught:
        writer.finish()
    assert str(caught.value) == f"{out}: expected 2 tensors, 1 missing\n  tensor 'b' was not written"
    with pytest.raises(FileExistsError):  # no existing file is overwritten
        plan_of_two(out)
    tensor = OutputTensor("a", "F32", (2,), None)
    with pytest.raises(KvfoldError, match="tensor 'a': expected once in the plan, found twice"):
        ShardWriter(out, [Shard("other.safetensors", (tensor, tensor))])
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (OutputTensor("a", "BF16", (8, 16), "a"), "expected BF16 (8, 16), found BF16 (16, 8) in model-0.safetensors"),
        (OutputTensor("a", "I64", (16, 8), "a"), "expected I64 (16, 8), found BF16 (16, 8) in model-0.safetensors"),
        (OutputTensor("a", "BF16", (3, 16, 8), ("a", "b")), "expected parts of 768 bytes in all, found 512"),
        (OutputTensor("a", "BF16", (16, 8), ("a", "b")), "expected parts of 256 bytes in all, found 512"),
    ],
)
def test_copies_that_cannot_be(checkpoint: Checkpoint, out: Path, output: OutputTensor, expected: str) -> None:
    writer = ShardWriter(out, assign_shards([output], GB))
    with pytest.raises(KvfoldError) as caught:
        writer.copy_rest(checkpoint)
    assert str(caught.value) == f"tensor 'a': {expected}"


def test_a_source_that_shrinks_meanwhile(checkpoint: Checkpoint, out: Path) -> None:
    path = checkpoint.folder / "model-0.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    shards = assign_shards(copies(checkpoint), GB)
    expected = r"model-0.safetensors: expected \d+ bytes, found the end of"
    writer = ShardWriter(out, shards)
    with pytest.raises(InputError, match=expected):
        writer.copy_rest(checkpoint)


def test_a_killed_run_is_carried_on(checkpoint: Checkpoint, out: Path) -> None:
    outputs = [OutputTensor("c", "BF16", (4, 8), None) if t.name == "c" else t for t in copies(checkpoint)]
    shards = assign_shards(outputs, 700)
    writer = ShardWriter(out, shards)
    writer.write("c", torch.full((4, 8), 3.0).bfloat16())
    writer.write("a", checkpoint.read("a"))
    writer.sync()
    writer = ShardWriter(out, shards, resume_written={"c", "a"})
    steps: list[int] = []
    writer.copy_rest(checkpoint, steps.append)
    writer.finish()
    assert sum(steps) == sum(info.nbytes for info in checkpoint.tensors.values() if info.name not in ("a", "c"))
    found = loaded(out)
    assert found["c"].unique().tolist() == [3.0]
    assert all(torch.equal(found[name], checkpoint.read(name)) for name in checkpoint.tensors if name != "c")


def test_only_the_same_plan_can_be_carried_on(out: Path) -> None:
    writer = plan_of_two(out)
    writer.write("a", torch.ones(2))
    other = assign_shards([OutputTensor(name, "F32", (2,), None) for name in "ac"], GB)
    with pytest.raises(KvfoldError, match="expected the shard of this plan to resume, found another; start over"):
        ShardWriter(out, other, resume_written={"a"})
    with pytest.raises(KvfoldError, match="expected to resume tensors of this plan, found 'z'; start over"):
        ShardWriter(out, other, resume_written={"z"})
    (out / "model.safetensors").unlink()
    with pytest.raises(KvfoldError, match=r"model.safetensors: expected a shard to resume, found none; start over"):
        ShardWriter(out, other, resume_written={"a"})


@pytest.mark.parametrize("name", ["a", "e"], ids=["bytes", "cast"])
def test_a_disk_that_fills_up(checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    outputs = [tensor for tensor in copies(checkpoint, F32="F16") if tensor.name == name]
    expected = f"{out / 'model.safetensors'}: expected to be able to write it, found: No space left on device"
    writer = ShardWriter(out, assign_shards(outputs, GB))
    monkeypatch.setattr("kvfold.convert.checkpoint.file_bytes.os.pwrite", full)
    value = checkpoint.read(name).to(torch_dtype(outputs[0].dtype))
    for write in (lambda: writer.copy_rest(checkpoint), lambda: writer.write(name, value)):
        with pytest.raises(KvfoldError) as caught:
            write()
        assert str(caught.value) == expected


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_memory_is_bounded(tmp_path: Path, out: Path, dtype: str) -> None:
    """A quarter of a gigabyte in one (sparse) tensor is copied and cast in half of that, beyond what torch takes."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    elements = 1 << 26
    header = json.dumps({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * elements)
    script = f"""
import resource, torch
from pathlib import Path
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.shards import *
from kvfold.convert.checkpoint.writer import *
import kvfold.convert.checkpoint.tensors
torch.ones(1 << 20).half()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint = open_checkpoint({str(folder)!r})
shards = assign_shards([OutputTensor("w", {dtype!r}, ({elements},), "w")], 10**12)
writer = ShardWriter(Path({str(out)!r}), shards)
writer.copy_rest(checkpoint)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python("-c", script).stdout) * 1024 < 4 * elements / 2
