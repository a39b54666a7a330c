"""Multi-head latent attention (DeepSeek-V2 2024), explicit and absorbed.

Shapes: ``query_nope [B, H, T, Dn]``, ``query_rope [B, H, T, P]``, ``latent [B, S, R + P]`` (the
cache: latent ``c``, then the rotary key shared by all heads), ``up_key [H, Dn, R]``, ``up_value [H,
Dv, R]``, result ``[B, H, T, Dv]``. With ``k_rope`` for the last ``P`` numbers of a slot,

    score_hts = scale * (q_nope,ht . W_uk,h c_s + q_rope,ht . k_rope,s)
    result_ht = sum_s softmax(score)_hts W_uv,h c_s

Explicit: compute ``W_uk c`` and ``W_uv c`` for all heads and slots. This is best for prefill and
training. Absorbed (sec. 2.1.2): since ``q_nope . W_uk c = (W_uk^T q_nope) . c`` and ``sum_s a_s
W_uv c_s = W_uv sum_s a_s c_s``, attention can run over the cache itself, as one key head with ``R +
P`` dims whose first ``R`` dims are also the values. This is best for decoding.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from kvfold.attention.blocked import AttentionScores, weigh_values
from kvfold.attention.checks import expect_dtype_and_device, expect_shape
from kvfold.attention.grouped import apply_grouped_attention
from kvfold.attention.mask import Visibility, check_mask_arguments

_HAS_TRITON = find_spec("triton") is not None
# DeepSeek's sizes; the kernel's tiles are laid out for them
_KERNEL_RANK = 512
_KERNEL_ROPE = 64
# decoding steps see the whole cache; what is hidden comes as a mask
_EVERYTHING = Visibility(causal=False)


def latent_attention(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    up_key: Tensor,
    up_value: Tensor,
    *,
    absorbed: bool,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return multi-head latent attention over the cache slots that each query sees: ``[B, H, T,
    Dv]``.

    ``absorbed`` selects one of the two forms above. Queries and the rotary keys in ``latent`` must
    already be rotated. ``scale`` is ``1 / sqrt(Dn + P)`` by default. Raises ValueError for
    incompatible shapes, dtypes or devices.
    """
    expect_shape("query_nope", query_nope, "B H T Dn", {})
    sizes = dict(zip(("B", "H", "T", "Dn"), query_nope.shape, strict=True))
    sizes |= {"R": up_key.shape[-1], "R+P": up_key.shape[-1] + query_rope.shape[-1]}
    for name, tensor, dims in (
        ("query_rope", query_rope, "B H T P"),
        ("latent", latent, "B S R+P"),
        ("up_key", up_key, "H Dn R"),
        ("up_value", up_value, "H Dv R"),
    ):
        expect_shape(name, tensor, dims, sizes)
        expect_dtype_and_device(name, tensor, "query_nope", query_nope)
    slots = latent.shape[1]
    rank = up_key.shape[2]
    rule = check_mask_arguments(query_nope, slots, causal, offset, window, starts, lengths)
    scale = (query_nope.shape[-1] + query_rope.shape[-1]) ** -0.5 if scale is None else scale
    if absorbed:
        query = torch.einsum("bhtd,hdr->bhtr", query_nope, up_key)
        # the kernel has no gradient, and would read the keys outside of a window
        tensors = (query, query_rope, latent)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if window is None and not learns and kernel_supports(query, query_rope, None):
            seen = None
            if not rule.sees_all(1, slots):
                seen = rule.make_mask(slice(0, 1), slice(0, slots), latent.device)[:, None]
            c = latent[..., :rank]
            z = attend_to_latents(query, query_rope, c, latent[..., rank:], scale, seen)
        else:
            keys = latent[:, None]
            query = torch.cat([query, query_rope], -1)
            z = apply_grouped_attention(query, keys, keys[..., :rank], rule, scale)
        return torch.einsum("bhtr,hdr->bhtd", z, up_value)
    # every head gets keys and values of its own: cheaper where many queries share them
    nope, value = (
        torch.einsum("bsr,hdr->bhsd", latent[..., :rank], up) for up in (up_key, up_value)
    )
    rope = latent[:, None, :, rank:].expand(-1, len(up_key), -1, -1)
    key = torch.cat([nope, rope], -1)
    query = torch.cat([query_nope, query_rope], -1)
    return apply_grouped_attention(query, key, value, rule, scale)


def attend_to_latents(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``softmax(scale * (query . latent + query_rope . key_rope) + mask) latent``, ``[B, H,
    T, R]``, without gradients.

    ``query [B, H, T, R]`` is already absorbed; ``query_rope [B, H, T, P]``; ``latent [B, S, R]``
    and ``key_rope [B, S, P]`` are separate, as in transformers' cache. ``mask [1|B, 1|H, T, S]`` is
    boolean (True means visible) or is added to the scores.
    """
    # eagerly, an operator's call is slower than a short step
    if torch.compiler.is_compiling():
        result: Tensor = _latent_decode_operator(query, query_rope, latent, key_rope, scale, mask)
        return result
    if kernel_supports(query, query_rope, mask):
        # imports Triton, which is optional
        from kvfold.attention.kernel import run_latent_kernel

        seen = None if mask is None else mask[:, 0, 0]
        return run_latent_kernel(query, query_rope, latent, key_rope, scale, mask=seen)
    # all heads share one key head, and nothing of the cache is copied
    queries = (query.unsqueeze(1), query_rope.unsqueeze(1))
    keys = (latent.unsqueeze(1), key_rope.unsqueeze(1))
    scores = AttentionScores(queries, keys, scale, _EVERYTHING, mask)
    return weigh_values(scores, keys[0]).squeeze(1)


def kernel_supports(query: Tensor, query_rope: Tensor, mask: Tensor | None) -> bool:
    """True if the Triton kernel supports this call: CUDA, half precision, one query per sequence,
    ``R <= 512``, ``P <= 64``.

    The card needs compute capability 8.0, as Triton does. A mask must be boolean and the same for
    all heads. Shapes as in ``attend_to_latents``.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if not _HAS_TRITON or query.device.type != "cuda" or not half or query.shape[2] != 1:
        return False
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    if query.shape[-1] > _KERNEL_RANK or query_rope.shape[-1] > _KERNEL_ROPE:
        return False
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)


@torch.library.custom_op("kvfold::latent_decode", mutates_args=())
def _latent_decode_operator(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """The torch operator of `attend_to_latents`, which torch.compile calls without
    tracing into it.
    """
    return attend_to_latents(query, query_rope, latent, key_rope, scale, mask)


@_latent_decode_operator.register_fake
def _make_fake_result(query: Tensor, *rest: object) -> Tensor:
    """Return an empty result of the right shape, from which torch.compile infers the operator's
    output.
    """
    return query.new_empty(query.shape)


def is_absorption_cheaper(queries: int, nope_dim: int, value_dim: int, rank: int) -> bool:
    """True if absorbed attention takes fewer multiplications than explicit attention for
    ``queries`` new tokens.

    Per slot and head: ``T (2 R + P)`` absorbed, ``(Dn + Dv) R + T (Dn + P + Dv)`` explicit.
    """
    # both sides without their common terms
    explicit = nope_dim + value_dim
    return queries * (2 * rank - explicit) < explicit * rank
