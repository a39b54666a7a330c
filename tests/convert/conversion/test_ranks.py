"""Several processes convert as one does, and one that dies ends them all."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import forked
from helpers.checkpoints import read_json
from helpers.processes import run_python

from kvfold.convert import ConvertRequest, convert_checkpoint, processes
from kvfold.convert.conversion.journal import Journal, count_finished_layers
from kvfold.convert.errors import InputError
from kvfold.convert.processes import destroy_process_group, get_rank, run_on_rank0

CONVERT = """
import json, sys
from kvfold.convert import ConvertRequest, convert_checkpoint, processes

with processes.connect_processes("cpu"):
    for options in json.loads(sys.argv[1]):
        convert_checkpoint(ConvertRequest(**options, quiet=True))
"""
CONVERSIONS = read_json(Path(__file__).with_name("ranks.json"))
# Of "alone", with one shard, one of the processes has none.
POOLED = CONVERSIONS["pooled"]
CALIBRATED = CONVERSIONS["calibrated"]


@pytest.fixture
def requests(tiny_reader, tmp_path):
    """``requests("one", POOLED)``: options of conversions into folders below ``one``."""

    def make(name, options):
        (tmp_path / name).mkdir()
        return [
            {"model": str(tiny_reader), "out": str(tmp_path / name / key), **each}
            for key, each in options.items()
        ]

    return make


def convert(made):
    for options in made:
        convert_checkpoint(ConvertRequest(**options, quiet=True))


def convert_together(log, made):
    """Two forks of this process carry out the requests ``made``."""

    def work():
        with processes.connect_processes("cpu"):
            convert(made)

    ended = forked.run_ranks(log, work)
    assert [each.status for each in ended] == [0, 0], ended


@pytest.mark.slow
def test_two_processes_of_torchrun_write_the_bytes_of_one(requests, tmp_path):
    convert(requests("one", POOLED))
    (tmp_path / "script.py").write_text(CONVERT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run_python(*command, tmp_path / "script.py", json.dumps(requests("two", POOLED)))
    for name in POOLED:
        one = forked.snapshot(tmp_path / "one" / name)
        two = forked.snapshot(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        assert [file for file in one if one[file] != two[file]] == []


@pytest.mark.slow
def test_two_processes_calibrate_as_one(requests, tmp_path):
    """Statistics and gradients are sums over all sequences: nothing differs but the order of their
    terms.
    """
    convert(requests("one", CALIBRATED))
    convert_together(tmp_path / "two log", requests("two", CALIBRATED))
    for name in CALIBRATED:
        one, two = (read_json(tmp_path / ranks / name / "kvfold.json") for ranks in ("one", "two"))
        assert two["calibration"] == one["calibration"]
        same = {"rel": 1e-5}  # weights are stored in float32
        for value in ("kl", "excess"):
            assert two["drift"][value]["value"] == pytest.approx(
                one["drift"][value]["value"], **same
            )
        for layer, expected in zip(two["drift"]["layers"], one["drift"]["layers"], strict=True):
            assert layer["attention_local"]["value"] == pytest.approx(
                expected["attention_local"]["value"], **same
            )
    convert_together(tmp_path / "again log", requests("again", {"refined": CALIBRATED["refined"]}))
    again = forked.snapshot(tmp_path / "again" / "refined")
    two = forked.snapshot(tmp_path / "two" / "refined")
    assert again == two, "as many processes, other bytes"


@pytest.mark.slow
def test_a_process_that_never_comes_ends_the_others(tmp_path, monkeypatch):
    assert processes._CONNECTION_SECONDS < 60
    monkeypatch.setattr(processes, "_CONNECTION_SECONDS", 0.5)

    def work():
        if os.environ["RANK"] == "0":
            with processes.connect_processes("cpu"):
                pass

    first, _ = forked.run_ranks(tmp_path, work)
    assert "torchrun: not all 2 processes connected within 0.5 s" in first.stderr


def test_processes_that_were_killed_go_on_after_the_last_finished_layer(requests, tmp_path, out):
    """Though none of its tensors is in the second one's shards."""
    options = {"gqa": CALIBRATED["gqa"] | {"max_shard_size": "300KB"}}
    convert_together(tmp_path / "whole log", requests("whole", options))
    made = requests("out", options)

    def killed():
        noted = Journal.add_layer

        def note(journal, *layer):
            noted(journal, *layer)
            if processes.is_rank0():
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.add_layer = note
        with processes.connect_processes("cpu"):
            convert(made)

    first, _ = forked.run_ranks(tmp_path / "killed log", killed)
    assert first.status == -signal.SIGKILL
    (left,) = out.glob(".gqa.kvfold-*")
    assert count_finished_layers(left) == 1
    convert_together(tmp_path / "out log", made)
    assert forked.snapshot(out / "gqa") == forked.snapshot(tmp_path / "whole" / "gqa")


def test_a_process_that_dies_ends_the_others_and_leaves_no_out(requests, tmp_path):
    """The first dies in the sums of calibration, where the others wait for as long as work may
    take.
    """
    made = requests("out", {"gqa": CALIBRATED["gqa"]})

    def work():
        def killed(tensors):
            if processes.is_rank0():
                (tmp_path / "died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            add_up(tensors)

        add_up = processes.all_reduce
        processes.all_reduce = killed
        with processes.connect_processes("cpu"):
            convert(made)

    first, second = forked.run_ranks(tmp_path / "log", work)
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 60
    assert first.status == -signal.SIGKILL
    assert "another process of this run has ended" in second.stderr
    assert not (tmp_path / "out" / "gqa").exists()


def run_two():
    """Rank 0 alone works, and both get its error."""
    dist.init_process_group("gloo")

    def fail():
        raise InputError("no text", ["a detail"])

    result = run_on_rank0(get_rank)
    try:
        run_on_rank0(fail)
    except InputError as error:
        print(json.dumps([result, str(error)]))
    destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_error_of_rank_0_is_that_of_all(tmp_path):
    ended = forked.run_ranks(tmp_path, run_two)
    assert [child.status for child in ended] == [0, 0], ended
    assert [json.loads(child.stdout) for child in ended] == [
        [rank, "no text\n  a detail"] for rank in (0, None)
    ]
