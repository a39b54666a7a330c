"""Decoding over the latent cache for loaded DeepSeek, Youtu and Mistral4 models, in plain
transformers.

At every step, stock transformers expands each cached token into the keys and values of every head,
which takes ``S H (Dn + Dv) R`` multiplications per layer. After ``absorb(model)``, a decoding step
attends to the cached latents directly (``latent.py``); prefill and training are unchanged. Weights,
state dict and cache layout (normed latent and rotated key, as in stock transformers) stay the same,
so each form can continue a cache that the other started. ``generate``, ``save_pretrained`` and
``torch.compile`` work unchanged, and ``unabsorb`` restores the stock attention.

    from kvfold.attention import absorb
    model = absorb(AutoModelForCausalLM.from_pretrained(folder))

Shapes: ``hidden [B, T, E]``; for each layer, the cache stores the normed latent ``[B, 1, S, R]`` as
keys and the rotated key ``[B, 1, S, P]`` as values. Youtu uses DeepSeek-V3's attention; Mistral4
also scales its queries.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention.latent import (
    absorb_query,
    absorption_pays,
    expand_value,
    latent_decode,
    latent_scores,
)

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Context = tuple[
    Tensor, Tensor | None
]  # z [B, T, H, Dv], attention weights [B, H, T, S] (eager attention only)


class _Absorbed(nn.Module):
    """The forward shared by all absorbed classes. The stock base classes set the attributes that it
    reads.
    """

    home: ModuleType  # where the stock class lives, with its rotation and its eager attention

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Context:
        """Same contract as the stock modules: output ``[B, T, E]`` and, with eager attention, the
        attention weights.
        """
        this = cast(Any, self)
        q_latent = (
            hidden_states
            if this.q_lora_rank is None
            else this.q_a_layernorm(this.q_a_proj(hidden_states))
        )
        query = this.q_proj(q_latent) if this.q_lora_rank is None else this.q_b_proj(q_latent)
        query = query.view(*hidden_states.shape[:-1], -1, this.qk_head_dim).transpose(1, 2)
        nope, rope = torch.split(
            query, [this.qk_nope_head_dim, this.qk_rope_head_dim], -1
        )  # [B, H, T, Dn | P]
        down = this.kv_a_proj_with_mqa(hidden_states)
        latent, key_rope = torch.split(down, [this.kv_lora_rank, this.qk_rope_head_dim], -1)
        # [B, 1, T, R | P]
        latent = this.kv_a_layernorm(latent)[:, None]
        key_rope = key_rope[:, None]
        # by the functions of the stock file, so that every version's conventions hold: V2
        # multiplies complex numbers
        if isinstance(position_embeddings, Tensor):
            rope, key_rope = this.home.apply_rotary_emb(
                rope, key_rope, position_embeddings.to(rope.device)
            )
        elif this.config.rope_interleave:
            rope, key_rope = this.home.apply_rotary_pos_emb_interleave(
                rope, key_rope, *position_embeddings
            )
        else:
            rope, key_rope = this.home.apply_rotary_pos_emb(rope, key_rope, *position_embeddings)
        if hasattr(this.home, "get_llama_4_attn_scale"):
            # queries of Mistral4 grow with the logarithm of their position, as in Llama 4
            table = this.config.rope_parameters
            beta = table["llama_4_scaling_beta"]
            length = table["original_max_position_embeddings"]
            factor = this.home.get_llama_4_attn_scale(kwargs["position_ids"], beta, length).to(
                nope.dtype
            )
            nope = nope * factor
            rope = rope * factor
        if past_key_values is not None:
            latent, key_rope = past_key_values.update(latent, key_rope, this.layer_idx)
        # without a past there is nothing to expand again: prefill and training stay explicit
        has_past = latent.shape[2] > hidden_states.shape[1]
        if has_past and _absorbs(this, nope, attention_mask):
            z, weights = _absorbed(this, nope, rope, latent, key_rope, attention_mask)
        else:
            z, weights = _explicit(this, nope, rope, latent, key_rope, attention_mask, kwargs)
        return this.o_proj(z.reshape(*hidden_states.shape[:-1], -1)), weights


def _absorbed_forms() -> Iterator[tuple[type[nn.Module], type[_Absorbed]]]:
    """Each stock attention class in the installed transformers, with its absorbed subclass."""
    stock_names = {
        "deepseek_v2": "DeepseekV2Attention",
        "deepseek_v3": "DeepseekV3Attention",
        "youtu": "YoutuAttention",
        "mistral4": "Mistral4Attention",  # transformers 5.4 on
    }
    for family, name in stock_names.items():
        if find_spec(f"transformers.models.{family}"):
            home = import_module(f"transformers.models.{family}.modeling_{family}")
            stock = getattr(home, name)
            form = type(
                f"Absorbed{name}", (_Absorbed, stock), {"home": home, "__module__": __name__}
            )
            # pickling looks it up here
            globals()[form.__name__] = form
            yield stock, form


FORMS = dict(_absorbed_forms())
_STOCK: dict[type[nn.Module], type[nn.Module]] = {
    absorbed: stock for stock, absorbed in FORMS.items()
}


def absorb(model: AnyModel) -> AnyModel:
    """Replace the attention of every DeepSeek-V2/V3, Youtu and Mistral4 layer in place; returns
    ``model``.

    Calling it again changes nothing. Raises ValueError if ``model`` has no such attention.
    """
    layers = [
        module for module in model.modules() if type(module) in FORMS or type(module) in _STOCK
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no DeepSeek, Youtu or Mistral4 attention to absorb;"
            " convert its checkpoint to MLA first: `kvfold convert MODEL OUT --to mla`"
        )
    for module in layers:
        _become(module, FORMS.get(type(module), type(module)))
    return model


def unabsorb(model: AnyModel) -> AnyModel:
    """Restore the stock attention of every absorbed layer of ``model``, in place; returns
    ``model``.
    """
    for module in model.modules():
        if type(module) in _STOCK:
            _become(module, _STOCK[type(module)])
    return model


def _become(module: nn.Module, form: type[nn.Module]) -> None:
    """Change the class of ``module``, and rebind the forward that accelerate's hooks
    (``device_map``) have stored.
    """
    module.__class__ = form
    # a bound method would still run the forward of the other form
    for name in ("_old_forward", "forward"):
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__self__ is module:
            module.__dict__[name] = MethodType(form.forward, module)


def _absorbs(this: Any, nope: Tensor, mask: Any) -> bool:
    """True if attending to the latents is cheaper and possible: no gradient, and the mask and
    weight are readable.
    """
    queries = nope.shape[2]
    # several queries at once, as in speculative decoding, may be cheaper explicitly
    pays = absorption_pays(queries, this.qk_nope_head_dim, this.v_head_dim, this.kv_lora_rank)
    wants_gradient = torch.is_grad_enabled() and (this.training or nope.requires_grad)
    # several queries without a mask are left to the attention function, which knows the keys they
    # see
    readable = (
        queries == 1
        if mask is None
        else isinstance(mask, Tensor) and (mask.dim() == 4 or queries == 1)
    )
    # offloaded weights are on another device; adapted and quantized layers have none to absorb
    plain = type(this.kv_b_proj) is nn.Linear and this.kv_b_proj.weight.device == nope.device
    # autocast leaves rotary queries and latents wider than the products: the explicit form takes
    # both
    narrowed = torch.is_autocast_enabled(nope.device.type)
    return pays and not wants_gradient and readable and plain and not narrowed


def _absorbed(
    this: Any, nope: Tensor, rope: Tensor, latent: Tensor, key_rope: Tensor, mask: Tensor | None
) -> Context:
    """Attend to the cached latents and rotary keys directly; eager attention also returns its
    weights.
    """
    heads = this.kv_b_proj.weight.view(
        -1, this.qk_nope_head_dim + this.v_head_dim, this.kv_lora_rank
    )
    # views: nothing is copied
    up_key = heads[:, : this.qk_nope_head_dim]
    up_value = heads[:, this.qk_nope_head_dim :]
    query = absorb_query(nope, up_key)
    if mask is not None and mask.dim() == 2:
        # flash attention's mask: true for real tokens
        mask = mask[:, None, None].bool()
    mask = None if mask is None else mask[..., : latent.shape[2]]
    if this.config._attn_implementation != "eager":
        z = latent_decode(query, rope, latent[:, 0], key_rope[:, 0], this.scaling, mask)
        return expand_value(z, up_value).transpose(1, 2), None
    # whole maps, as every eager attention makes them
    scores = latent_scores(query, rope, latent[:, 0], key_rope[:, 0], this.scaling, mask)
    block = scores.whole()
    weights = (
        scores.weights(block, scores.room([block])).view(*query.shape[:-1], -1).to(query.dtype)
    )
    return expand_value(weights @ latent, up_value).transpose(1, 2), weights


def _explicit(
    this: Any,
    nope: Tensor,
    rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Context:
    """Expand all heads' keys ``[B, H, S, Dn + P]`` and values ``[B, H, S, Dv]``; apply the
    configured attention.
    """
    up = this.kv_b_proj(latent[:, 0])
    up = up.view(*up.shape[:2], -1, this.qk_nope_head_dim + this.v_head_dim).transpose(1, 2)
    key_nope, value = torch.split(up, [this.qk_nope_head_dim, this.v_head_dim], -1)
    key = torch.cat([key_nope, key_rope.expand(-1, key_nope.shape[1], -1, -1)], -1)
    # each modeling file has an eager attention of its own
    eager = this.home.eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(this.config._attn_implementation, eager)
    dropout = this.attention_dropout if this.training else 0.0
    query = torch.cat([nope, rope], -1)
    return cast(
        Context,
        attend(this, query, key, value, mask, dropout=dropout, scaling=this.scaling, **options),
    )
