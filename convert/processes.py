"""Runs of several processes started by ``torchrun``, in the words of ``torch.distributed``.

A run of one process makes the same calls, which then need no communication and import nothing.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvfold.convert.errors import InputError, KvfoldError, summarize_error

if TYPE_CHECKING:
    from torch import Tensor

# Rank 0 may work for hours; a dead process is noticed at once by its closed connection.
LONGEST_WORK = timedelta(hours=24)
_CONNECTION_SECONDS = 50  # within a minute all end if one never connects

Result = TypeVar("Result")
Items = TypeVar("Items", "list[int]", "Tensor")


def _get_distributed() -> Any:
    """The module ``torch.distributed`` if it connects this process to others, otherwise None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def world_size() -> int:
    """The number of processes in this run."""
    dist = _get_distributed()
    return 1 if dist is None else int(dist.get_world_size())


def get_rank() -> int:
    """The rank of this process, starting at 0."""
    dist = _get_distributed()
    return 0 if dist is None else int(dist.get_rank())


def is_rank0() -> bool:
    """True in the process of rank 0, and in a run of one process."""
    return get_rank() == 0


def launched_as_rank0() -> bool:
    """True if ``torchrun`` gave this process rank 0, or if there is no ``torchrun``. Unlike
    `is_rank0`, it may be called before the processes are connected.
    """
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def connect_processes(device: str) -> Iterator[None]:
    """Connect the processes that ``torchrun`` started while the context lasts, by gloo, and between
    GPUs also by nccl.

    Unless ``device`` is "cpu", each process uses the GPU whose index is its local rank. Raises
    InputError if a machine has fewer GPUs than processes, KvfoldError if the processes do not
    connect within 50 seconds.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        gpu = int(os.environ.get("LOCAL_RANK", "0"))
        if gpu >= torch.cuda.device_count():
            raise InputError(
                f"torchrun: process {gpu + 1} on this machine has no GPU of its own; use a smaller"
                " --nproc-per-node, or --device cpu"
            )
        torch.cuda.set_device(gpu)
        backend = "cpu:gloo,cuda:nccl"
    try:
        timeout = timedelta(seconds=_CONNECTION_SECONDS)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WORK
        )
    except (RuntimeError, ValueError) as error:
        raise KvfoldError(
            f"torchrun: not all {size} processes connected within {_CONNECTION_SECONDS} s"
            f" ({summarize_error(error)}); start all of them, and check that every machine can"
            " reach the address and port of the first process"
        ) from error
    try:
        yield
    finally:
        destroy_process_group()


def destroy_process_group() -> None:
    """Close the connections to the other processes; every process calls this at its end."""
    # gloo threads that are still waiting when the interpreter exits would abort the process after
    # its work.
    if (dist := _get_distributed()) is not None:
        dist.destroy_process_group()


@contextmanager
def _translate_communication_errors() -> Iterator[None]:
    """Turn a failed exchange between processes into a KvfoldError that says that another process
    has ended.
    """
    try:
        yield
    except RuntimeError as error:
        raise KvfoldError(
            f"another process of this run has ended ({summarize_error(error, 200)}); see its error"
            " above or in its log, then run the same command again"
        ) from error


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
    if is_rank0():
        try:
            outcome[0] = work()
        except KvfoldError as error:
            outcome[1] = error
    with _translate_communication_errors():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(Result, outcome[0])


def all_gather(value: Result) -> list[Result]:
    """The ``value`` of every process, ordered by rank. Every process must call this."""
    if (dist := _get_distributed()) is None:
        return [value]
    # Gathers objects instead of using a barrier, because an nccl barrier would need a GPU.
    values: list[Any] = [None] * world_size()
    with _translate_communication_errors():
        dist.all_gather_object(values, value)
    return values


def all_reduce(tensors: Iterable["Tensor"]) -> None:
    """Replace each tensor by its sum over all processes, with identical bytes on each process."""
    if (dist := _get_distributed()) is None:
        return
    with _translate_communication_errors():
        for tensor in tensors:
            dense = tensor.contiguous()
            dist.all_reduce(dense)
            if dense is not tensor:
                tensor.copy_(dense)


def get_process_range(number: int) -> range:
    """The share of ``number`` items that this process works on, as a contiguous range; the sizes of
    shares differ by at most 1.
    """
    start, stop = (number * rank // world_size() for rank in (get_rank(), get_rank() + 1))
    return range(start, stop)


def select_process_share(items: Items) -> Items:
    """The part of a list, or of the rows of a tensor, that this process works on."""
    share = get_process_range(len(items))
    return items[share.start : share.stop]
