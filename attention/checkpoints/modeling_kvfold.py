"""Stock transformers models with a smaller attention cache. kvfold puts this file next to the
weights that need it.

``KvfoldGPTNeoXForCausalLM`` is transformers' ``GPTNeoXForCausalLM`` with every attention module
replaced, and the same holds for any ``KvfoldX``. ``config.json`` is the source model's config plus
a ``kvfold`` block that describes the new attention. Everything else, from embeddings to loss, is
stock transformers. This file needs torch and transformers; it does not read or write files.

Shapes: ``B`` sequences, ``T`` new tokens, ``S`` tokens including the cached ones, ``E`` model dim,
``H`` query heads, ``G`` key/value heads, ``D`` head dim; ``R`` latent channels, ``P`` rotary dims
cached with each latent, ``N`` other dims of the query heads.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class FixedRotaryEmbedding(nn.Module):
    """Rotary embedding of the first ``P`` dims of each head with fixed ``frequencies [P/2]`` in
    radians per position.

    Dim ``l`` pairs with dim ``l + P/2``; ``amplitude`` multiplies the rotated dims (YaRN's
    attention factor). As in transformers' longrope, texts of more than ``short_context`` tokens
    have ``long_frequencies``, if the layer's ``values`` name both.
    """

    def __init__(self, values: dict[str, Any], amplitude: float) -> None:
        super().__init__()
        frequencies: list[float] = values["frequencies"]
        self.frequencies = [frequencies, values.get("long_frequencies", frequencies)]
        self.short_context: int | None = values.get("short_context")
        self.amplitude = amplitude
        self._table: Tensor | None = None  # no buffer: it must stay float32 when the model is cast

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys ``x [B, heads, T, D]`` rotated for their ``positions [B or 1,
        T]``.
        """
        # vLLM traces the model first, which leaves a proxy here
        if not isinstance(self._table, Tensor) or self._table.device != x.device:
            self._table = torch.tensor(self.frequencies, dtype=torch.float32, device=x.device)
        positions = positions.to(x.device)
        table = self._table[0]
        if self.short_context is not None:
            table = torch.where(positions.max() < self.short_context, table, self._table[1])
        angles = positions[:, None, :, None].float() * table
        cos = (self.amplitude * angles.cos()).to(x.dtype)
        sin = (self.amplitude * angles.sin()).to(x.dtype)
        pairs = cos.shape[-1]
        left = x[..., :pairs]
        right = x[..., pairs : 2 * pairs]
        rest = x[..., 2 * pairs :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


class SelfAttention(nn.Module):
    """Base class of the grouped and latent attention modules. A subclass's ``attend`` returns the
    heads' outputs ``[B, T, H, D]``, and the attention weights if it computes them.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        # values of this layer come in addition to the common ones
        layers = config.kvfold.get("layers")
        values = {**config.kvfold, **(layers[layer_idx] if layers else {})}
        self.values = values
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.heads: int = values["heads"]
        self.head_dim: int = values["head_dim"]
        query_dim = self.heads * self.head_dim
        self.o_proj = nn.Linear(query_dim, values["model_dim"], bias=values["o_bias"])
        self.rotation: FixedRotaryEmbedding | None = None
        self.scaling: float = values["scale"]
        # arguments of attention functions in addition to the mask
        self.rules = {
            name: values[name] for name in ("softcap", "sliding_window") if values.get(name)
        }
        self.attention_dropout: float = values["attention_dropout"]
        self.output_dropout = nn.Dropout(values["output_dropout"])

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,  # the name of the cache in some families
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output ``[B, T, E]`` for ``hidden_states [B, T, E]``, and the
        attention weights or None.

        In families that add the residual stream here (Bloom), ``residual`` is added to the result.
        """
        cache = layer_past if past_key_values is None else past_key_values
        if position_ids is None and self.rotation is not None:
            # the new tokens follow the cached ones
            start = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            steps = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            position_ids = start + steps[None]
        mask = add_alibi(attention_mask, hidden_states, options)
        outputs, weights = self.attend(hidden_states, position_ids, cache, mask, **options)
        result = self.output_dropout(self.o_proj(outputs.flatten(2)))
        return result if residual is None else residual + result, weights

    def rotate(self, x: Tensor, positions: Any) -> Tensor:
        """Apply the rotary embedding, if the layer has one, to ``x [B, heads, T, D]``."""
        return x if self.rotation is None else self.rotation(x, positions)


class GroupedSelfAttention(SelfAttention):
    """Grouped-query attention: ``H`` query heads share ``G`` key/value heads; multi-query attention
    if ``G = 1``.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        values = self.values
        model_dim = values["model_dim"]
        bias = values["qkv_bias"]
        kv_dim = values["kv_heads"] * self.head_dim
        self.q_proj = nn.Linear(model_dim, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(model_dim, kv_dim, bias=bias)
        self.v_proj = nn.Linear(model_dim, kv_dim, bias=bias)
        self.num_key_value_groups = self.heads // values["kv_heads"]
        self.clip: float | None = values.get("clip")
        if values["frequencies"]:
            self.rotation = FixedRotaryEmbedding(values, values["amplitude"])

    def attend(
        self,
        hidden_states: Tensor,
        positions: Tensor | None,
        cache: Any,
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs ``[B, T, H, D]`` and the attention weights, if computed; adds
        the new tokens to the cache.
        """
        query, key, value = self.project(hidden_states, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return apply_attention(self, query, key, value, mask, **options)

    def project(self, hidden_states: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """Return the new tokens' rotated queries ``[B, H, T, D]`` and keys ``[B, G, T, D]``, and
        their values ``[B, G, T, D]``.
        """
        projected = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            x = projection(hidden_states)
            if self.clip is not None:
                x = x.clamp(-self.clip, self.clip)
            projected.append(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        query, key, value = projected
        return self.rotate(query, positions), self.rotate(key, positions), value


class QueryNorm(nn.Module):
    """The source model's norm on queries: over the ``D`` dims of each head, or, if it is ``flat``,
    over all heads together.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.norm = values["norm"]
        self.weight = nn.Parameter(torch.ones(values["heads"], values["head_dim"]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized queries for ``x [B, T, H, D]``, in the dtype of ``x``."""
        centered, inverse = compute_norm_parts(x, self.norm)
        normed: Tensor = centered * inverse * (self.weight.float() + self.norm["offset"])
        return normed.to(x.dtype)


class LatentSelfAttention(SelfAttention):
    """Multi-head latent attention (DeepSeek-V2, 2024): one latent per token yields the keys and
    values of all heads, which also share one rotary key.

    The cache stores the latents ``[B, 1, S, R]`` as its keys and the rotary keys ``[B, 1, S, P]``
    as its values.

    If the source normalizes queries and keys, both norms are exact for any latent size, because the
    latent encodes keys before their norm. The source's ``k_proj`` is kept only to compute the
    norm's divisor for each key/value head of a token; scores of both latent and rotary key are
    divided by it. The cache stores its inverse after the rotary key: ``[B, 1, S, P + G]``, or one
    number in place of ``G`` if the norm is over all heads together.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        implementation = str(config._attn_implementation)
        if implementation.startswith(("flash", "flex")):
            raise ValueError(
                f"attn_implementation={implementation!r} does not support latent attention; use"
                " 'sdpa' or 'eager'"
            )
        values = self.values
        model_dim = values["model_dim"]
        bias = values["qkv_bias"]
        self.rank: int = values["kv_rank"]
        self.rope_dim: int = values["rope_dim"]
        self.norm: dict[str, Any] | None = values.get("norm")
        query_dim = self.heads * self.head_dim
        rope_query_dim = self.heads * self.rope_dim
        # with a norm, rotary queries are computed from the normed queries
        projected_dim = query_dim if self.norm else query_dim + rope_query_dim
        self.q_proj = nn.Linear(model_dim, projected_dim, bias=bias)
        self.kv_down_proj = nn.Linear(model_dim, self.rank + self.rope_dim, bias=True)
        # with a norm, a constant key does not move all scores of a query alike: divisors make it
        # differ by token
        self.k_up_proj = nn.Linear(self.rank, query_dim, bias=self.norm is not None)
        self.v_up_proj = nn.Linear(self.rank, query_dim, bias=False)
        if self.norm:
            self.q_norm = QueryNorm(values)
            self.k_proj = nn.Linear(model_dim, values["kv_heads"] * self.head_dim, bias=bias)
            # maps each head's normed query to its rotary query
            if self.rope_dim:
                self.q_rope_proj = nn.Linear(self.head_dim, rope_query_dim, bias=False)
        if self.rope_dim:
            # an amplitude is part of the weights
            self.rotation = FixedRotaryEmbedding(values, 1.0)
        self.num_key_value_groups = 1

    def attend(
        self, hidden_states: Tensor, positions: Tensor | None, cache: Any, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs ``[B, T, H, D]`` and the attention weights, if computed; adds
        the new latents to the cache.
        """
        # queries for the latents [B, H, T, N], and those for the rotary keys [B, H, T, P]
        query = self.q_proj(hidden_states).unflatten(-1, (self.heads, -1))
        if self.norm is None:
            query, rope_query = query.transpose(1, 2).tensor_split([self.head_dim], -1)
        else:
            query = self.q_norm(query).transpose(1, 2)
            rope_query = query[..., :0]
            if self.rope_dim:
                up_rope = torch.unflatten(self.q_rope_proj.weight, 0, (self.heads, -1))
                rope_query = query @ up_rope.mT
        rope_query = self.rotate(rope_query, positions)
        down = self.kv_down_proj(hidden_states)[:, None]
        latent = down[..., : self.rank]
        rope = self.rotate(down[..., self.rank :], positions)
        if self.norm is not None:
            keys = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
            _, inverse = compute_norm_parts(keys, self.norm)
            rope = torch.cat([rope, inverse.flatten(2)[:, None].to(rope.dtype)], -1)
        if cache is not None:
            latent, rope = cache.update(latent, rope, self.layer_idx)
        key_scales = None
        if self.norm is not None:
            key_scales = rope[:, 0, :, self.rope_dim :].transpose(1, 2)
            repeats = self.heads // key_scales.shape[1]
            key_scales = key_scales.repeat_interleave(repeats, 1)  # [B, H, S]
            rope = rope[..., : self.rope_dim]
        # with one query, up-projections of all cached tokens would cost more than attention itself
        if cache is not None and hidden_states.shape[1] == 1:
            return self.attend_to_latents(
                query, rope_query, latent, rope, mask, key_scales, **options
            )
        key, value = (
            projection(latent[:, 0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, D]
            for projection in (self.k_up_proj, self.v_up_proj)
        )
        key = torch.cat([key, rope.expand(-1, self.heads, -1, -1)], -1)
        if key_scales is not None:
            key = key * key_scales[..., None]
        query = torch.cat([query, rope_query], -1)
        return apply_attention(self, query, key, value, mask, **options)

    def attend_to_latents(
        self,
        query: Tensor,
        rope_query: Tensor,
        latent: Tensor,
        rope: Tensor,
        mask: Tensor | None,
        key_scales: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and weights of one decoding step (``T = 1``) that attends to the cached
        latents without computing keys or values.

        The up-projections are applied to query and result instead. The heads become ``H`` queries
        ``[B, 1, H, R + P]`` of one key/value head, whose values are the latents.
        """
        if self.norm is not None:
            bias = self.k_up_proj.bias.view(self.heads, -1, 1)
            # the constant key meets one more element of each cached key, which is 1
            rope_query = torch.cat([rope_query, query @ bias], -1)
            rope = nn.functional.pad(rope, (0, 1), value=1.0)
        up_key, up_value = (
            projection.weight.view(self.heads, -1, self.rank)
            for projection in (self.k_up_proj, self.v_up_proj)
        )
        query = torch.cat([query @ up_key, rope_query], -1).transpose(1, 2)
        key = torch.cat([latent, rope], -1)
        mask = None if mask is None else mask.transpose(1, 2)
        options["is_causal"] = False
        if key_scales is not None:
            options["key_scales"] = key_scales
        outputs, weights = apply_attention(self, query, key, latent, mask, **options)
        outputs = torch.einsum("bhtr,hdr->bthd", outputs, up_value)
        return outputs, None if weights is None else weights.transpose(1, 2)


VARIANTS = {
    "grouped": GroupedSelfAttention,
    "latent": LatentSelfAttention,
    "normed_latent": LatentSelfAttention,
}


def compute_norm_parts(x: Tensor, norm: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the numerator and the inverse divisor of a norm of ``x [B, T, heads, D]``, both in
    float32.

    The numerator is ``x``, minus its mean if the norm's ``kind`` is "layer". The inverse divisor is
    ``[B, T, heads, 1]``, or ``[B, T, 1, 1]`` for a ``flat`` norm, which is over all heads together.
    """
    x = x.float()
    dims = (-2, -1) if norm["flat"] else (-1,)
    if norm["kind"] == "layer":
        x = x - x.mean(dims, keepdim=True)
    return x, torch.rsqrt(x.square().mean(dims, keepdim=True) + norm["eps"])


def add_alibi(mask: Tensor | None, hidden: Tensor, options: dict[str, Any]) -> Tensor | None:
    """Return the attention mask ``[B, 1, T, S]``, plus ALiBi biases if the model passes them: ``[B,
    H, T, S]``.

    Bloom passes biases ``[B * H, 1, S]``. MPT passes biases ``[H, 1, positions]``, and its mask is
    True where a key is hidden. Falcon has already added its biases to the mask.
    """
    bloom = options.pop("alibi", None)
    mpt = options.pop("position_bias", None)
    if mask is None:
        return None
    if mpt is not None:
        blank = torch.zeros_like(mask, dtype=hidden.dtype)
        biases: Tensor = mpt[None, ..., -mask.shape[-1] :].to(hidden)
        return blank.masked_fill(mask, torch.finfo(hidden.dtype).min) + biases
    if bloom is None or mask.shape[1] > 1:
        return mask
    biases = bloom.view(len(hidden), -1, 1, mask.shape[-1])
    return mask + biases


def apply_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output ``[B, T, H, D]`` of the attention function named in the config (sdpa,
    flash_attention_2, eager, ...), and the attention weights or None.
    """
    # no other attention function can scale scores by key
    name = "eager" if "key_scales" in options else module.config._attn_implementation
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    output, weights = function(
        module,
        query,
        key,
        value,
        mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        **module.rules,
        **options,
    )
    return output, weights


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, T, H, D]`` and the weights ``[B, H, T, S]`` of attention in plain
    torch. ``key_scales [B, H, S]`` multiply the scores.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    scores = scaling * query @ key.mT
    if key_scales is not None:
        scores = scores * key_scales[:, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # same mask conventions as sdpa
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    # as transformers does in every eager attention
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class AttentionReplacementMixin:
    """Mixin for a stock model class: builds the stock model, then replaces its attention modules by
    those that the config describes.
    """

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        variant = config.kvfold["variant"]
        # an engine may have set a class of its own (vllm_plugin.py)
        attention = VARIANTS.get(f"{config._attn_implementation} {variant}", VARIANTS[variant])
        for parent in list(self.modules()):  # type: ignore[attr-defined]
            for name, child in list(parent.named_children()):
                # families subclass the attention of others: the replaced name may be a parent's
                if config.kvfold["replaces"] in [kind.__name__ for kind in type(child).__mro__]:
                    replacement = attention(config, child.layer_idx)
                    replacement.apply(self._init_weights)  # type: ignore[attr-defined]
                    setattr(parent, name, replacement)


def __getattr__(name: str) -> type:
    """Create the class ``KvfoldX`` for the transformers class X: a config under its own model type,
    or a model with replaced attention modules.
    """
    stock = getattr(transformers, name.removeprefix("Kvfold"), None)
    if stock is None or not name.startswith("Kvfold"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attributes: dict[str, Any] = {"__module__": __name__}
    if issubclass(stock, transformers.PretrainedConfig):
        attributes["model_type"] = f"kvfold_{stock.model_type}"
        attributes["base_model_tp_plan"] = None
        built = type(name, (stock,), attributes)
    else:
        stock_config = stock.config_class
        attributes["config_class"] = getattr(
            sys.modules[__name__], f"Kvfold{stock_config.__name__}"
        )
        # transformers 5.17 takes sdpa for Gemma 2, which has no soft cap
        if getattr(stock_config, "attn_logit_softcapping", None) is not None:
            attributes["_supports_sdpa"] = False
        built = type(name, (AttentionReplacementMixin, stock), attributes)
        # tensor names in checkpoint files are registered by class or by model type
        for key in (stock.__name__, stock_config.model_type):
            if mapping := get_checkpoint_conversion_mapping(key):
                register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
                break
    # one class for each name: pickling and registering look it up here
    globals()[name] = built
    return built
