"""Runs of several processes started by ``torchrun``: work done once on the first process, shares of
work, and sums.

Single-process runs make the same calls, which then need no communication and import nothing.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.errors import InputError, KvfoldError, first_line, one_line, opt

if TYPE_CHECKING:
    from torch import Tensor

# Long, because the first process may work for hours; a dead process is noticed at once by its
# closed connection.
_LONGEST_WORK = timedelta(hours=24)
# Short, because the others must end within a minute if a process never connects.
_CONNECTION = timedelta(seconds=50)

Answer = TypeVar("Answer")
Items = TypeVar("Items", "list[int]", "Tensor")


def _distributed() -> Any:
    """``torch.distributed`` if it connects this process to others, otherwise None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def count(on_this_machine: bool = False) -> int:
    """The number of processes in this run, in total or on this machine."""
    dist = _distributed()
    if dist is not None and on_this_machine:
        return environment_number("LOCAL_WORLD_SIZE", 1)
    return 1 if dist is None else int(dist.get_world_size())


def rank() -> int:
    """The rank of this process, starting at 0."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def is_first() -> bool:
    return rank() == 0


def started_first() -> bool:
    """True if this process has rank 0 or no ``torchrun`` started it; works before the processes
    connect.
    """
    return os.environ.get("RANK", "0") == "0"


def environment_number(name: str, default: int) -> int:
    """The whole number that ``torchrun`` set as the environment variable ``name``. InputError if it
    is none.
    """
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(
            f"torchrun: {name}={text!r} must be a whole number; unset it, or start with torchrun"
        )
    return int(text)


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Connect the processes that ``torchrun`` started during the block, by gloo, and between GPUs
    also by nccl.

    Unless ``device`` is "cpu", each process uses the GPU whose index is its local rank. Raises
    InputError if a machine has fewer GPUs than processes, KvfoldError if the processes do not
    connect within 50 seconds.
    """
    size = environment_number("WORLD_SIZE", 1)
    if size < 2:
        yield
        return
    if environment_number("RANK", 0) >= size:
        raise InputError(
            f"torchrun: RANK={os.environ['RANK']} must be below WORLD_SIZE={size}; start all by"
            " torchrun"
        )
    environment_number("MASTER_PORT", 0)
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        local = environment_number("LOCAL_RANK", 0)
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise InputError(
                f"torchrun: process {local + 1} on this machine needs its own GPU, but torch finds"
                f" only {gpus}; use --nproc-per-node {gpus}, or {opt('device', 'cpu')}"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        # The rendezvous waits for all processes; later the others may wait for hours while the
        # first one works.
        store, number, size = next(rendezvous("env://", timeout=_CONNECTION))
        dist.init_process_group(
            backend, store=store, rank=number, world_size=size, timeout=_LONGEST_WORK
        )
    except (RuntimeError, ValueError) as error:
        seconds = f"{_CONNECTION.total_seconds():g} s"
        raise KvfoldError(
            f"torchrun: not all {os.environ['WORLD_SIZE']} processes connected within {seconds}"
            f" ({one_line(error)}); start all of them, and check that every machine can reach the"
            " address and port of the first process"
        ) from error
    try:
        yield
    finally:
        leave_processes()


def leave_processes() -> None:
    """Close the connections to the other processes at the end of a run; every process calls this."""
    # gloo threads that are still waiting when the interpreter exits would abort the process after
    # its work.
    if (dist := _distributed()) is not None:
        dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """Turn a failed exchange into a KvfoldError that says that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise KvfoldError(
            f"another process of this run has ended ({first_line(error)[:200]}); see its error"
            " above or in its log, then run the same command again"
        ) from error


def run_on_first(work: Callable[[], Answer]) -> Answer | None:
    """Run ``work`` in the first process and return its result there; all others wait, for hours if
    need be: None.
    """
    if (dist := _distributed()) is None:
        return work()
    # The collectives in training keep the short timeout that reveals a hung process.
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WORK)
    done: list[Answer] = []
    from_first(lambda: done.append(work()), group)
    dist.destroy_process_group(group)
    return done[0] if done else None


def from_first(work: Callable[[], Answer], group: Any = None) -> Answer:
    """Call ``work`` on the first process and return its result, or raise its KvfoldError, on every
    process.

    Every process must call this, and waits in the process group ``group``.
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
    result: Answer = outcome[0]
    return result


def gathered(value: Answer) -> list[Answer]:
    """The ``value`` of every process, ordered by rank. Every process must call this."""
    if (dist := _distributed()) is None:
        return [value]
    # Gathers objects instead of using a barrier, because an nccl barrier would need a GPU.
    values: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(values, value)
    return values


def add_up(tensors: Iterable["Tensor"]) -> None:
    """Replace each tensor by its sum over all processes, with identical bytes on each process."""
    if (dist := _distributed()) is not None:
        with _connected():
            for tensor in tensors:
                dense = tensor.contiguous()
                dist.all_reduce(dense)
                if dense is not tensor:
                    tensor.copy_(dense)


def first_rows(rows: "Tensor", limit: int) -> "Tensor":
    """The first ``limit`` of all processes' ``rows [n, ...]``, concatenated in rank order."""
    if _distributed() is None:
        return rows[:limit]
    import torch

    # Gathered as objects: the tensors' own gather would need equally many rows from each process.
    return torch.cat(gathered(rows[:limit].cpu()))[:limit].to(rows.device)


def part(number: int) -> range:
    """This process's share of ``number`` items: a contiguous range, with sizes that differ by at
    most 1.
    """
    mine = rank()
    size = count()
    return range(number * mine // size, number * (mine + 1) // size)


def own(items: Items) -> Items:
    """This process's share of a list, or of the rows of a tensor."""
    share = part(len(items))
    return items[share.start : share.stop]
