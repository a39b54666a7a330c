"""The sizes of latent attention (MLA) in a converted model. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table

# Sizes that vLLM's MLA kernels take: cached elements R + P, and dims of a head (unrotated, rotary,
# value).
KERNEL_CACHES = (576, 512, 320)
KERNEL_HEADS = ((128, 64, 128), (64, 64, 128), (192, 64, 256), (256, 0, 256))
ATTENTION = "model.layers.{layer}.self_attn"  # of all three classes
EXPERT_TYPE = "mistral4"
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "youtu", EXPERT_TYPE)


def is_latent(config: Mapping[str, Any]) -> bool:
    """True if ``config`` describes a model with latent attention (MLA)."""
    return config.get("model_type") in LATENT_TYPES


@dataclass(frozen=True)
class MlaSpec:
    """The sizes of latent attention. ``kv_rank`` R + ``rope_dim`` P are the cached elements per
    token per layer.

    R includes the constant channel. ``rotated`` mixes the other channels, for a quantized cache. If
    ``q_rank`` is None, queries have no latent, unless biases require it (see `query_rank`).
    """

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None
    layout: Literal["free", "engine", "kvfold"] = "free"
    rotated: bool = False

    @property
    def constant(self) -> bool:
        """True if one latent channel is constant, as in layout ``free``."""
        return self.layout == "free"

    @property
    def channels(self) -> int:
        """The number of latent channels without the constant channel."""
        return self.kv_rank - self.constant

    @property
    def has_kernels(self) -> bool:
        """True if the MLA kernels of engines support this cache size."""
        return (
            self.rope_dim in {rope for _, rope, _ in KERNEL_HEADS}
            and self.kv_rank + self.rope_dim in KERNEL_CACHES
        )

    def head_dims(self, dim: int) -> tuple[int, int]:
        """The unrotated dims and the value dims of a stored head, at least ``dim`` each.

        Both are ``dim``, except that layout ``engine`` pads heads with zeros to the smallest sizes
        that MLA kernels support. The zeros do not change the result: the scale of the scores is
        part of the queries, and the cache contains no heads.
        """
        if self.layout != "engine" or not self.has_kernels:
            return dim, dim
        sizes = [
            (n, v) for n, rope, v in KERNEL_HEADS if rope == self.rope_dim and min(n, v) >= dim
        ]
        return min(sizes, key=sum, default=(dim, dim))

    def rope_kept(self, rotary_dims: int) -> int:
        """The number of stored rotary dims that contain keys; layout ``engine`` may pad them with
        zeros to P.
        """
        if self.layout != "engine" or not self.has_kernels or rotary_dims == 0:
            return self.rope_dim
        return self.rope_dim if self.rope_dim % rotary_dims else rotary_dims


def cached_divisors(model: Model, target: MlaSpec) -> int:
    """KV-cache elements per token per layer, in addition to R + P, for the divisors of key norms
    that are kept.
    """
    if model.qk_norm is None or target.layout != "kvfold":
        return 0  # stock classes have linear maps in place of the norms
    # One per key/value head, or one for a norm over all heads.
    return 1 if model.qk_norm.extent == "flat" else model.geometry.kv_heads


def full_query_rank(model: Model, target: MlaSpec) -> int:
    """The smallest ``q_rank`` at which the query latent loses nothing."""
    size = model.geometry
    return min(size.model_dim, size.heads * (size.head_dim + target.rope_dim)) + target.constant


def query_rank(model: Model, target: MlaSpec) -> int | None:
    """``q_lora_rank`` of the output, or None if queries have no latent."""
    if target.layout == "kvfold" or target.q_rank is not None or "q" not in model.biased:
        return target.q_rank
    # Stock classes can store a query bias only in a query latent, so a bias forces one of full
    # rank.
    return full_query_rank(model, target)


def context(model: Model) -> int:
    """The output's context length: the source's, or the range of the short factors if longrope has
    two sets.
    """
    positions = model.geometry.positions
    table = rope_table(model.values)
    if table["rope_type"] == "longrope" and table.get("short_factor") != table.get("long_factor"):
        return min(positions, int(table["original_max_position_embeddings"]))
    return positions
