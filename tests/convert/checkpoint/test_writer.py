"""Shards: where tensors go, what is copied, cast or written, and what a half-written folder is
worth.
"""

import errno
import hashlib
import json
import resource
import threading
import time
from contextlib import suppress

import pytest
import torch
from helpers import forked
from helpers.checkpoints import tensors as load_tensors
from helpers.processes import PATIENCE
from safetensors.torch import save_file

from kvfold.convert.checkpoint import files, opening
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.tensors import TORCH_DTYPES
from kvfold.convert.checkpoint.writer import (
    PlannedTensor,
    ShardWriter,
    assign_shards,
    write_index,
)
from kvfold.convert.errors import InputError, KvfoldError

GB = 10**9


def ignore(count):
    pass


def digest_of(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = {name: torch.randn(16, 8).bfloat16() for name in "abcd"}
    first["odd"] = torch.randn(7).bfloat16()
    mask = torch.ones(3, dtype=torch.bool)
    second = {"mask": mask, "e": torch.randn(5, 5), "none": torch.zeros(0, 4)}
    save_file(first, folder / "1.safetensors")
    save_file(second, folder / "2.safetensors")
    weight_map = dict.fromkeys(first, "1.safetensors") | dict.fromkeys(second, "2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_checkpoint(folder)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def copies(checkpoint, computed="", **dtypes):
    """All tensors, copied but for one; ``dtypes`` maps a stored dtype to the one wanted."""
    return [
        PlannedTensor(
            info.name,
            dtypes.get(info.dtype, info.dtype),
            info.shape,
            None if info.name == computed else info.name,
        )
        for info in checkpoint.tensors.values()
    ]


def copy(writer, checkpoint):
    steps = []
    with writer.copy_source_tensors(checkpoint, steps.append):
        pass
    return steps


def check_copied(out, checkpoint, computed=""):
    copied = load_tensors(out)
    names = set(checkpoint.tensors) - {computed}
    assert all(torch.equal(copied[name], checkpoint.read_tensor(name)) for name in names)


def test_computed_tensors_make_the_same_file_as_safetensors(out):
    """Wide dtypes first, whatever their names and in whatever order, also views that require
    gradients.
    """
    dtypes = {"a": "F16", "b": "F64", 'quote " backslash \\': "F32", "d": "F64"}
    tensors = {
        name: torch.randn(5, 3, dtype=TORCH_DTYPES[dtype], requires_grad=True).T
        for name, dtype in dtypes.items()
    }
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "theirs", {"format": "pt"})
    outputs = [PlannedTensor(name, dtype, (3, 5), None) for name, dtype in dtypes.items()]
    writer = ShardWriter(out, assign_shards(outputs, GB))
    for name in reversed(dtypes):
        writer.write({name: tensors[name]})
    writer.finish()
    assert (out / "model.safetensors").read_bytes() == (out / "theirs").read_bytes()


@pytest.mark.parametrize("limit", [400, 1500, 100_000])
def test_no_shard_exceeds_the_limit(checkpoint, out, limit):
    shards = assign_shards(copies(checkpoint), limit)
    writer = ShardWriter(out, shards)
    copy(writer, checkpoint)
    writer.finish()
    write_index(out, shards)
    (out / "config.json").write_text("{}")
    for shard in shards:
        assert (out / shard.file).stat().st_size <= limit or len(shard.tensors) == 1
    assert len(list(out.glob("*.safetensors"))) == len(shards)
    assert {*open_checkpoint(out).tensors} == {*checkpoint.tensors}
    check_copied(out, checkpoint)


@pytest.fixture
def in_steps(monkeypatch):
    """Tensors are read in steps of 100 bytes."""
    monkeypatch.setattr(files, "STEP", 100)
    monkeypatch.setattr(opening, "STEP", 100)


@pytest.mark.usefixtures("in_steps")
def test_copying_and_hashing_beside_computing(checkpoint, out):
    casts = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    steps = []
    outputs = [
        *copies(checkpoint, "c"),
        *(PlannedTensor(dtype, dtype, (16, 8), "a") for dtype in casts),
        PlannedTensor("joined", "BF16", (2, 16, 8), ("d", "a")),
        PlannedTensor("zeros", "F32", (3, 3), ()),
    ]
    read = checkpoint.read_tensor
    writer = ShardWriter(out, assign_shards(outputs, 700))
    with writer.copy_source_tensors(checkpoint, steps.append):
        writer.write({"c": -read("c")})
    writer.finish()
    written = load_tensors(out)
    assert writer.digests == {name: digest_of(tensor) for name, tensor in written.items()}
    assert checkpoint.digests == {name: digest_of(read(name)) for name in checkpoint.tensors}
    assert torch.equal(written["c"], -read("c"))
    for dtype, torch_dtype in casts.items():
        assert torch.equal(written[dtype], read("a").to(torch_dtype))
    assert torch.equal(written["joined"], torch.stack([read("d"), read("a")]))
    assert not written["zeros"].any()
    check_copied(out, checkpoint, "c")
    assert sum(steps) == sum(tensor.nbytes for tensor in outputs)
    # 50 elements of 8 bytes; "c", which was computed, was written at once
    assert sorted(steps)[-2] <= 400


@pytest.mark.usefixtures("in_steps")
def test_an_error_beside_the_copy_stops_it(checkpoint, out):
    begun = threading.Event()
    steps = list[int]()

    def progress(count):
        steps.append(count)
        begun.set()
        time.sleep(0.01)

    writer = ShardWriter(out, assign_shards(copies(checkpoint), GB))
    with suppress(ZeroDivisionError), writer.copy_source_tensors(checkpoint, progress):
        begun.wait(PATIENCE)
        raise ZeroDivisionError
    assert sum(steps) < sum(info.nbytes for info in checkpoint.tensors.values()) / 2


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_of_the_copy_reaches_the_next_write_or_the_end(checkpoint, out, wait):
    (checkpoint.folder / "1.safetensors").write_bytes(b"")
    writer = ShardWriter(out, assign_shards(copies(checkpoint, "e"), GB))

    def run():
        with writer.copy_source_tensors(checkpoint, ignore):
            end = time.monotonic() + PATIENCE
            while wait and time.monotonic() < end:
                writer.write({"e": checkpoint.read_tensor("e")})
            assert not wait

    with pytest.raises(InputError, match="ends before byte"):
        run()


def test_a_legacy_source_is_cast_but_not_if_that_overflows(tmp_path, out, refused):
    """Infinity stays infinity; a finite value must not become it."""
    (tmp_path / "config.json").write_text("{}")
    base = torch.randn(6, 4)
    base[0, 0] = torch.inf
    torch.save({"w": base, "turned": base.T}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    shards = assign_shards(copies(checkpoint, F32="F16"), 150)
    copy(ShardWriter(out, shards), checkpoint)
    copied = load_tensors(out)
    assert torch.equal(copied["w"], base.half())
    assert torch.equal(copied["turned"], base.half().T)
    base[0, 1] = 70000
    torch.save({"w": base, "turned": base.T}, tmp_path / "pytorch_model.bin")
    (out / "more").mkdir()
    with refused():
        copy(ShardWriter(out / "more", shards), open_checkpoint(tmp_path))


def test_plans_that_are_not_followed(out, refused):
    shards = assign_shards([PlannedTensor(name, "F32", (2,), None) for name in "ab"], GB)
    writer = ShardWriter(out, shards)
    assert writer.write({"a": torch.ones(2)}) == 8
    with refused(kind=KvfoldError):
        writer.finish()
    with pytest.raises(FileExistsError):  # no existing file is overwritten
        ShardWriter(out, shards)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_disks_that_fill_up_or_break(checkpoint, out, monkeypatch, dtype):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    writer = ShardWriter(out, assign_shards(copies(checkpoint, BF16=dtype), GB))
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", fail)
        with pytest.raises(OSError, match=str(out)):
            copy(writer, checkpoint)
    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(InputError, match=str(checkpoint.folder)):
        copy(writer, checkpoint)


def test_memory_is_bounded(tmp_path):
    """128 MiB in one tensor are copied and cast in half of that."""
    elements = 1 << 25
    save_file({"w": torch.zeros(elements)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    def write():
        torch.ones(1 << 20).half()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for dtype in ("F32", "F16"):
            (tmp_path / dtype).mkdir()
            shards = assign_shards([PlannedTensor("w", dtype, (elements,), "w")], 10**12)
            copy(ShardWriter(tmp_path / dtype, shards), open_checkpoint(tmp_path))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    ended = forked.run(tmp_path / "log", write)
    assert int(ended.stdout) * 1024 < 4 * elements / 2
