"""The loss at each distance from the beginning of a text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FIRST = 64  # tokens of the first stretch; each further one is as long as all before it


@torch.no_grad()
def token_losses(model: Any, tokens: Tensor, advance: Callable[[int], None] = lambda amount: None) -> Tensor:
    """Negative log-likelihood of every token of ``tokens [N, T]`` but each row's first, ``[N, T - 1]``, nats.

    One row at a time: its logits are in memory whole, T x vocabulary in float32. ``advance(1)`` after each.
    """
    rows = []
    for row in tokens:
        logits = model(input_ids=row[None].to(model.device)).logits[0, :-1].float()
        rows.append(torch.nn.functional.cross_entropy(logits, row[1:].to(logits.device), reduction="none").cpu())
        advance(1)
    return torch.stack(rows)


def stretches(length: int) -> list[tuple[int, int]]:
    """Positions 1 to ``length`` in stretches that double: (1, 64), (64, 128), (128, 256), ..."""
    ends = [_FIRST]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return list(zip([1, *ends[:-1]], [min(end, length) for end in ends], strict=True))
