"""Attention modules that accept their projections as arguments: plain, quantized, adapted or fused
linear layers.

Shapes: ``B`` sequences, ``T`` new tokens, ``S`` slots in the cache after they are added, ``E``
model dim, ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``Dv`` value dim, ``R`` latent
rank, ``P`` rotary dims, ``Dn`` unrotated query dims.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from kvfold.attention.cache import KVCache, LatentCache, SlotCache
from kvfold.attention.checks import expect_shape
from kvfold.attention.grouped import grouped_attention
from kvfold.attention.latent import is_absorption_cheaper, latent_attention
from kvfold.attention.rotary import RotaryLayout, apply_rotary, rotary_tables


class RotaryEmbedding(nn.Module):
    """Rotary embedding with fixed ``frequencies [Dr / 2]`` in radians per position, which stay
    float64 even if the module is cast.
    """

    bits: Tensor

    def __init__(self, frequencies: Tensor, layout: RotaryLayout) -> None:
        super().__init__()
        self.layout: RotaryLayout = layout
        # module.to(dtype) casts floating-point buffers only: as int64 the bits of the frequencies
        # survive it
        self.register_buffer("bits", frequencies.double().view(torch.int64), persistent=False)

    def forward(self, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Rotate each of ``tensors [B, heads, T, D]`` by ``positions [T]`` or ``[B, T]``."""
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        positions = positions.to(tensors[0].device)
        tables = rotary_tables(positions, self.bits.view(torch.float64), dtype)
        return [apply_rotary(x, tables, self.layout) for x in tensors]


class GroupedAttention(nn.Module):
    """Attention module for MHA (``kv_heads = heads``), GQA or MQA (``kv_heads = 1``), built from
    given projections.

    ``query`` maps ``E -> H D``, ``key`` ``E -> G D``, ``value`` ``E -> G Dv`` and ``output`` ``H Dv
    -> E``. ``frequencies [Dr / 2]`` define the rotary embedding (None means none). ``rules`` are
    ``causal``, ``window`` and ``scale`` of ``grouped_attention``.
    """

    def __init__(
        self,
        *,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        output: nn.Module,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        frequencies: Tensor | None = None,
        layout: RotaryLayout = "half",
        **rules: Any,
    ) -> None:
        super().__init__()
        self.query = query
        self.key = key
        self.value = value
        self.output = output
        self.rotation = None if frequencies is None else RotaryEmbedding(frequencies, layout)
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.rules = rules

    def new_cache(self, batch: int, capacity: int = 0, **options: Any) -> KVCache:
        """Create an empty cache for this layer, for ``batch`` sequences; ``options`` are ``dtype``
        and ``device``.
        """
        sizes = (batch, self.kv_heads, self.head_dim, capacity)
        return KVCache(*sizes, value_dim=self.value_dim, **options)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output ``[B, T, E]`` for hidden states ``x [B, T, E]``.

        With a ``cache``, ``x`` continues the cached tokens. ``positions [T]`` or ``[B, T]`` are
        used for the rotary embedding; they default to the slot numbers. ``starts [B]`` are
        those of ``grouped_attention``.
        """
        expect_shape("x", x, "B T E", {})
        query = _split_heads(self.query(x), self.heads)
        key = _split_heads(self.key(x), self.kv_heads)
        value = _split_heads(self.value(x), self.kv_heads)
        if self.rotation is not None:
            positions = _find_slots(x, cache) if positions is None else positions
            query, key = self.rotation(positions, query, key)
        if cache is not None:
            key, value = cache.append(key, value)
        z = grouped_attention(query, key, value, starts=starts, **self.rules)
        return cast(Tensor, self.output(z.transpose(1, 2).flatten(2)))


class LatentAttention(nn.Module):
    """Multi-head latent attention with a decoupled rotary key (DeepSeek-V2 2024).

    ``query`` maps ``E -> H (Dn + P)``, including any query latent; ``down`` maps ``E -> R + P``,
    the latent and the rotary key; ``latent_norm`` normalizes the ``R`` latent dims; ``up`` is a
    linear layer ``R -> H (Dn + Dv)`` without bias, with each head's ``W_uk`` above its ``W_uv``;
    ``output`` maps ``H Dv -> E``. ``frequencies [P / 2]`` define the rotary embedding. ``rules``
    are ``causal``, ``window`` and ``scale`` of ``latent_attention``.
    """

    def __init__(
        self,
        *,
        query: nn.Module,
        down: nn.Module,
        up: nn.Linear,
        output: nn.Module,
        heads: int,
        kv_rank: int,
        rope_dim: int,
        nope_dim: int,
        value_dim: int,
        frequencies: Tensor,
        latent_norm: nn.Module | None = None,
        layout: RotaryLayout = "interleaved",
        **rules: Any,
    ) -> None:
        super().__init__()
        if getattr(up, "bias", None) is not None:
            raise ValueError(
                "up has a bias, which cannot be absorbed; use a linear layer with bias=False"
            )
        if 2 * len(frequencies) != rope_dim:
            raise ValueError(
                f"frequencies has {len(frequencies)} numbers; it must have rope_dim / 2 ="
                f" {rope_dim / 2}"
            )
        self.query = query
        self.down = down
        self.up = up
        self.output = output
        self.latent_norm = latent_norm or nn.Identity()
        self.rotation = RotaryEmbedding(frequencies, layout)
        self.heads = heads
        self.kv_rank = kv_rank
        self.rope_dim = rope_dim
        self.nope_dim = nope_dim
        self.value_dim = value_dim
        self.rules = rules

    def new_cache(self, batch: int, capacity: int = 0, **options: Any) -> LatentCache:
        """Create an empty cache for this layer, for ``batch`` sequences; ``options`` are ``dtype``
        and ``device``.
        """
        return LatentCache(batch, self.kv_rank, self.rope_dim, capacity, **options)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cache: LatentCache | None = None,
        starts: Tensor | None = None,
        absorbed: bool | None = None,
    ) -> Tensor:
        """Return the attention output ``[B, T, E]`` for hidden states ``x [B, T, E]``.
        ``positions``, ``cache`` and ``starts`` are those of `GroupedAttention`.

        ``absorbed=None`` selects explicit attention without a cache (training, encoding); with a
        cache, ``is_absorption_cheaper`` decides.
        """
        expect_shape("x", x, "B T E", {})
        query = _split_heads(self.query(x), self.heads)
        nope, rope = torch.split(query, [self.nope_dim, self.rope_dim], -1)
        c, key_rope = torch.split(self.down(x), [self.kv_rank, self.rope_dim], -1)
        positions = _find_slots(x, cache) if positions is None else positions
        rope, key_rope = self.rotation(positions, rope, key_rope[:, None])
        # the norm is on the latent alone: the rotary key is cached as attention reads it
        latent = torch.cat([self.latent_norm(c).to(c.dtype), key_rope[:, 0]], -1)
        if cache is not None:
            latent = cache.append(latent)
        if absorbed is None:
            # training and encoding have gradients or many queries for each slot
            pays = is_absorption_cheaper(x.shape[1], self.nope_dim, self.value_dim, self.kv_rank)
            absorbed = cache is not None and pays
        ups = torch.unflatten(self.up.weight.to(nope.dtype), 0, (self.heads, -1))
        up_key, up_value = torch.split(ups, [self.nope_dim, self.value_dim], 1)
        z = latent_attention(
            nope,
            rope,
            latent,
            up_key,
            up_value,
            absorbed=absorbed,
            starts=starts,
            **self.rules,
        )
        return cast(Tensor, self.output(z.transpose(1, 2).flatten(2)))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape a projection's output ``[B, T, H D]`` to ``[B, H, T, D]``."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def _find_slots(x: Tensor, cache: SlotCache | None) -> Tensor:
    """Return the slot numbers ``[T]`` of the tokens of ``x [B, T, E]``, which the cache does not
    hold yet.
    """
    first = 0 if cache is None else cache.length
    return torch.arange(first, first + x.shape[1], device=x.device)
