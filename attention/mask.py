"""The attention mask as a rule instead of a matrix.

Shapes: ``B`` sequences, ``T`` queries, ``S`` keys. The rule ``see(b, t, s)`` is true where all of
the following conditions are met, with the query's position ``p = offset + t`` counted in key slots:

* causal: ``s <= p``;
* window ``w``, of causal queries only: ``p - s < w``, so a query sees the last ``w`` keys;
* left and right padding: ``starts[b] <= s < lengths[b]``.

Boolean masks are created only for blocks of rows, so memory is linear in ``S``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.checks import expect_dtype_and_device, expect_positive, expect_shape


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees, as a rule instead of a matrix: causal or not, query offset,
    window, and the slots from ``starts [B]`` to before ``lengths [B]`` that are not padding (None:
    all).
    """

    causal: bool = True
    offset: int = 0
    window: int | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def padded(self) -> bool:
        """True if some slots are padding."""
        return self.starts is not None or self.lengths is not None

    def sees_all(self, queries: int, keys: int) -> bool:
        """True if each of ``queries`` queries sees each of ``keys`` keys."""
        near = not self.causal or self.offset >= keys - 1
        far = self.window is None or self.offset + queries <= self.window
        return not self.padded and near and far

    def find_key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Return the bounds ``low, high`` of the keys ``low .. high - 1`` that queries ``first ..
        last - 1`` may see.
        """
        # hidden keys inside the range are masked; those outside are never read
        low = 0
        high = keys
        if self.causal:
            high = min(high, self.offset + last)
        if self.window is not None:
            low = min(keys, max(low, self.offset + first - self.window + 1))
        return low, max(low, high)

    def make_mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return a boolean mask ``[B or 1, rows, width]`` (True means visible) for a range of
        queries and a range of keys.
        """
        slots = torch.arange(keys.start, keys.stop, device=device)
        positions = torch.arange(queries.start, queries.stop, device=device)[:, None] + self.offset
        seen = slots <= positions
        if not self.causal:
            seen = torch.ones_like(seen)
        if self.window is not None:
            seen = seen & (positions - slots < self.window)
        seen = seen[None]
        if self.starts is not None:
            seen = seen & (slots >= self.starts[:, None, None])
        if self.lengths is not None:
            seen = seen & (slots < self.lengths[:, None, None])
        return seen


def check_mask_arguments(
    query: Tensor,
    keys: int,
    causal: bool,
    offset: int | None,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
) -> Visibility:
    """Check the mask arguments of an attention call for ``query [B, H, T, D]``, and return the
    `Visibility` that they describe.

    ``offset=None`` aligns the last query with the last of the ``keys`` keys, as in decoding with a
    cache. Raises ValueError for arguments that do not fit the queries and keys.
    """
    queries = query.shape[2]
    if window is not None:
        expect_positive("window", window)
        if not causal:
            raise ValueError(f"window is {window}; with causal=False, it must be None")
    for name, slots in (("starts", starts), ("lengths", lengths)):
        if slots is None:
            continue
        expect_shape(name, slots, "B", {"B": len(query)})
        expect_dtype_and_device(name, slots, "query", query, dtype=False)
        if slots.is_floating_point():
            raise ValueError(f"{name} has dtype {slots.dtype}; it must be torch.int64")
    # else the positions of queries among the keys do not matter
    if not causal:
        return Visibility(causal, 0, window, starts, lengths)
    # a query past the last key would see the wrong window
    last = keys - queries
    offset = last if offset is None else offset
    if not 0 <= offset <= last:
        raise ValueError(f"offset is {offset}; with causal, it must be 0 to S - T = {last}")
    return Visibility(causal, offset, window, starts, lengths)
