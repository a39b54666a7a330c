"""Shards: where tensors go, what is copied, cast or written, and what a half-written folder is
worth.
"""

import errno
import hashlib
import json
import resource
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forked
from helpers.checkpoints import tensors as loaded
from helpers.processes import PATIENCE
from safetensors import safe_open
from safetensors.torch import save_file

from kvfold.convert.checkpoint import opening
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import DTYPE_NAMES
from kvfold.convert.checkpoint.writer import (
    OutputTensor,
    Shard,
    ShardWriter,
    assign_shards,
    tensor_places,
    write_index,
)
from kvfold.convert.errors import InputError, KvfoldError

GB = 10**9


def ignore(count: int) -> None:
    pass


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


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
    first = {name: torch.randn(16, 8).bfloat16() for name in "abcd"} | {
        "odd": torch.randn(7).bfloat16()
    }
    second = {
        "mask": torch.ones(3, dtype=torch.bool),
        "e": torch.randn(5, 5),
        "none": torch.zeros(0, 4),
    }
    return source(tmp_path / "source", [first, second])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def copies(checkpoint: Checkpoint, **dtypes: str) -> list[OutputTensor]:
    """Outputs that are all copied; ``dtypes`` maps a stored dtype to the one wanted."""
    infos = checkpoint.tensors.values()
    return [
        OutputTensor(info.name, dtypes.get(info.dtype, info.dtype), info.shape, info.name)
        for info in infos
    ]


def plan_of(names: str) -> list[Shard]:
    return assign_shards([OutputTensor(name, "F32", (2,), None) for name in names], GB)


def copied(
    checkpoint: Checkpoint, out: Path, outputs: list[OutputTensor]
) -> dict[str, torch.Tensor]:
    """The tensors of ``outputs``, written from ``checkpoint`` to one file."""
    writer = ShardWriter(out, assign_shards(outputs, GB))
    writer.copy_rest(checkpoint, ignore)
    assert writer.written == {tensor.name for tensor in outputs}
    writer.finish()
    return loaded(out)


def with_computed(checkpoint: Checkpoint, name: str) -> list[OutputTensor]:
    """Outputs that are all copied but one."""
    return [
        replace(tensor, source=None) if tensor.name == name else tensor
        for tensor in copies(checkpoint)
    ]


def total(checkpoint: Checkpoint, without: str = "") -> int:
    return sum(info.nbytes for info in checkpoint.tensors.values() if info.name not in without)


def test_computed_tensors_make_the_same_file_as_safetensors(out: Path) -> None:
    """Whatever their names and in whatever order, also views that require gradients."""
    tensors = {
        name: torch.randn(4, 3, requires_grad=True).T for name in ("a", "b", 'quote " backslash \\')
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        out / "theirs",
        {"format": "pt"},
    )
    writer = ShardWriter(
        out, assign_shards([OutputTensor(name, "F32", (3, 4), None) for name in tensors], GB)
    )
    for name in reversed(tensors):
        writer.write({name: tensors[name]})
    writer.finish()
    assert (out / "model.safetensors").read_bytes() == (out / "theirs").read_bytes()


@pytest.mark.parametrize("limit", [400, 700, 1500, 100_000])
def test_no_shard_exceeds_the_limit(checkpoint: Checkpoint, out: Path, limit: int) -> None:
    shards = assign_shards(copies(checkpoint), limit)
    writer = ShardWriter(out, shards)
    writer.copy_rest(checkpoint, ignore)
    writer.finish()
    write_index(out, shards)
    for shard in shards:
        assert (out / shard.file).stat().st_size <= limit or len(shard.tensors) == 1
        with safe_open(out / shard.file, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    assert [shard.file for shard in shards] == (names if len(shards) > 1 else ["model.safetensors"])
    assert len(list(out.iterdir())) == len(shards) + (len(shards) > 1)
    if len(shards) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {
            "total_size": sum(tensor.nbytes for tensor in copies(checkpoint))
        }
        assert index["weight_map"] == {
            tensor.name: shard.file for shard in shards for tensor in shard.tensors
        }
    (out / "config.json").write_text("{}")
    again = open_checkpoint(out)
    assert all(torch.equal(again.read(name), checkpoint.read(name)) for name in checkpoint.tensors)


def test_shards_are_filled_in_the_given_order_wide_tensors_come_first_and_computed_ones_last() -> (
    None
):
    """So that each begins at a multiple of its item size."""
    mixed = [OutputTensor(name, "F32", (2,), name if name in "bd" else None) for name in "abcd"]
    assert [*tensor_places(assign_shards(mixed, GB))] == [*"bdac"]
    shards = assign_shards([OutputTensor(name, "F32", (100,), None) for name in "edcba"], 1200)
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [
        ["e", "d"],
        ["c", "b"],
        ["a"],
    ]
    assert assign_shards([], 1200) == []
    outputs = [
        OutputTensor(str(i), dtype, (3,), None)
        for i, dtype in enumerate(["U8", "BF16", "F64", "F32", "BF16"])
    ]
    places = tensor_places(assign_shards(outputs, GB))
    assert [*places] == ["2", "3", "1", "4", "0"]
    assert [place.start % (place.tensor.nbytes // 3) for place in places.values()] == [0] * 5


def test_copying_and_hashing_beside_computing(
    checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_STEP", 100)
    steps: list[int] = []
    outputs = [
        *with_computed(checkpoint, "c"),
        OutputTensor("cast", "F32", (16, 8), "a"),
        OutputTensor("joined", "BF16", (2, 16, 8), ("d", "a")),
        OutputTensor("zeros", "F32", (3, 3), ()),
    ]
    writer = ShardWriter(out, assign_shards(outputs, 700))
    with writer.copy_in_thread(checkpoint, steps.append):
        writer.write({"c": -checkpoint.read("c")})
    writer.finish()
    found = loaded(out)
    assert writer.digests == {name: digest_of(tensor) for name, tensor in found.items()}
    assert checkpoint.digests == {
        name: digest_of(checkpoint.read(name)) for name in checkpoint.tensors
    }
    read = checkpoint.read
    assert torch.equal(found["c"], -read("c"))
    assert torch.equal(found["cast"], read("a").float())
    assert torch.equal(found["joined"], torch.stack([read("d"), read("a")]))
    assert not found["zeros"].any()
    assert all(
        torch.equal(found[name], checkpoint.read(name))
        for name in checkpoint.tensors
        if name != "c"
    )
    assert sum(steps) == sum(tensor.nbytes for tensor in outputs if tensor.name != "c")
    assert max(steps) <= 100


def test_an_error_beside_the_copy_stops_it(
    checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_STEP", 8)
    begun = threading.Event()
    steps = list[int]()

    def progress(count: int) -> None:
        steps.append(count)
        begun.set()
        time.sleep(0.01)

    writer = ShardWriter(out, assign_shards(copies(checkpoint), GB))
    with suppress(ZeroDivisionError), writer.copy_in_thread(checkpoint, progress):
        begun.wait(PATIENCE)
        raise ZeroDivisionError
    assert len(steps) * 8 < total(checkpoint) / 2


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_of_the_copy_reaches_the_next_write_or_the_end(
    checkpoint: Checkpoint, out: Path, wait: bool
) -> None:
    (checkpoint.folder / "model-0.safetensors").write_bytes(b"")

    writer = ShardWriter(out, assign_shards(with_computed(checkpoint, "e"), GB))

    def run() -> None:
        with writer.copy_in_thread(checkpoint, ignore):
            if wait:
                assert writer._copying is not None
                writer._copying.exception(PATIENCE)
                writer.write({"e": checkpoint.read("e")})
                pytest.fail("the next write must raise")

    with pytest.raises(InputError, match="it changed while it was read"):
        run()


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_casts_in_chunks(
    checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(opening, "_STEP", 40)
    for name, tensor in copied(checkpoint, out, copies(checkpoint, BF16=dtype)).items():
        original = checkpoint.read(name)
        assert DTYPE_NAMES[tensor.dtype] == (
            dtype if original.dtype == torch.bfloat16 else DTYPE_NAMES[original.dtype]
        )
        assert torch.equal(tensor, original.to(tensor.dtype))


def test_a_cast_that_overflows(tmp_path: Path, out: Path, refused: Any) -> None:
    """Infinity stays infinity; a finite value must not become it."""
    values = torch.tensor([1.0, -70000.0, float("inf")])
    checkpoint = source(tmp_path / "source", [{"infinite": values[2:].clone(), "w": values}])
    writer = ShardWriter(out, assign_shards(copies(checkpoint, F32="F16"), GB))
    with refused():
        writer.copy_rest(checkpoint, ignore)
    assert writer.written == {"infinite"}
    assert loaded(out)["infinite"].tolist() == [float("inf")]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_legacy_sources(tmp_path: Path, out: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    base = torch.randn(6, 4)
    torch.save({"embed": base, "head": base, "turned": base.T}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    writer = ShardWriter(out, assign_shards(copies(checkpoint, F32=dtype), 150))
    with writer.copy_in_thread(checkpoint, ignore):
        checkpoint.read("turned")
    writer.finish()
    wanted = base if dtype == "F32" else base.bfloat16()
    found = loaded(out)
    assert all(torch.equal(found[name], wanted) for name in ("embed", "head"))
    assert torch.equal(found["turned"], wanted.T)


def test_plans_that_are_not_followed(out: Path, refused: Any) -> None:
    writer = ShardWriter(out, plan_of("ab"))
    with refused(KvfoldError):
        writer.write({"a": torch.ones(2, 1)})
    assert writer.write({"a": torch.ones(2), "another process's": torch.ones(2)}) == 8
    with refused(KvfoldError):
        writer.finish()
    for names in ("ab", "aa"):  # no existing file is overwritten; no tensor is written twice
        with refused(KvfoldError):
            ShardWriter(out, plan_of(names))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "output",
    [
        OutputTensor("a", "BF16", (3, 16, 8), ("a", "b")),
        OutputTensor("a", "BF16", (16, 8), ("a", "b")),
    ],
    ids=["too short", "too long"],
)
def test_copies_that_cannot_be(
    checkpoint: Checkpoint, out: Path, output: OutputTensor, refused: Any
) -> None:
    writer = ShardWriter(out, assign_shards([output], GB))
    with refused(KvfoldError):
        writer.copy_rest(checkpoint, ignore)


def test_a_killed_run_is_carried_on(checkpoint: Checkpoint, out: Path) -> None:
    shards = assign_shards(with_computed(checkpoint, "c"), 700)
    writer = ShardWriter(out, shards)
    writer.write({"c": torch.full((16, 8), 3.0), "a": checkpoint.read("a")})
    writer.sync()
    writer = ShardWriter(out, shards, resume_written={"c", "a"})
    steps: list[int] = []
    writer.copy_rest(checkpoint, steps.append)
    writer.finish()
    assert sum(steps) == total(checkpoint, without="ac")
    found = loaded(out)
    assert found["c"].unique().tolist() == [3.0]
    assert all(
        torch.equal(found[name], checkpoint.read(name))
        for name in checkpoint.tensors
        if name != "c"
    )


def test_only_the_same_plan_can_be_carried_on(out: Path, refused: Any) -> None:
    ShardWriter(out, plan_of("ab")).write({"a": torch.ones(2)})
    for name in ("a", "z"):
        with refused(KvfoldError):
            ShardWriter(out, plan_of("ac"), resume_written={name})
    (out / "model.safetensors").unlink()
    with refused(KvfoldError):
        ShardWriter(out, plan_of("ab"), resume_written={"a"})


@pytest.mark.parametrize("name", ["a", "e"], ids=["bytes", "cast"])
def test_a_disk_that_fills_up(
    checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, name: str, refused: Any
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    outputs = [tensor for tensor in copies(checkpoint, F32="F16") if tensor.name == name]
    writer = ShardWriter(out, assign_shards(outputs, GB))
    monkeypatch.setattr("os.pwrite", full)
    for write in (
        lambda: writer.copy_rest(checkpoint, ignore),
        lambda: writer.write({name: checkpoint.read(name)}),
    ):
        with refused(KvfoldError):
            write()


def test_a_source_that_cannot_be_read(
    checkpoint: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", broken)
    for dtypes in ({}, {"BF16": "F32", "F32": "F16"}):
        shutil.rmtree(out)
        out.mkdir()
        writer = ShardWriter(out, assign_shards(copies(checkpoint, **dtypes), GB))
        with refused() as caught:
            writer.copy_rest(checkpoint, ignore)
        assert str(checkpoint.folder) in str(caught.value)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB in one (sparse) tensor is copied and cast in half of that."""
    elements = 1 << 24
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * elements)
    monkeypatch.setattr(opening, "_STEP", 1 << 22)

    def write() -> None:
        torch.ones(1 << 20).half()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for dtype in ("F32", "F16"):
            (tmp_path / dtype).mkdir()
            shards = assign_shards([OutputTensor("w", dtype, (elements,), "w")], 10**12)
            ShardWriter(tmp_path / dtype, shards).copy_rest(open_checkpoint(tmp_path), ignore)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    ended = forked.run(tmp_path / "log", write)
    assert int(ended.stdout) * 1024 < 4 * elements / 2
