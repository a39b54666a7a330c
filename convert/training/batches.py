"""The order in which training takes sequences."""

from collections.abc import Iterator

import torch


def random_batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of ``size`` of the numbers below ``count``, in a new random order every time that all have been used.

    Fewer than ``size`` that are left over wait for the next order; a batch is never larger than ``count``.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(size, count)
    while True:
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))
