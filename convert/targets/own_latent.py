"""Latent attention in layout ``kvfold``: its sizes and its tensors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.families.model import Model
from kvfold.convert.families.values import evaluate
from kvfold.convert.targets.mla.config import LatentTarget, cached_divisors
from kvfold.convert.targets.own_code import Shape, own_layout, projection
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.latent.weights import KeptNorms, LatentWeights

LATENT, NORMED = "latent", "normed_latent"  # variants


def own_latent_layout(
    source: Model, checkpoint: Checkpoint, target: LatentTarget, theta: Sequence[Sequence[float]], dtype: str | None
) -> TargetLayout:
    """The checkpoint that caches ``target.kv_rank + target.rope_dim`` elements, rotating by ``theta [layers][P/2]``.

    Norms on queries and keys take ``cached_divisors`` elements more. ``dtype`` as in ``own_folded_layout``.
    """
    norm, divisors = source.qk_norm, cached_divisors(source, target)
    facts: dict[str, Any] = {
        "variant": LATENT if norm is None else NORMED,
        "kv_rank": target.kv_rank,
        "rope_dim": target.rope_dim,
        "qkv_bias": source.has_bias("q"),
        "o_bias": True,
    }
    if norm is not None:
        # `flat` norms act on all heads at once; the gain of a norm is its weight plus `offset`.
        eps = float(evaluate(norm.eps, source.values))
        described = {"kind": norm.kind, "flat": norm.extent == "flat", "eps": eps, "offset": norm.offset}
        facts |= {"kv_heads": source.geometry.kv_heads, "norm": described}

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.transforms.latent.variants import rotated  # needs torch

        return _tensors(source, layer, rotated(weights) if target.rotated else weights)

    return own_layout(
        source,
        checkpoint,
        facts,
        [latent_shapes(source, layer, target.kv_rank, target.rope_dim) for layer in range(source.geometry.layers)],
        dtype,
        kind=f"MLA {target.kv_rank}+{target.rope_dim}" + (f"+{divisors}" if divisors else ""),
        cache_elements=target.kv_rank + target.rope_dim + divisors,
        encode=encode,
        layer_facts=[{"frequencies": list(each)} for each in theta],
    )


def latent_shapes(source: Model, layer: int, rank: int, rope: int) -> dict[str, Shape]:
    """The tensors of the attention of ``layer`` with ``rank`` latent channels and ``rope`` rotary dims, by name."""
    size = source.geometry
    width, heads, dim = size.model_dim, size.heads, size.head_dim
    if source.qk_norm is not None:
        queries, more = heads * dim, _norm_shapes(source, rope)
    else:
        queries, more = heads * (dim + rope), {}
    shapes: dict[str, Shape] = {
        "q_proj.weight": (queries, width),
        "kv_down_proj.weight": (rank + rope, width),
        "kv_down_proj.bias": (rank + rope,),
        "k_up_proj.weight": (heads * dim, rank),
        "v_up_proj.weight": (heads * dim, rank),
        "o_proj.weight": (width, heads * dim),
        "o_proj.bias": (width,),
    }
    if source.has_bias("q"):
        shapes["q_proj.bias"] = (queries,)
    shapes |= more
    return {projection(source, layer, name): shape for name, shape in shapes.items()}


def _norm_shapes(source: Model, rope: int) -> dict[str, Shape]:
    """What norms on queries and keys add."""
    size = source.geometry
    keys = size.kv_heads * size.head_dim
    shapes: dict[str, Shape] = {
        "q_norm.weight": (size.heads, size.head_dim),
        "k_proj.weight": (keys, size.model_dim),
        "k_up_proj.bias": (size.heads * size.head_dim,),
    }
    if rope:
        shapes["q_rope_proj.weight"] = (size.heads * rope, size.head_dim)
    if source.has_bias("k"):
        shapes["k_proj.bias"] = (keys,)
    return shapes


def _tensors(source: Model, layer: int, latent: "LatentWeights") -> dict[str, "Tensor"]:
    import torch

    def joined(first: "Tensor | None", second: "Tensor | None", like: tuple["Tensor", "Tensor"]) -> "Tensor":
        parts = (zeros if part is None else part for part, zeros in zip((first, second), like, strict=True))
        return torch.cat(list(parts))

    down, rope = latent.down.new_zeros(latent.rank), latent.down.new_zeros(latent.rope_dim)
    tensors = {
        "kv_down_proj.weight": torch.cat([latent.down, latent.rope_key]),
        "kv_down_proj.bias": joined(latent.down_bias, latent.rope_key_bias, (down, rope)),
        "k_up_proj.weight": latent.uk.flatten(0, 1),
        "v_up_proj.weight": latent.uv.flatten(0, 1),
        "o_proj.weight": latent.o.flatten(1),
        "o_proj.bias": latent.o.new_zeros(latent.model_dim) if latent.o_bias is None else latent.o_bias,
    }
    if latent.norms is not None:
        tensors |= _norm_tensors(latent.norms)
    else:
        tensors["q_proj.weight"] = torch.cat([latent.q_nope, latent.q_rope], 1).flatten(0, 1)
        if latent.q_nope_bias is not None and latent.q_rope_bias is not None:
            tensors["q_proj.bias"] = torch.cat([latent.q_nope_bias, latent.q_rope_bias], 1).flatten()
    return {projection(source, layer, name): tensor.contiguous() for name, tensor in tensors.items()}


def _norm_tensors(norms: "KeptNorms") -> dict[str, "Tensor"]:
    tensors = {
        "q_proj.weight": norms.q.flatten(0, 1),
        "q_norm.weight": norms.q_norm.weight,
        "k_proj.weight": norms.k.flatten(0, 1),
        "k_up_proj.bias": norms.constant.flatten(),
    }
    if norms.rope.shape[1]:
        tensors["q_rope_proj.weight"] = norms.rope.flatten(0, 1)
    biases = {"q_proj.bias": norms.q_bias, "k_proj.bias": norms.k_bias}
    return {**tensors, **{name: bias.flatten() for name, bias in biases.items() if bias is not None}}
