"""What the processes of one uptraining, started by ``torchrun`` or ``accelerate launch``, share.

A run of one process makes the same calls, which then need no communication.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from kvfold.convert.errors import KvfoldError, summarize_error

# Rank 0 may work for hours; a dead process is noticed at once by its closed connection.
LONGEST_WORK = timedelta(hours=24)

Result = TypeVar("Result")


def count_launched() -> int:
    """Return the number of processes that ``torchrun`` started, or 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_as_rank0() -> bool:
    """True if ``torchrun`` gave this process rank 0, or if there is no ``torchrun``."""
    return os.environ.get("RANK", "0") == "0"


def destroy_process_group() -> None:
    """Close the connections to the other processes, if any; every process calls this at its end."""
    import torch.distributed as dist

    # gloo threads that are still waiting when the interpreter exits would abort the process after
    # its work.
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def broadcast_from_rank0(work: Callable[[], Result]) -> Result:
    """Call ``work`` on rank 0, while the others wait, hours if need be; every process, all of which
    must call this, returns its result or raises its KvfoldError.
    """
    if count_launched() == 1:
        return work()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]  # result, error
    if launched_as_rank0():
        try:
            outcome[0] = work()
        except KvfoldError as error:
            outcome[1] = error
    try:
        dist.broadcast_object_list(outcome, src=0)
    except RuntimeError as error:
        raise KvfoldError(
            f"another process of this run has ended ({summarize_error(error)}); see its error"
            " above or in its log, then run the same command again"
        ) from error
    if outcome[1] is not None:
        raise outcome[1]
    return cast(Result, outcome[0])
