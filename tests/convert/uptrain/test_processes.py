"""Processes of one uptraining: the first one works for all, and one that dies ends them all."""

import json
import os
import signal

import pytest
import torch.distributed as dist
from helpers import forked

from kvfold.convert.errors import InputError
from kvfold.convert.processes import broadcast_from_rank0, destroy_process_group


def run_two():
    """Rank 0 alone works, and both get its error."""
    dist.init_process_group("gloo")

    def fail():
        raise InputError("no text", ["a detail"])

    result = broadcast_from_rank0(dist.get_rank)
    try:
        broadcast_from_rank0(fail)
    except InputError as error:
        print(json.dumps([result, str(error)]))
    destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_error_of_rank_0_is_that_of_all(tmp_path):
    ended = forked.run_ranks(tmp_path, run_two)
    assert [child.status for child in ended] == [0, 0], ended
    assert [json.loads(child.stdout) for child in ended] == [[0, "no text\n  a detail"]] * 2


def test_a_process_that_dies_ends_the_others(tmp_path):
    def work():
        dist.init_process_group("gloo")
        broadcast_from_rank0(lambda: os.kill(os.getpid(), signal.SIGKILL))

    first, second = forked.run_ranks(tmp_path, work)
    assert first.status == -signal.SIGKILL
    assert "another process of this run has ended" in second.stderr
