"""Decoding over the latent cache for loaded DeepSeek, Youtu and Mistral4 models, in plain
transformers.

At every step, stock transformers expands each cached token into the keys and values of every head,
which takes ``S H (Dn + Dv) R`` multiplications per layer. After ``absorb(model)``, a decoding step
attends to the cached latents directly (``latent.py``); prefill and training are the stock code.
Weights, state dict and cache layout (normed latent and rotated key, as in stock transformers) stay
the same, so each form can continue a cache that the other started. ``generate``,
``save_pretrained`` and ``torch.compile`` work unchanged, and ``unabsorb`` restores the stock
attention.

    from kvfold.attention import absorb
    model = absorb(AutoModelForCausalLM.from_pretrained(folder))

Shapes: ``hidden [B, T, E]``; for each layer, the cache stores the normed latent ``[B, 1, S, R]`` as
keys and the rotated key ``[B, 1, S, P]`` as values. Youtu uses DeepSeek-V3's attention; Mistral4
also scales its queries.
"""

from types import MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.mistral4 import modeling_mistral4 as mistral4
from transformers.models.youtu import modeling_youtu as youtu

from kvfold.attention.latent import attend_to_latents, is_absorption_cheaper

AnyModel = TypeVar("AnyModel", bound=nn.Module)


class _AbsorbedAttentionMixin:
    """Mixin for a stock MLA class whose decoding steps attend to the cached latents instead of
    expanding them to keys and values.
    """

    modeling: ModuleType  # where the stock class and its rotary embedding are defined

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output ``[B, T, E]``, and the weights ``[B, H, T, S]`` with eager
        attention, as the stock module does.
        """
        states = (hidden_states, attention_mask, past_key_values)
        if _should_absorb(self, *states):
            return _attend_absorbed(self, *states, options), None
        stock: Any = super()
        result: tuple[Tensor, Tensor | None] = stock.forward(
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **options,
        )
        return result


def _should_absorb(layer: Any, hidden: Tensor, mask: Any, cache: Any) -> bool:
    """True if attending to the latents is cheaper than the stock code and possible: no gradient is
    needed, and the mask and the up-projection can be read.
    """
    # eager attention returns maps, which absorbed attention does not compute
    eager = layer.config._attn_implementation == "eager"
    if cache is None or torch.is_grad_enabled() or eager:
        return False
    queries = hidden.shape[1]
    # several queries without a mask are left to the attention function, which knows the keys they
    # see
    if mask is None:
        readable = queries == 1
    else:
        readable = isinstance(mask, Tensor) and (queries == 1 or mask.dim() == 4)
    # offloaded weights are on another device; adapted and quantized layers have none to absorb
    up = layer.kv_b_proj
    at_hand = type(up) is nn.Linear and up.weight.device == hidden.device
    # autocast leaves rotary queries and latents wider than the products: the stock form takes both
    if not readable or not at_hand or torch.is_autocast_enabled(hidden.device.type):
        return False
    # several queries at once, as in speculative decoding, may be cheaper explicitly
    return is_absorption_cheaper(
        queries, layer.qk_nope_head_dim, layer.v_head_dim, layer.kv_lora_rank
    )


def _attend_absorbed(
    layer: Any,
    hidden: Tensor,
    mask: Tensor | None,
    cache: Any,
    options: dict[str, Any],
) -> Tensor:
    """Return the attention output ``[B, T, E]`` of one call that attends to the cached latents and
    rotary keys directly.
    """
    if layer.q_lora_rank is None:
        query = layer.q_proj(hidden)
    else:
        query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    query = query.view(*hidden.shape[:-1], -1, layer.qk_head_dim).transpose(1, 2)
    nope_dim = layer.qk_nope_head_dim
    nope = query[..., :nope_dim]  # [B, H, T, Dn]
    rope = query[..., nope_dim:]  # [B, H, T, P]
    down = layer.kv_a_proj_with_mqa(hidden)
    latent = layer.kv_a_layernorm(down[..., : layer.kv_lora_rank])[:, None]  # [B, 1, T, R]
    key_rope = down[:, None, :, layer.kv_lora_rank :]  # [B, 1, T, P]
    # by the functions of the stock file, so that every version's conventions hold: V2 multiplies
    # complex numbers
    modeling = layer.modeling
    position_embeddings = options["position_embeddings"]
    if isinstance(position_embeddings, Tensor):
        angles = position_embeddings.to(rope.device)
        rope, key_rope = modeling.apply_rotary_emb(rope, key_rope, angles)
    elif layer.config.rope_interleave:
        rope, key_rope = modeling.apply_rotary_pos_emb_interleave(
            rope, key_rope, *position_embeddings
        )
    else:
        rope, key_rope = modeling.apply_rotary_pos_emb(rope, key_rope, *position_embeddings)
    if hasattr(modeling, "get_llama_4_attn_scale"):
        # queries of Mistral4 grow with the logarithm of their position, as in Llama 4
        table = layer.config.rope_parameters
        factor = modeling.get_llama_4_attn_scale(
            options["position_ids"],
            table["llama_4_scaling_beta"],
            table["original_max_position_embeddings"],
        ).to(nope.dtype)
        nope = nope * factor
        rope = rope * factor
    latent, key_rope = cache.update(latent, key_rope, layer.layer_idx)
    if mask is not None and mask.dim() == 2:
        # flash attention's mask: true for real tokens
        mask = mask[:, None, None].bool()
    mask = None if mask is None else mask[..., : latent.shape[2]]
    # views: nothing is copied
    up = layer.kv_b_proj.weight.view(-1, nope_dim + layer.v_head_dim, layer.kv_lora_rank)
    query = torch.einsum("bhtd,hdr->bhtr", nope, up[:, :nope_dim])
    z = attend_to_latents(query, rope, latent[:, 0], key_rope[:, 0], layer.scaling, mask)
    z = torch.einsum("bhtr,hdr->bthd", z, up[:, nope_dim:])
    output: Tensor = layer.o_proj(z.flatten(2))
    return output


class AbsorbedDeepseekV2Attention(_AbsorbedAttentionMixin, deepseek_v2.DeepseekV2Attention):  # type: ignore[misc]
    """DeepSeek-V2's attention, whose decoding steps attend to the cached latents."""

    modeling = deepseek_v2


class AbsorbedDeepseekV3Attention(_AbsorbedAttentionMixin, deepseek_v3.DeepseekV3Attention):  # type: ignore[misc]
    """DeepSeek-V3's attention, whose decoding steps attend to the cached latents."""

    modeling = deepseek_v3


class AbsorbedMistral4Attention(_AbsorbedAttentionMixin, mistral4.Mistral4Attention):  # type: ignore[misc]
    """Mistral4's attention, whose decoding steps attend to the cached latents."""

    modeling = mistral4


class AbsorbedYoutuAttention(_AbsorbedAttentionMixin, youtu.YoutuAttention):  # type: ignore[misc]
    """Youtu's attention, whose decoding steps attend to the cached latents."""

    modeling = youtu


ABSORBED: dict[type[nn.Module], type[nn.Module]] = {
    deepseek_v2.DeepseekV2Attention: AbsorbedDeepseekV2Attention,
    deepseek_v3.DeepseekV3Attention: AbsorbedDeepseekV3Attention,
    mistral4.Mistral4Attention: AbsorbedMistral4Attention,
    youtu.YoutuAttention: AbsorbedYoutuAttention,
}
_STOCK = {absorbed: stock for stock, absorbed in ABSORBED.items()}


def absorb(model: AnyModel) -> AnyModel:
    """Make every DeepSeek-V2/V3, Youtu and Mistral4 layer of ``model`` decode from its cached
    latents, in place; returns ``model``.

    Calling it again changes nothing. Raises ValueError if ``model`` has no such attention.
    """
    if not any(type(module) in ABSORBED | _STOCK for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no DeepSeek, Youtu or Mistral4 attention to absorb;"
            " convert its checkpoint to MLA first: `kvfold convert MODEL OUT --to mla`"
        )
    return _swap_attention_classes(model, ABSORBED)


def unabsorb(model: AnyModel) -> AnyModel:
    """Restore the stock attention of every absorbed layer of ``model``, in place; returns
    ``model``.
    """
    return _swap_attention_classes(model, _STOCK)


def _swap_attention_classes(
    model: AnyModel, classes: dict[type[nn.Module], type[nn.Module]]
) -> AnyModel:
    """Replace the class of each attention module by its entry in ``classes``, in place; returns
    ``model``. Also rebinds the forward methods that accelerate's hooks (``device_map``) stored.
    """
    for module in model.modules():
        new = classes.get(type(module))
        if new is None:
            continue
        module.__class__ = new
        # a bound method would still run the forward of the other class
        for name in ("_old_forward", "forward"):
            bound = module.__dict__.get(name)
            if isinstance(bound, MethodType) and bound.__self__ is module:
                module.__dict__[name] = MethodType(new.forward, module)
    return model
