"""The sizes of latent attention, and the config of the stock class for a converted model. Does not
import torch.

Layout ``free`` supports any frequencies and attention biases (one latent channel is a constant that
makes the latent's RMSNorm a known factor). The DeepSeek loaders of inference engines silently drop
both, so the output is not a DeepSeek model but a ``YoutuForCausalLM`` (stock in transformers),
which has the same attention and tensor names, and dense layers.

Layout ``engine`` is a ``DeepseekV3ForCausalLM`` that those loaders read correctly: no biases, plain
RoPE, an untied head, and only dense layers (``first_k_dense_replace`` is the number of layers).

A model with experts becomes a ``Mistral4ForCausalLM`` in both layouts. Its router computes the
softmax of all logits, selects the largest probabilities, and optionally divides them by their sum,
like mixtral and qwen3_moe (DeepSeek-V3 uses a sigmoid, and DeepSeek-V2 never divides).
"""

import math
from collections.abc import Mapping, Sequence
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
_CLASSES: dict[str, dict[str, Any]] = {
    "free": {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"},
    "engine": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "experts": {"architectures": ["Mistral4ForCausalLM"], "model_type": EXPERT_TYPE},
}
_ROPE_BASE = 10000.0  # of the standard frequencies that longrope's factors divide


def is_latent(config: Mapping[str, Any]) -> bool:
    """True if ``config`` describes a model with latent attention (MLA)."""
    return config.get("model_type") in LATENT_TYPES


@dataclass(frozen=True)
class LatentTarget:
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


def cached_divisors(model: Model, target: LatentTarget) -> int:
    """KV-cache elements per token per layer, in addition to R + P, for the divisors of key norms
    that are kept.
    """
    if model.qk_norm is None or target.layout != "kvfold":
        return 0  # stock classes have linear maps in place of the norms
    # One per key/value head, or one for a norm over all heads.
    return 1 if model.qk_norm.extent == "flat" else model.geometry.kv_heads


def full_query_rank(model: Model, target: LatentTarget) -> int:
    """The smallest ``q_rank`` at which the query latent loses nothing."""
    size = model.geometry
    return min(size.model_dim, size.heads * (size.head_dim + target.rope_dim)) + target.constant


def query_rank(model: Model, target: LatentTarget) -> int | None:
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


def mla_config(
    model: Model, target: LatentTarget, theta: Sequence[float], *, dtype: str
) -> dict[str, Any]:
    """``config.json`` of the output. ``theta [P/2]`` are the rotary frequencies in radians per
    position.

    ``dtype`` is in the spelling of transformers. The dtype has two keys, for readers before and
    after transformers 5; in layout ``engine`` so do the frequencies.
    """
    size = model.geometry
    block = model.block
    config = model.config
    nope, value = target.head_dims(size.head_dim)
    # Where all layers have experts, the width of the MLPs that the model lacks is theirs.
    down = model.names.get(("down", 0)) or model.names["expert_down", 0]
    width = model.tensors[down[0]].shape[1]
    special = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if target.layout == "free":
        # transformers 5.23 zeroes the embedding of the pad token when it loads a Youtu model.
        special["pad_token_id"] = None
    return {
        **(_CLASSES["experts" if block.sparse else target.layout]),
        "attention_bias": target.constant,
        "attention_dropout": config.get("attention_dropout", 0.0),
        **special,
        "vocab_size": size.vocabulary,
        "hidden_size": size.model_dim,
        "hidden_act": block.activation,
        "intermediate_size": width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": target.kv_rank,
        "q_lora_rank": query_rank(model, target),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": target.rope_dim,
        "v_head_dim": value,
        "max_position_embeddings": context(model),
        "initializer_range": size.initializer_range,
        "rms_norm_eps": block.norm_eps,
        "tie_word_embeddings": block.tied and target.layout != "engine",
        "use_cache": True,
        "rope_interleave": True,
        **_expert_config(model, target, width),
        **_rope(model, target, theta),
        "dtype": dtype,
        "torch_dtype": dtype,  # the spelling before transformers 5
    }


def _rope(model: Model, target: LatentTarget, theta: Sequence[float]) -> dict[str, Any]:
    """The config keys for the rotary embedding, and ``head_dim`` if readers need it."""
    cached = target.kv_rank + target.rope_dim
    positions = context(model)
    head_dim = (
        cached
        if target.has_kernels
        else target.head_dims(model.geometry.head_dim)[0] + target.rope_dim
    )
    # vLLM's Transformers backend takes head_dim for the size of the latent cache. Youtu and
    # Mistral4 rotate a part of their head_dim dims, rounded down, and otherwise ignore it: where
    # kernels support the cache one value serves all.
    part = {"partial_rotary_factor": (target.rope_dim + 0.5) / head_dim}
    plain: Literal["default", "yarn", "longrope"] = "longrope" if target.has_kernels else "default"
    table = stored_rope(
        theta, positions, "yarn" if model.block.sparse or target.layout == "engine" else plain
    )
    if model.block.sparse:
        # Mistral4 rotates a part of a head, but not by plain RoPE, and would scale its queries by
        # position.
        return {
            "head_dim": head_dim,
            "rope_parameters": {**table, **part, "llama_4_scaling_beta": 0.0},
        }
    if target.layout == "engine":
        # YaRN of factor 1 changes no frequency and no scale. It is the way of DeepSeek-V3 itself;
        # for plain interleaved RoPE vLLM 0.32 has a kernel on CPUs that rotates several heads
        # wrongly.
        scaling = {name: value for name, value in table.items() if name != "rope_theta"}
        older = {
            "rope_theta": table["rope_theta"],
            "rope_scaling": {**scaling, "type": table["rope_type"]},
        }
        return {**older, "rope_parameters": table}
    if not target.has_kernels:
        return {"rope_parameters": table}
    return {"head_dim": cached, "rope_parameters": {**table, **part}}


def _expert_config(model: Model, target: LatentTarget, width: int) -> dict[str, Any]:
    """The config keys for experts; empty in layout ``free`` if there are none. ``width`` is the
    width of the MLPs.
    """
    if model.block.sparse:
        routing = model.block.routing
        first = next(layer.index for layer in model.layers if layer.sparse)
        assert routing is not None  # model_problems refuses models without
        downs = model.names["expert_down", first]
        return {
            "first_k_dense_replace": first,
            "moe_intermediate_size": model.tensors[downs[0]].shape[1],
            "n_routed_experts": len(downs),
            "n_shared_experts": int(target.layout == "engine"),
            "num_experts_per_tok": routing.per_token,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": routing.renormalized,
            "routed_scaling_factor": 1.0,
        }
    if target.layout != "engine":
        return {}
    # A DeepSeek model without experts has the smallest numbers that its readers accept.
    return {
        "first_k_dense_replace": model.geometry.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": width,
        "n_routed_experts": (
            2
        ),  # llama.cpp refuses a model with as many groups of experts as experts
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }


def stored_rope(
    theta: Sequence[float],
    positions: int,
    plain: Literal["default", "yarn", "longrope"] = "default",
) -> dict[str, Any]:
    """``rope_parameters`` for the frequencies ``theta``; for plain RoPE, ``plain`` is the rope type
    to use.

    All other frequencies are stored as ``longrope``, whose factors divide the standard frequencies
    one by one; the factors are the same for short and long texts.
    """
    base = None if plain == "longrope" else plain_base(theta)
    if base is None:
        factors = [_ROPE_BASE ** (-index / len(theta)) / angle for index, angle in enumerate(theta)]
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": positions,
            "rope_theta": _ROPE_BASE,
        }
    if plain == "default":
        return {"rope_type": "default", "rope_theta": base}
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": 1.0,
        "original_max_position_embeddings": positions,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def plain_base(theta: Sequence[float]) -> float | None:
    """The ``base`` with ``theta_i = base^(-2i/P)`` for all ``P/2`` frequencies (within float32
    precision), or None.
    """
    # Plain RoPE starts at one radian per position, whatever its base.
    if not math.isclose(theta[0], 1.0, rel_tol=1e-7):
        return None
    base = 10000.0 if len(theta) == 1 else theta[-1] ** (-len(theta) / (len(theta) - 1))
    base = float(round(base)) if math.isclose(base, round(base), rel_tol=1e-6) else base
    plain = (base ** (-index / len(theta)) for index in range(len(theta)))
    return (
        base
        if all(math.isclose(a, b, rel_tol=3e-7) for a, b in zip(theta, plain, strict=True))
        else None
    )
