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

from kvfold.attention.checks import expect_alike, expect_at_least, expect_shape


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
        """True if the rule may differ between sequences; a query may then see no key at all."""
        return (
            isinstance(self.offset, Tensor) or self.starts is not None or self.lengths is not None
        )

    @property
    def hides_keys(self) -> bool:
        """True if some query may not see some key."""
        return self.causal or self.window is not None or self.ragged

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
            return low, high
        if self.causal:
            high = min(high, self.offset + last)
        elif self.window is not None:
            high = min(high, self.offset + last - 1 + self.window)
        if self.window is not None:
            low = min(keys, max(low, self.offset + first - self.window + 1))
        return low, max(low, high)

    def block(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """``see`` for a range of queries and one of keys: bool, ``[B or 1, rows, width]``."""
        slots = torch.arange(keys.start, keys.stop, device=device)
        offset = self.offset[:, None, None] if isinstance(self.offset, Tensor) else self.offset
        positions = torch.arange(queries.start, queries.stop, device=device)[:, None] + offset
        if self.causal:
            seen = slots <= positions
        else:
            seen = torch.ones_like(positions + slots, dtype=torch.bool)
        if self.window is not None:
            seen = seen & ((positions - slots).abs() < self.window)
        if self.starts is not None:
            seen = seen & (slots >= self.starts[:, None, None])
        if self.lengths is not None:
            seen = seen & (slots < self.lengths[:, None, None])
        return seen if seen.dim() == 3 else seen[None]


def visibility(
    query: Tensor,
    keys: int,
    *,
    causal: bool,
    offset: int | Tensor | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> Visibility:
    """Check a caller's mask arguments for ``query [B, H, T, D]`` and return their rule.

    ``offset=None`` aligns the last query with the last of the ``keys`` keys, as in decoding with a
    cache. Raises ValueError for arguments that do not fit the queries and keys.
    """
    batch, _, queries, _ = query.shape
    if window is not None:
        expect_at_least("window", window, 1)
    for name, counts in (
        ("starts", starts),
        ("lengths", lengths),
        ("offset", offset),
    ):
        if isinstance(counts, Tensor):
            expect_shape(name, counts, "B", {"B": batch})
            expect_alike(name, counts, "query", query, dtype=False)
            if counts.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} has dtype {counts.dtype}; it must be torch.int64 or torch.int32"
                )
    if isinstance(offset, Tensor):
        return Visibility(causal, offset, window, starts, lengths)
    # without either, the positions of queries among the keys do not matter
    has_positions = causal or window is not None
    if offset is None:
        offset = keys - queries if has_positions else 0
        if offset < 0:
            raise ValueError(
                f"key has S = {keys} keys; causal or windowed queries need at least T = {queries}"
            )
    expect_at_least("offset", offset, 0)
    # a query past the last key would see the wrong window
    if has_positions and offset + queries > keys:
        raise ValueError(
            f"offset is {offset}; with causal or window, it must be at most S - T ="
            f" {keys - queries}"
        )
    return Visibility(causal, offset, window, starts, lengths)
