"""Work of rank 0 that the others wait for."""

import json

import pytest
import torch.distributed as dist
from helpers import forked

from kvfold.convert.errors import InputError
from kvfold.convert.processes import destroy_process_group, get_rank, run_on_rank0


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
