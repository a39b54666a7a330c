"""Bytes read, operations and memory of a decoding step, from the config alone. No torch here.

Per layer, with ``B`` sequences, ``S`` slots, ``H`` heads, ``G`` key/value heads, ``D`` head dim, latent ``R + P``:

    cached elements    MHA, GQA, MQA  2 B S G D                MLA  B S (R + P), and divisors of norms as part of P
    operations         4 B S H D      absorbed  2 B S H (2 R + P)      expanded  2 B S H ((Dn + Dv) R + Dn + P + Dv)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.convert.targets.own_code import source_type

_SPARE = 1.05  # factor for allocators and libraries
_FIXED = 600 << 20  # torch itself


@dataclass(frozen=True)
class Costs:
    """Bytes and operations of one decoding step of a whole model, and the memory of the combination, in bytes."""

    cache_bytes: int
    attention_operations: int
    operations: int
    read_bytes: int
    attention_memory: int
    memory: int


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters: all, and those of the layers and the head, which every step reads."""

    total: int
    read: int


def costs(
    config: Mapping[str, Any],
    form: str,
    weights: Weights,
    size: int,
    context: int,
    batch: int,
    prefill: int = 0,
) -> Costs:
    """``size``: bytes per element. ``prefill``: tokens prefilled at once."""
    layers, slots = int(config["num_hidden_layers"]), batch * context
    elements, operations, expanded = _per_slot(config, form)
    cache = layers * slots * elements * size
    attention = layers * slots * operations
    working = (slots * elements + slots * expanded) * size  # a growing cache copies a layer's
    prefilling = prefill * size * (layers * elements + _width(config))
    memory = weights.total * size + max(cache + working, prefilling)
    return Costs(
        cache_bytes=cache,
        attention_operations=attention,
        operations=attention + 2 * batch * weights.read,
        read_bytes=cache + weights.read * size,
        attention_memory=working,
        memory=int(_SPARE * memory) + _FIXED,
    )


def _per_slot(config: Mapping[str, Any], form: str) -> tuple[int, int, int]:
    """Of one layer and slot: elements cached, operations, elements that attention makes in between."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank") is None:
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        groups = int(config.get("num_key_value_heads") or heads)
        return 2 * groups * dim, 4 * heads * dim, 0 if groups == heads else 2 * heads * dim
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"]) + int(config.get("cached_divisors", 0))
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    if form == "absorbed" or source_type(config):  # layout kvfold decodes over the latents by itself
        return rank + rope, 2 * heads * (2 * rank + rope), heads
    made = heads * (2 * nope + rope + 2 * value)
    return rank + rope, 2 * heads * ((nope + value) * rank + nope + rope + value), made


def _width(config: Mapping[str, Any]) -> int:
    """Elements per token while a layer runs."""
    width, inner = int(config["hidden_size"]), int(config.get("intermediate_size") or 0)
    return 12 * width + 3 * inner
