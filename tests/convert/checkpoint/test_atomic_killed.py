"""SIGKILL at every step of an output folder's life, and at random moments of a real copy."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import run_python

# Forks a child per step: it runs the whole life of an output folder and is killed by itself before or after its n-th
# call of a function that touches the disk. The parent looks at what is left and runs again.
STEPS = r"""
import fcntl, os, shutil, signal, sys
from pathlib import Path
from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import output_folder

root, mode, overwrite = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwrite"
out = root / "out"
if mode == "aside":
    atomic._renameat2 = lambda *_: False


def fill(folder, text):
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_text(text * 100)


def content(folder):
    text = (folder / "config.json").read_text()
    assert (folder / "model.safetensors").read_text() == text * 100, "half a folder"
    return text


def run(text):
    with output_folder(out, overwrite=overwrite) as folder:
        fill(folder, text)


def kill_at(step):
    count = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal count
            for moment in (0, 1):
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment == 0:
                    result = function(*arguments, **options)
            return result
        return call

    for name in ("open", "close", "mkdir", "rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)
    atomic._renameat2 = counted(atomic._renameat2)


seen = set()
for step in range(1, 10000):
    shutil.rmtree(root)
    root.mkdir()
    if overwrite:
        out.mkdir()
        fill(out, "old")
    child = os.fork()
    if child == 0:
        kill_at(step)
        run("new")
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    state = content(out) if out.exists() else "absent"
    seen.add(state)
    aside = [path for path in root.iterdir() if path.name.endswith(".old")]
    if overwrite and state == "absent":
        assert mode == "aside" and content(aside[0]) == "old", "the old folder is lost"
        try:
            with output_folder(out, overwrite=True):
                assert content(out) == "old", "the old folder was not put back"
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert content(out) == "old"
    if state != "new" or overwrite:
        run("newer")
        assert content(out) == "newer"
    else:
        shutil.rmtree(out)
        run("newer")
    assert os.listdir(root) == ["out"], os.listdir(root)
    if not killed:
        assert state == "new"
        break
print(step, *sorted(seen))
"""


@pytest.mark.parametrize("overwrite", ["overwrite", "fresh"])
@pytest.mark.parametrize("mode", ["exchange", "aside"])
def test_killed_at_every_step(tmp_path: Path, mode: str, overwrite: str) -> None:
    (tmp_path / "root").mkdir()
    steps, *seen = run_python("-c", STEPS, tmp_path / "root", mode, overwrite).stdout.split()
    assert int(steps) > 30
    expected = {"fresh": ["absent", "new"], "overwrite": ["new", "old"]}[overwrite]
    assert seen == (["absent", *expected] if (mode, overwrite) == ("aside", "overwrite") else expected)


COPY = r"""
import sys
from kvfold.convert.checkpoint.atomic import output_folder
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor, assign_shards
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.checkpoint.writer import write_index

source = open_checkpoint(sys.argv[1])
outputs = [OutputTensor(info.name, info.dtype, info.shape, info.name) for info in source.tensors.values()]
print("begun", flush=True)
with output_folder(sys.argv[2], overwrite=True, model=source.folder) as folder:
    shards = assign_shards(outputs, 8 << 20)
    with ShardWriter(folder, shards) as writer:
        writer.copy_rest(source)
        writer.finish()
    write_index(folder, shards)
    (folder / "config.json").write_text("{}")
"""


def make_source(folder: Path, tensors: int, elements: int) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    entries = {
        f"t{index}": {
            "dtype": "F32",
            "shape": [elements],
            "data_offsets": [4 * elements * index, 4 * elements * (index + 1)],
        }
        for index in range(tensors)
    }
    header = json.dumps(entries).encode()
    data = random.Random(0).randbytes(4 * elements * tensors)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Each time OUT is as it was or as it should be; the run after the last kill cleans up."""
    source, out = tmp_path / "source", tmp_path / "out"
    make_source(source, 32, 1 << 18)
    command = [sys.executable, "-c", COPY, str(source), str(out)]

    def start() -> tuple[subprocess.Popen[str], float]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process, time.monotonic()

    process, begun = start()
    assert process.wait() == 0
    duration = time.monotonic() - begun
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(whole) > 3
    for path in out.iterdir():
        path.unlink()
    (out / "kvfold.json").write_text("the old one")
    generator = random.Random(1)
    killed = 0
    for _ in range(10):
        process, _ = start()
        time.sleep(generator.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            killed += 1
        else:
            duration /= 2  # the first run was slower: the machine had other work
        found = {path.name: path.read_bytes() for path in out.iterdir()}
        assert found in (whole, {"kvfold.json": b"the old one"})
    assert killed > 0
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
