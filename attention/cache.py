"""Caches that store exactly what each attention variant needs.

Shapes: ``B`` sequences, ``C`` slots of capacity, ``G`` key/value heads, ``D`` head dim, ``R``
latent rank, ``P`` rotary dims. Each layer has its own cache object; slot ``s`` stores the ``s``-th
token of every sequence. Pad the shorter sequences of a batch on the left, and pass ``starts=`` to
the attention. Caches are for inference: they reject tensors that require a gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.checks import expect_dtype_and_device

# growing copies at most three tokens per token held, however long the cache becomes
_GROWTH = 1.5


class SlotCache:
    """Base class of key/value caches: buffers ``[B, ..., C, width]`` with one slot per token, which
    grow when all slots are in use.
    """

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.buffers = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.length = 0

    @property
    def capacity(self) -> int:
        """The number of tokens per sequence that fit before the buffers grow."""
        return self.buffers[0].shape[-2]

    @property
    def nbytes(self) -> int:
        """The size in bytes of the slots in use, over all sequences of the batch."""
        return sum(buffer[..., : self.length, :].nbytes for buffer in self.buffers)

    def _append_tokens(self, **tokens: Tensor) -> tuple[Tensor, ...]:
        """Write new tokens, each tensor ``[B, ..., T, width]``, behind the cached ones. Returns all
        tokens so far, ``[B, ..., length, width]`` each.
        """
        count = next(iter(tokens.values())).shape[-2]
        for (name, token), buffer in zip(tokens.items(), self.buffers, strict=True):
            shape = [*buffer.shape[:-2], count, buffer.shape[-1]]
            if list(token.shape) != shape:
                raise ValueError(f"{name} has shape {list(token.shape)}; it must be {shape}")
            expect_dtype_and_device(name, token, "the cache", buffer)
            if token.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient, which caches do not support; use torch.no_grad()"
                )
        needed = self.length + count
        if needed > self.capacity:
            # zeros: padding that no token overwrites has no weight, but what memory held before may
            # be no number
            more = max(needed, math.ceil(_GROWTH * self.capacity)) - self.capacity
            self.buffers = tuple(nn.functional.pad(x, (0, 0, 0, more)) for x in self.buffers)
        for token, buffer in zip(tokens.values(), self.buffers, strict=True):
            buffer[..., self.length : needed, :] = token
        self.length = needed
        return tuple(buffer[..., :needed, :] for buffer in self.buffers)


class KVCache(SlotCache):
    """A cache of one layer's keys ``[B, G, C, D]`` and values ``[B, G, C, Dv]``; ``G = H`` for MHA,
    ``G = 1`` for MQA.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int = 0,
        *,
        value_dim: int | None = None,
        **options: Any,
    ) -> None:
        """Create an empty cache; ``options`` are ``dtype`` (float32 by default) and ``device``."""
        widths = (head_dim, head_dim if value_dim is None else value_dim)
        super().__init__([(batch, kv_heads, capacity, width) for width in widths], **options)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Append ``key [B, G, T, D]`` and ``value [B, G, T, Dv]``; return all cached keys and
        values so far.

        The results are ``[B, G, length, D]`` and ``[B, G, length, Dv]``.
        """
        return self._append_tokens(key=key, value=value)


class LatentCache(SlotCache):
    """A cache of one layer's latents and rotary keys, concatenated in one buffer ``[B,
    C, R + P]``.
    """

    def __init__(
        self, batch: int, kv_rank: int, rope_dim: int, capacity: int = 0, **options: Any
    ) -> None:
        """Create an empty cache; ``options`` are ``dtype`` (float32 by default) and ``device``."""
        super().__init__([(batch, capacity, kv_rank + rope_dim)], **options)

    def append(self, latent: Tensor) -> Tensor:
        """Append ``latent [B, T, R + P]``, whose rotary keys are already rotated; return all cached
        tokens so far, ``[B, length, R + P]``.
        """
        return self._append_tokens(latent=latent)[0]
