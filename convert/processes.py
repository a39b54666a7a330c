"""What the processes of one uptraining, started by ``torchrun`` or ``accelerate launch``, share.

A run of one process makes the same calls, which then need no communication.
"""

import os
import sys
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


def _get_distributed() -> Any:
    """Return the module ``torch.distributed`` if it connects this process to others, or None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def destroy_process_group() -> None:
    """Close the connections to the other processes; every process calls this at its end."""
    # gloo threads that are still waiting when the interpreter exits would abort the process after
    # its work.
    if (dist := _get_distributed()) is not None:
        dist.destroy_process_group()


def run_on_rank0(work: Callable[[], Result]) -> Result | None:
    """Call ``work`` on rank 0 and return its result there; the others wait, hours if need be."""
    results: list[Result] = []
    broadcast_from_rank0(lambda: results.append(work()))
    return results[0] if results else None


def broadcast_from_rank0(work: Callable[[], Result]) -> Result:
    """Call ``work`` on rank 0; every process, all of which must call this, returns its result or
    raises its KvfoldError.
    """
    if (dist := _get_distributed()) is None:
        return work()
    outcome: list[Any] = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except KvfoldError as error:
            outcome[1] = error
    try:
        dist.broadcast_object_list(outcome, src=0)
    except RuntimeError as error:
        raise KvfoldError(
            f"another process of this run has ended ({summarize_error(error, 200)}); see its error"
            " above or in its log, then run the same command again"
        ) from error
    if outcome[1] is not None:
        raise outcome[1]
    return cast(Result, outcome[0])
