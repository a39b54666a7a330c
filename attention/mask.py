"""The attention mask as a rule instead of a matrix.

Shapes: ``B`` sequences, ``T`` queries, ``S`` keys. The rule ``see(b, t, s)`` is true where all of
the following conditions are met, with the query's position ``p = offset[b] + t`` counted in key
slots:

* causal: ``s <= p``;
* window ``w``: ``p - s < w`` (and ``s - p < w`` without ``causal``), so a causal query sees the
  last ``w`` keys;
* padding: ``starts[b] <= s < lengths[b]``.

Boolean masks are created only for blocks of rows, so memory is linear in ``S``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.checks import expect_at_least, expect_counts


@dataclass(frozen=True)
class Visibility:
    """The rule above; ``starts`` and ``lengths`` are ``[B]`` or None, ``offset`` is an integer or a
    tensor ``[B]``.
    """

    causal: bool = True
    offset: int | Tensor = 0
    window: int | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def ragged(self) -> bool:
        """True if the rule may differ between sequences of the batch; a query may then see no key
        at all.
        """
        return (
            self.starts is not None or self.lengths is not None or isinstance(self.offset, Tensor)
        )

    def sees_all(self, queries: int, keys: int) -> bool:
        """True if every query sees every key."""
        if self.ragged or isinstance(self.offset, Tensor):
            return False
        first = self.offset
        last = self.offset + queries - 1
        near = not self.causal or first >= keys - 1
        far = self.window is None or (
            last < self.window and (self.causal or keys - first <= self.window)
        )
        return near and far

    def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Bounds ``low, high`` of the keys ``low .. high - 1`` that queries ``first .. last - 1``
        may see.
        """
        # hidden keys inside the range are masked; those outside are never read
        low = 0
        high = keys
        if isinstance(self.offset, Tensor):
            # reading the bounds from a device would wait for it
            if self.offset.device.type != "cpu":
                return low, high
            begin = int(self.offset.min())
            end = int(self.offset.max())
        else:
            begin = end = self.offset
        if self.causal:
            high = min(high, end + last)
        elif self.window is not None:
            high = min(high, end + last - 1 + self.window)
        if self.window is not None:
            low = max(low, begin + first - self.window + 1)
        return min(low, keys), max(min(low, keys), high)

    def block(self, first: int, last: int, low: int, high: int, device: torch.device) -> Tensor:
        """``see`` for queries ``first .. last - 1`` and keys ``low .. high - 1``: bool, ``[B or 1,
        rows, width]``.
        """
        keys = torch.arange(low, high, device=device)
        offset = self.offset[:, None, None] if isinstance(self.offset, Tensor) else self.offset
        places = torch.arange(first, last, device=device)[None, :, None] + offset
        seen = keys <= places if self.causal else torch.ones_like(keys + places, dtype=torch.bool)
        if self.window is not None:
            seen = seen & ((places - keys).abs() < self.window)
        if self.starts is not None:
            seen = seen & (keys >= self.starts[:, None, None])
        if self.lengths is not None:
            seen = seen & (keys < self.lengths[:, None, None])
        return seen


def visibility(
    like: Tensor,
    keys: int,
    *,
    causal: bool,
    offset: int | Tensor | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> Visibility:
    """Check a caller's mask arguments and return their rule. ``like [B, H, T, D]`` is the query
    tensor.

    ``offset=None`` aligns the last query with the last of the ``keys`` keys, as in decoding with a
    cache. Raises ValueError for arguments that do not fit the queries and keys.
    """
    batch, _, queries, _ = like.shape
    # without either, the positions of queries among the keys do not matter
    placed = causal or window is not None
    if window is not None:
        expect_at_least("window", window, 1)
    expect_counts("starts", starts, batch, "query", like)
    expect_counts("lengths", lengths, batch, "query", like)
    if isinstance(offset, Tensor):
        expect_counts("offset", offset, batch, "query", like)
    else:
        if offset is None:
            offset = keys - queries if placed else 0
            if offset < 0:
                raise ValueError(
                    f"key has S = {keys} keys; causal or windowed queries need at least T ="
                    f" {queries}"
                )
        expect_at_least("offset", offset, 0)
        # a query past the last key would see the wrong window
        if placed and offset + queries > keys:
            raise ValueError(
                f"offset is {offset}; with causal or window, it must be at most S - T ="
                f" {keys - queries}"
            )
    return Visibility(causal, offset, window, starts, lengths)
