"""Simulates engines that round their KV cache: a cache for transformers models that returns what it
holds as rounded values.

``fp8``                  e4m3 with scale 1, as vLLM's ``--kv-cache-dtype fp8``
``int8`` .. ``int2``     integers between the least and the greatest value of a group of 32 numbers;
                         each group has a scale and a zero in float16

Keys after RoPE form groups of 32 tokens of one channel, and values groups of 32 channels of one
token, because keys have channels that are large for every token, and values do not (KIVI, Liu et
al., 2024, arXiv:2402.02750). Of latent models the rotary key is rounded as keys are, and the latent
as values are. Divisors of key norms (layout ``kvfold``) stay as they are.

Nothing gets smaller or faster here: the rounded values keep the dtype of the model. Gradients pass
as if nothing was rounded (the straight-through estimator, Bengio et al., 2013, arXiv:1308.3432), so
that a model can be trained with the cache that it will have.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvfold.attention.rounding_schemes import CACHE_BITS, GROUP, find_rounding_problem

_LARGEST_FP8 = 448.0  # engines saturate, torch's cast makes NaN


class CacheRoundingError(ValueError):
    """A cache that cannot be rounded as asked."""


def round_cache(model: nn.Module, rounding: str) -> None:
    """Make a transformers ``model`` attend to a rounded cache in every forward pass and in
    generation; ``rounding`` is a key of `CACHE_BITS`.

    The tokens of the pass itself are cached, too, before attention reads them.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]

    def pass_rounded_cache(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = kwargs.get("past_key_values")
        # generation passes a cache of its own first, then the one that the model returned
        if not isinstance(cache, RoundedCache):
            cache = RoundedCache(decoder.config, rounding)
        return args, {**kwargs, "past_key_values": cache, "use_cache": True}

    decoder.register_forward_pre_hook(pass_rounded_cache, with_kwargs=True)


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """The cache of a model with ``config``, which returns rounded values of all that it holds."""

    def __init__(self, config: Any, rounding: str) -> None:
        super().__init__(config=config)
        self.rounding = rounding
        own = getattr(config, "kvfold", None) or vars(config)
        # rotary dims behind the latent; None for separate keys and values
        self.rope_dim: int | None = None
        if "kv_lora_rank" in own or "kv_rank" in own:
            self.rope_dim = own.get("rope_dim", own.get("qk_rope_head_dim"))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the new ``key_states [B, G, T, D]`` and ``value_states [B, G, T, D]`` of a layer;
        return those of all cached tokens, rounded. Of latent models these are latents ``[B, 1, T,
        R]`` and rotary keys ``[B, 1, T, P]``, with divisors after these.

        Raises CacheRoundingError if groups do not divide the channels of a token.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.rope_dim is None:
            rows = values.transpose(1, 2)  # [B, S, G, D]
            rounded = round_rows(rows.flatten(2), self.rounding).view_as(rows).transpose(1, 2)
            return round_channels(keys, self.rounding), rounded
        rope, divisors = values.tensor_split([self.rope_dim], -1)
        rope = round_channels(rope, self.rounding)
        return round_rows(keys, self.rounding), torch.cat([rope, divisors], -1)

    def count_bits(self) -> int:
        """Return how many bits the tensors take that it holds, rounded; 16 for each divisor."""
        bits = 0
        for layer in self.layers:
            if layer.keys is not None:
                values = layer.values[..., : self.rope_dim].numel()
                bits += (layer.keys.numel() + values) * CACHE_BITS[self.rounding]
                bits += (layer.values.numel() - values) * 16
        return bits


def round_rows(rows: Tensor, rounding: str) -> Tensor:
    """Return ``rows [..., n]`` rounded in groups of 32 neighbors; fp8 has no groups. Raises
    CacheRoundingError unless 32 divides ``n``.
    """
    if problem := find_rounding_problem(rounding, rows.shape[-1]):
        raise CacheRoundingError(problem)
    if rounding == "fp8":
        return round_to_fp8(rows)
    groups = torch.unflatten(rows, -1, (-1, GROUP))
    return _round_groups(groups, rounding).flatten(-2)


def round_channels(keys: Tensor, rounding: str) -> Tensor:
    """Return ``keys [..., S, D]`` rounded in groups of 32 neighboring tokens of each channel; the
    last group may have fewer.
    """
    if rounding == "fp8":
        return round_to_fp8(keys)
    tokens = keys.shape[-2]
    # repetitions of the last token change neither the least nor the greatest value of its group
    missing = -tokens % GROUP
    filled = torch.cat([keys, keys[..., -1:, :].expand(*keys.shape[:-2], missing, -1)], -2)
    groups = torch.unflatten(filled.mT, -1, (-1, GROUP))
    return _round_groups(groups, rounding).flatten(-2).mT[..., :tokens, :]


def round_to_fp8(values: Tensor) -> Tensor:
    """Return ``values`` rounded to e4m3, saturated at its largest number."""
    saturated = values.detach().clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return _pass_gradient(values, saturated.to(torch.float8_e4m3fn).to(values.dtype))


def _round_groups(groups: Tensor, rounding: str) -> Tensor:
    """Return ``groups [..., n]`` rounded to integers between the least and the greatest value of
    each; the scale and the zero are rounded to float16 first.
    """
    steps = 2 ** int(rounding.removeprefix("int")) - 1
    exact = groups.detach()
    low, high = exact.aminmax(dim=-1, keepdim=True)
    limit = torch.finfo(torch.float16).max
    zero = low.clamp(-limit, limit).half().to(groups.dtype)
    scale = ((high - low) / steps).clamp(max=limit).half().to(groups.dtype)
    codes = ((exact - zero) / scale.clamp_min(1e-30)).round().clamp(0, steps)
    return _pass_gradient(groups, codes * scale + zero)


def _pass_gradient(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded``, whose gradient is that of ``exact``."""
    return exact + (rounded - exact).detach() if exact.requires_grad else rounded
