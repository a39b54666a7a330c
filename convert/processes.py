"""Several processes of one run, as ``torchrun`` starts them: what the first one does for all, shares, and sums.

A run of one process goes through the same calls, which then do nothing and import nothing.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.errors import InputError, KvfoldError, first_line, one_line, opt

if TYPE_CHECKING:
    from torch import Tensor

# Long, because the first process may convert for hours; one that dies is noticed at once: its connection closes.
_LONGEST_WORK = timedelta(hours=24)
# Short, because a process that never comes must end the others within a minute.
_CONNECTION = timedelta(seconds=50)

Result = TypeVar("Result")


def _distributed() -> Any:
    """``torch.distributed`` where it connects this process with others, None where it is alone."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def count(on_this_machine: bool = False) -> int:
    """The number of processes of this run, in all or on this machine."""
    dist = _distributed()
    if dist is not None and on_this_machine:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if dist is None else int(dist.get_world_size())


def rank() -> int:
    """The number of this process, from 0."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def is_first() -> bool:
    return rank() == 0


def started_first() -> bool:
    """True if ``torchrun`` started this process as the first, or did not start it: known before they connect."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Connects the processes that ``torchrun`` started, if it did, for the block: gloo, and nccl between GPUs.

    ``device`` is the request's: each process takes the GPU of its number on its machine. Raises InputError where a
    machine has fewer, KvfoldError where the processes do not find each other within 50 seconds.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise InputError(
                f"torchrun: {gpus} GPUs are too few for process {local + 1} of this machine, each takes one; lower "
                f"--nproc-per-node, or use {opt('device', 'cpu')}"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        # The rendezvous waits for everyone; afterwards the others wait for hours of work of the first one.
        store, number, size = next(rendezvous("env://", timeout=_CONNECTION))
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=_LONGEST_WORK)
    except (RuntimeError, ValueError) as error:
        seconds = f"{_CONNECTION.total_seconds():g} s"
        raise KvfoldError(
            f"torchrun: not all {os.environ['WORLD_SIZE']} processes connected within {seconds} ({one_line(error)}); "
            "start them on every machine, and check that the first one's address and port can be reached"
        ) from error
    try:
        yield
    finally:
        leave_processes()


def leave_processes() -> None:
    """Close the connections to the other processes at the end of a run; every process calls this."""
    # Threads of gloo that still wait when the interpreter ends would abort the process after all its work.
    if (dist := _distributed()) is not None:
        dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """Turns a failed exchange into a KvfoldError: another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise KvfoldError(
            "another process of this run has ended, its error is above or in its own log "
            f"({first_line(error)[:200]}); run it again"
        ) from error


def run_on_first(work: Callable[[], Result]) -> Result | None:
    """Call ``work`` on the first process; the others return None when it is done. Every process must call this.

    Every process raises the KvfoldError of the first one.
    """
    if (dist := _distributed()) is None:
        return work()
    # The wait may last hours, while the collectives of a training keep the short timeout that reveals a hung process.
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WORK)
    done: list[Result] = []
    from_first(lambda: done.append(work()), group)
    dist.destroy_process_group(group)
    return done[0] if done else None


def from_first(work: Callable[[], Result], group: Any = None) -> Result:
    """Call ``work`` on the first process, and return its result on every one; every process must call this.

    ``group``: the process group to wait in. Every process raises the KvfoldError of the first one.
    """
    if (dist := _distributed()) is None:
        return work()
    outcome: list[Any] = [None, None]  # result, failure
    if is_first():
        try:
            outcome = [work(), None]
        except KvfoldError as error:
            outcome = [None, error]
    with _connected():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    result: Result = outcome[0]
    return result


def gathered(value: Result) -> list[Result]:
    """The ``value`` of every process, in the order of their numbers, when every one has called this."""
    if (dist := _distributed()) is None:
        return [value]
    # Objects rather than a barrier: one of nccl would take a GPU, which a process on CPUs does not have.
    values: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(values, value)
    return values


def add_up(tensors: Iterable["Tensor"]) -> None:
    """Replace each tensor by its sum over the processes; the same bytes on each of them."""
    if (dist := _distributed()) is not None:
        with _connected():
            for tensor in tensors:
                dense = tensor.contiguous()
                dist.all_reduce(dense)
                if dense is not tensor:
                    tensor.copy_(dense)


def total(*values: float) -> list[float]:
    """The sums of numbers over the processes, in float64."""
    if _distributed() is None:
        return list(values)
    import torch

    sums = torch.tensor(values, dtype=torch.float64)
    add_up([sums])
    result: list[float] = sums.tolist()
    return result


def first_rows(rows: "Tensor", limit: int) -> "Tensor":
    """The first ``limit`` of the ``rows [n, ...]`` of all processes, the first one's first."""
    if _distributed() is None:
        return rows[:limit]
    lengths = gathered(min(len(rows), limit))
    start = min(limit, sum(lengths[: rank()]))
    mine = rows[: limit - start]
    # A sum of rows and zeros, the same bytes everywhere, where a gather would need rows of one length.
    together = rows.new_zeros(min(limit, sum(lengths)), *rows.shape[1:])
    together[start : start + len(mine)] = mine
    add_up([together])
    return together


def part(number: int) -> range:
    """This process's share of ``number`` things: neighbors, evenly many."""
    mine, size = rank(), count()
    return range(number * mine // size, number * (mine + 1) // size)
