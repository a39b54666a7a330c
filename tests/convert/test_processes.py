"""Work of the first process that the others wait for."""

import json
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import forked

from kvfold.convert.errors import InputError
from kvfold.convert.processes import destroy_process_group, on_rank0


def run_two():
    """Both wait longer for rank 0 than the training's timeout, and both get its error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    begin = time.monotonic()

    def work_slowly():
        time.sleep(1.5)
        return int(os.environ["RANK"])

    def fail():
        raise InputError("no text", ["a detail"])

    result = on_rank0(work_slowly)
    seconds = time.monotonic() - begin
    try:
        on_rank0(fail)
    except InputError as error:
        print(json.dumps([result, seconds > 1.2, str(error)]))
    destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_others_wait_longer_than_the_timeout_of_the_training_and_share_the_error(tmp_path):
    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(tmp_path, run_two)
    assert [child.status for child in ended] == [0, 0], ended
    assert [json.loads(child.stdout) for child in ended] == [
        [rank, True, "no text\n  a detail"] for rank in (0, None)
    ]
