"""Work that the first process of a distributed run does while the others wait."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from kvfold.convert.errors import KvfoldError

_LONGEST_WORK = timedelta(hours=24)  # a process that dies is noticed at once: its connection closes

Result = TypeVar("Result")


def run_on_first(work: Callable[[], Result]) -> Result | None:
    """Call ``work`` on the first process; the others return None when it is done. Every process must call this.

    The wait has a process group of its own, so that it may last hours while the collectives of the training keep the
    short timeout that reveals a hung process. Every process raises the KvfoldError of the first one.
    """
    if not dist.is_initialized():
        return work()
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WORK)
    result: Result | None = None
    failure: list[KvfoldError | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = work()
        except KvfoldError as error:
            failure = [error]
    dist.broadcast_object_list(failure, src=0, group=group)
    dist.destroy_process_group(group)
    if failure[0] is not None:
        raise failure[0]
    return result


def leave_processes() -> None:
    """Close the connections to the other processes at the end of a run; every process calls this.

    Threads of gloo that still wait when the interpreter ends would abort the process after all its work.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
