"""Several processes convert as one does, and one that dies ends them all."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forked
from helpers.processes import run_python

from kvfold.convert import ConvertRequest, convert_checkpoint, processes
from kvfold.convert.data import demo_folder

pytestmark = pytest.mark.slow
CONVERT = """
import json, sys
from kvfold.convert import ConvertRequest, convert_checkpoint, processes

with processes.joined("cpu"):
    for options in json.loads(sys.argv[1]):
        convert_checkpoint(ConvertRequest(**options, quiet=True))
"""
DIES = """
import os, signal, time
from pathlib import Path
from kvfold.convert import processes
from kvfold.convert.checkpoint.writer import ShardWriter

write = ShardWriter.write_own

def killed(writer, tensors):
    if processes.rank() == 1:
        Path(__file__).with_name("died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return write(writer, tensors)

ShardWriter.write_own = killed
"""
POOLED: dict[str, dict[str, Any]] = {
    "mean": {"to": "gqa", "kv_heads": 2, "method": "mean", "max_shard_size": "1MB"},
    "random": {"to": "mqa", "method": "random", "max_shard_size": "3MB", "dtype": "bfloat16"},
    "svd": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "method": "svd", "max_shard_size": "2MB"},
    "alone": {"to": "mqa", "method": "first"},  # one shard: one of the processes has none
}

TEXT = {"samples": 7, "seq_len": 48}
CALIBRATED: dict[str, dict[str, Any]] = {
    "gqa": {"to": "gqa", "kv_heads": 2, "group": "contiguous", **TEXT},
    "mla": {"to": "mla", "kv_rank": 24, "rope_dim": 8, **TEXT},
    "refined": {"to": "mqa", "method": "mean", "refine": 3, "dtype": "float32", **TEXT},
}


def requests(folder: Path, options: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    folder.mkdir()
    return [{"model": str(demo_folder()), "out": str(folder / name), **each} for name, each in options.items()]


def launch(folder: Path, made: list[dict[str, Any]], script: str = CONVERT, check: bool = True) -> Any:
    """Two processes run ``script`` over the requests ``made``."""
    (folder / "script.py").write_text(script)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    return run_python(*command, folder / "script.py", json.dumps(made), check=check)


def convert_together(log: Path, made: list[dict[str, Any]]) -> None:
    """Two forks of this process carry out the requests ``made``."""

    def work() -> None:
        with processes.joined("cpu"):
            for options in made:
                convert_checkpoint(ConvertRequest(**options, quiet=True))

    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(log, work)
    assert [each.status for each in ended] == [0, 0], ended


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    for made in requests(tmp_path / "one", POOLED):
        convert_checkpoint(ConvertRequest(**made, quiet=True))
    launch(tmp_path, requests(tmp_path / "two", POOLED))
    for name in POOLED:
        one, two = files(tmp_path / "one" / name), files(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        assert [file for file in one if one[file] != two[file]] == []


def test_two_processes_calibrate_as_one(tmp_path: Path) -> None:
    """Statistics and gradients are sums over all sequences: nothing differs but the order of their terms."""
    for made in requests(tmp_path / "one", CALIBRATED):
        convert_checkpoint(ConvertRequest(**made, quiet=True))
    convert_together(tmp_path / "two log", requests(tmp_path / "two", CALIBRATED))
    for name in CALIBRATED:
        one, two = (json.loads((tmp_path / ranks / name / "kvfold.json").read_text()) for ranks in ("one", "two"))
        assert two["calibration"] == one["calibration"]
        same = {"rel": 1e-6}
        for value in ("kl", "excess"):
            assert two["drift"][value]["value"] == pytest.approx(one["drift"][value]["value"], **same)
        for layer, expected in zip(two["drift"]["layers"], one["drift"]["layers"], strict=True):
            assert layer["attention_local"]["value"] == pytest.approx(expected["attention_local"]["value"], **same)
    again = {name: CALIBRATED[name] for name in ("gqa", "refined")}
    convert_together(tmp_path / "again log", requests(tmp_path / "again", again))
    for name in again:
        assert files(tmp_path / "again" / name) == files(tmp_path / "two" / name), "as many processes, other bytes"


def test_a_process_that_dies_ends_the_others_and_leaves_no_out(tmp_path: Path) -> None:
    done = launch(tmp_path, requests(tmp_path / "out", {"mean": POOLED["mean"]}), DIES + CONVERT, check=False)
    assert done.returncode != 0
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 60
    assert not (tmp_path / "out" / "mean").exists()


def test_a_process_that_never_comes_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert timedelta(minutes=1) > processes._CONNECTION
    monkeypatch.setattr(processes, "_CONNECTION", timedelta(seconds=0.5))

    def work() -> None:
        if os.environ["RANK"] == "0":
            with processes.joined("cpu"):
                pass

    first, _ = forked.run_ranks(tmp_path, work)
    assert "torchrun: not all 2 processes connected within 0.5 s" in first.stderr


def test_without_a_launcher_too_a_death_ends_the_others(tmp_path: Path) -> None:
    """Of the first, in the sums of calibration, where the others wait for as long as work may take."""
    (options,) = requests(tmp_path / "out", {"gqa": {**CALIBRATED["gqa"], "samples": 4, "seq_len": 8}})

    def work() -> None:
        def killed(tensors: Any) -> None:
            if processes.is_first():
                (tmp_path / "died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            add_up(tensors)

        add_up, processes.add_up = processes.add_up, killed
        with processes.joined("cpu"):
            convert_checkpoint(ConvertRequest(**options, quiet=True))

    torch.set_num_threads(1)  # a fork has one thread
    first, second = forked.run_ranks(tmp_path / "log", work)
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 60
    assert first.status == -signal.SIGKILL
    assert "another process of this run has ended" in second.stderr
    assert not Path(options["out"]).exists()
