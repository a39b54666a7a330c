"""Caches that store exactly what each attention variant needs, and their size in bytes.

Shapes: ``B`` sequences, ``C`` slots of capacity, ``G`` key/value heads, ``D`` head dim, ``R``
latent rank, ``P`` rotary dims. Each layer has its own cache object; slot ``s`` stores the ``s``-th
token of every sequence. Pad the shorter sequences of a batch on the left, and pass ``starts=`` to
the attention. Caches are for inference: they reject tensors that require a gradient.
"""

import math
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from kvfold.attention.checks import expect_alike, expect_at_least, expect_shape

Variant = Literal["mha", "gqa", "mqa", "mla"]
# growing copies at most three tokens per token held, however long the cache becomes
_GROWTH = 1.5


class CacheOptions(TypedDict, total=False):
    """``growing`` (the default) allocates more slots when all are in use, instead of an error;
    float32 by default.
    """

    growing: bool
    dtype: torch.dtype
    device: torch.device | str | None


class SlotCache:
    """Buffers ``[B, ..., C, width]`` filled slot by slot; ``KVCache`` and ``LatentCache`` define
    what a slot stores.
    """

    def __init__(self, shapes: list[tuple[int, ...]], **options: Unpack[CacheOptions]) -> None:
        self.growing = options.get("growing", True)
        self.batch = shapes[0][0]
        self.capacity = shapes[0][-2]
        expect_at_least("capacity", self.capacity, 0)
        dtype = options.get("dtype", torch.float32)
        device = options.get("device")
        self.buffers = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use (``length`` per sequence), the same number that ``cache_bytes``
        computes.
        """
        return sum(
            b.numel() // max(1, self.capacity) * self.length * b.element_size()
            for b in self.buffers
        )

    def _append(self, **tokens: Tensor) -> tuple[Tensor, ...]:
        """Write ``tokens``, each ``[B, ..., T, width]``; return the slots in use, ``[B, ...,
        length, width]`` each.
        """
        for (name, token), buffer in zip(tokens.items(), self.buffers, strict=True):
            expect_alike(name, token, "the cache", buffer)
            if token.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient, which caches do not support; use torch.no_grad()"
                )
        needed = self.length + next(iter(tokens.values())).shape[-2]
        if needed > self.capacity:
            if not self.growing:
                raise ValueError(
                    f"capacity is {self.capacity}; it must be at least {needed}, or use"
                    " growing=True"
                )
            self.capacity = max(needed, math.ceil(_GROWTH * self.capacity))
            old = self.buffers
            # zeros: padding that no token overwrites has no weight, but what memory held before may
            # be no number
            self.buffers = tuple(
                buffer.new_zeros(*buffer.shape[:-2], self.capacity, buffer.shape[-1])
                for buffer in old
            )
            for before, after in zip(old, self.buffers, strict=True):
                after[..., : self.length, :] = before[..., : self.length, :]
        for token, buffer in zip(tokens.values(), self.buffers, strict=True):
            buffer[..., self.length : needed, :] = token
        self.length = needed
        return tuple(buffer[..., :needed, :] for buffer in self.buffers)


class KVCache(SlotCache):
    """Keys ``[B, G, C, D]`` and values ``[B, G, C, Dv]`` of one layer; ``G = H`` for MHA, ``G = 1``
    for MQA.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int = 0,
        *,
        value_dim: int | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        for name, size in (
            ("batch", batch),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ):
            expect_at_least(name, size, 1)
        widths = (head_dim, head_dim if value_dim is None else value_dim)
        super().__init__([(batch, kv_heads, capacity, width) for width in widths], **options)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``key [B, G, T, D]`` and ``value [B, G, T, Dv]``; return all keys and values so
        far.

        The results are ``[B, G, length, D]`` and ``[B, G, length, Dv]``.
        """
        keys, values = self.buffers
        expect_shape(
            "key",
            key,
            "B G T D",
            {"B": keys.shape[0], "G": keys.shape[1], "D": keys.shape[3]},
        )
        sizes = {
            "B": keys.shape[0],
            "G": keys.shape[1],
            "T": key.shape[2],
            "Dv": values.shape[3],
        }
        expect_shape("value", value, "B G T Dv", sizes)
        keys, values = self._append(key=key, value=value)
        return keys, values


class LatentCache(SlotCache):
    """The latents and rotary keys of one layer, concatenated: ``[B, C, R + P]``."""

    def __init__(
        self,
        batch: int,
        kv_rank: int,
        rope_dim: int,
        capacity: int = 0,
        **options: Unpack[CacheOptions],
    ) -> None:
        for name, size, minimum in (
            ("batch", batch, 1),
            ("kv_rank", kv_rank, 1),
            ("rope_dim", rope_dim, 0),
        ):
            expect_at_least(name, size, minimum)
        self.kv_rank = kv_rank
        self.rope_dim = rope_dim
        super().__init__([(batch, capacity, kv_rank + rope_dim)], **options)

    def append(self, latent: Tensor) -> Tensor:
        """Append ``latent [B, T, R + P]`` (rotary keys already rotated); return all so far: ``[B,
        length, R + P]``.
        """
        width = self.kv_rank + self.rope_dim
        expect_shape("latent", latent, "B T R+P", {"B": self.batch, "R+P": width})
        return self._append(latent=latent)[0]


def cache_numbers(
    variant: Variant,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
) -> int:
    """KV-cache elements per token per layer: ``2 H D`` (mha), ``2 G D`` (gqa), ``2 D`` (mqa), ``R +
    P`` (mla).

    ``value_dim`` defaults to ``head_dim``. Raises ValueError if a size required by the variant is
    missing.
    """
    needed: dict[str, dict[str, Any]] = {
        "mha": {"heads": heads, "head_dim": head_dim},
        "gqa": {"kv_heads": kv_heads, "head_dim": head_dim},
        "mqa": {"head_dim": head_dim},
        "mla": {"kv_rank": kv_rank, "rope_dim": rope_dim},
    }
    if variant not in needed:
        raise ValueError(
            f"variant is {variant!r}; it must be one of {', '.join(map(repr, needed))}"
        )
    sizes: dict[str, int] = needed[variant]
    for name, size in sizes.items():
        if size is None:
            raise ValueError(f"{name} is missing; variant {variant!r} needs {' and '.join(sizes)}")
        expect_at_least(name, size, 0)
    if variant == "mla":
        return sum(sizes.values())
    width = sizes.pop("head_dim")
    return math.prod(
        sizes.values(),
        start=width + (width if value_dim is None else value_dim),
    )


def cache_bytes(
    variant: Variant,
    layers: int,
    context: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    **sizes: int | None,
) -> int:
    """KV-cache bytes for ``batch`` sequences of ``context`` tokens, all ``layers``; sizes as in
    ``cache_numbers``.
    """
    return cache_numbers(variant, **sizes) * batch * layers * context * dtype.itemsize
