"""Turn converted MLA weights into the tensors that are stored, for the stock classes and for layout
``kvfold``, with the constant latent channel of layout ``free``.

In DeepSeek's names, ``kv_a_proj_with_mqa`` computes the latent and the shared rotary key,
``kv_a_layernorm`` normalizes the latent, and ``kv_b_proj`` expands it to the keys and values of all
heads. ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj`` do the same for a latent of the queries.
``R`` is the stored rank, the constant channel included; ``LatentWeights.rank`` does not count it.

DeepSeek's attention normalizes its latents, but the source's attention does not, so the norm must
have almost no effect. In layout ``engine`` the norm divides by the true rms, so the latent is first
scaled to an rms that is usually one (`adapt_to_norm` in ``transforms/latent/variants.py``).

In layout ``free`` the last channel of each latent is a constant ``B``, set by a bias. It is so
large that the norm divides by about ``B / sqrt(R)`` for every token: for a latent ``c``, the
relative error is about ``|c|^2 / (2 B^2)``. ``B`` and the norm's weight are powers of two, which
are exact in bfloat16 and float16; the rest of the factor goes into the weights that read the
latent.

The constant's norm weight is zero, which keeps it out of the cache: it is a thousand times larger
than the other channels, and would ruin the scale of a rounded cache. Nothing is lost: constant
parts of values move into the output projection's bias, and constant parts of keys change all scores
of a query equally, so they do not change its attention.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert.targets.mla.spec import ATTENTION, MlaSpec
from kvfold.convert.transforms.latent.latent_weights import LatentWeights

# How far the logits of the reference MHA model are off as an exact MLA in float32
# (measured by a script in git history, 2026-11-24): 64: 6e-3, 256: 4e-4, from 1024 on 6e-5, which
# is rounding. Not more, as float16 has to hold c sqrt(R) / B of the weakest channels worth having.
CONSTANT = 1024.0
_NORM_OF = {"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"}
_READERS = ("q_b_proj", "kv_b_proj")


def compute_latent_norm_weight(rank: int) -> float:
    """Return the weight of a latent's RMSNorm in layout ``free``: the power of two nearest to ``B /
    sqrt(R)``, for the value B of the constant channel and the stored rank R, which counts this
    channel.
    """
    return float(2.0 ** round(math.log2(CONSTANT / math.sqrt(rank))))


def encode_stock_mla(
    latent: LatentWeights, layer: int, spec: MlaSpec, yarn_factor: float = 1.0
) -> dict[str, Tensor]:
    """Return the attention tensors of ``layer`` for a stock MLA class, by their stored names.
    ``yarn_factor`` is the factor of the rotary embedding in layout ``engine``.
    """
    # No bias may be left out without a word: only a constant channel, or a query latent, stores it.
    assert (
        spec.has_constant_channel
        or latent.down_bias is latent.rope_key_bias is latent.o_bias is None
    )
    assert latent.query is not None or latent.q_nope_bias is latent.q_rope_bias is None
    latent = pad_heads(latent, spec)
    # DeepSeek's attention multiplies the scores of YaRN by the square of this.
    growth = 0.1 * math.log(yarn_factor) + 1
    latent = replace(latent, scale=latent.scale / growth**2)
    tensors = {**_encode_queries(latent), **_encode_keys_and_values(latent, spec)}
    tensors["o_proj.weight"] = latent.o.flatten(1)
    if spec.has_constant_channel:
        tensors["o_proj.bias"] = _zeros_if_none(latent.o_bias, latent.o[:, 0, 0])
    return {
        f"{ATTENTION.format(layer=layer)}.{name}": tensor.contiguous()
        for name, tensor in tensors.items()
    }


def encode_custom_mla(
    latent: LatentWeights, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the attention tensors of a layer in layout ``kvfold``, by name, reshaped to
    ``shapes``. Biases that the class has but the layer lacks are zero.
    """
    down_bias = _zeros_if_none(latent.down_bias, latent.down[:, 0])
    rope_bias = _zeros_if_none(latent.rope_key_bias, latent.rope_key[:, 0])
    tensors: dict[str, Tensor | None] = {
        "kv_down_proj.weight": torch.cat([latent.down, latent.rope_key]),
        "kv_down_proj.bias": torch.cat([down_bias, rope_bias]),
        "k_up_proj.weight": latent.uk,
        "v_up_proj.weight": latent.uv,
        "o_proj.weight": latent.o,
        "o_proj.bias": latent.o_bias,
    }
    norms = latent.norms
    if norms is not None:
        tensors |= {
            "q_proj.weight": norms.q,
            "q_proj.bias": norms.q_bias,
            "q_norm.weight": norms.q_norm.weight,
            "k_proj.weight": norms.k,
            "k_proj.bias": norms.k_bias,
            "k_up_proj.bias": norms.constant,
            "q_rope_proj.weight": norms.rope,
        }
    else:
        tensors["q_proj.weight"] = torch.cat([latent.q_nope, latent.q_rope], 1)
        if latent.q_nope_bias is not None and latent.q_rope_bias is not None:
            tensors["q_proj.bias"] = torch.cat([latent.q_nope_bias, latent.q_rope_bias], 1)
    encoded = {}
    for name, shape in shapes.items():
        tensor = tensors.get(".".join(name.split(".")[-2:]))
        tensor = latent.o.new_zeros(shape) if tensor is None else tensor.reshape(shape)
        encoded[name] = tensor.contiguous()
    return encoded


def interleave_rotary_dims(rows: Tensor, dim: int) -> Tensor:
    """Reorder the P rotary dims of ``rows`` along ``dim``: the two dims of a rotary pair, i and i +
    P/2, become neighbors, 2i and 2i + 1.

    ``(x_0 .. x_{n-1}, y_0 .. y_{n-1})`` becomes ``(x_0, y_0, x_1, y_1 .. x_{n-1}, y_{n-1})``.
    """
    return torch.stack(rows.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _encode_queries(latent: LatentWeights) -> dict[str, Tensor]:
    """Return the query tensors of a stock MLA class. They include the factor between the source's
    scale of the scores and DeepSeek's ``(N + P)^-1/2``.
    """
    factor = latent.scale * math.sqrt(latent.nope_dim + latent.rope_dim)
    query = latent.query or latent
    readout = _concatenate_head_dims(query.q_nope, query.q_rope).flatten(0, 1) * factor
    if latent.query is None:
        return {"q_proj.weight": readout}
    down = latent.query.down
    rank = len(down) + 1
    bias = readout.new_zeros(len(readout))
    if latent.q_nope_bias is not None and latent.q_rope_bias is not None:
        bias = _concatenate_head_dims(latent.q_nope_bias, latent.q_rope_bias).flatten() * factor
    readout = torch.cat([readout, (bias / CONSTANT)[:, None]], 1)
    return {
        "q_a_proj.weight": pad(down, (0, 0, 0, 1)),
        "q_a_proj.bias": pad(down.new_zeros(len(down)), (0, 1), value=CONSTANT),
        "q_a_layernorm.weight": down.new_full((rank,), compute_latent_norm_weight(rank)),
        "q_b_proj.weight": readout * _compute_norm_compensation(rank),
    }


def _encode_keys_and_values(latent: LatentWeights, spec: MlaSpec) -> dict[str, Tensor]:
    """Return the key and value tensors of a stock MLA class: the down-projection, the latent's
    norm, and the up-projection.
    """
    rope_key = interleave_rotary_dims(latent.rope_key, 0)
    # [H (N + D), R], per head keys then values
    read = torch.cat([latent.uk, latent.uv], 1).flatten(0, 1)
    if not spec.has_constant_channel:
        return {
            "kv_a_proj_with_mqa.weight": torch.cat([latent.down, rope_key]),
            "kv_a_layernorm.weight": latent.down.new_ones(latent.rank),
            "kv_b_proj.weight": read,
        }
    rank = latent.rank + 1
    weight = latent.down.new_full((rank,), compute_latent_norm_weight(rank))
    weight[-1] = 0
    down_bias = _zeros_if_none(latent.down_bias, latent.down[:, 0])
    rope_bias = interleave_rotary_dims(
        _zeros_if_none(latent.rope_key_bias, latent.rope_key[:, 0]), 0
    )
    return {
        "kv_a_proj_with_mqa.weight": torch.cat([pad(latent.down, (0, 0, 0, 1)), rope_key]),
        "kv_a_proj_with_mqa.bias": torch.cat([pad(down_bias, (0, 1), value=CONSTANT), rope_bias]),
        "kv_a_layernorm.weight": weight,
        "kv_b_proj.weight": pad(read, (0, 1)) * _compute_norm_compensation(rank),
    }


def _compute_norm_compensation(rank: int) -> float:
    """Return ``CONSTANT / sqrt(R)``, by which the RMSNorm of a latent divides, relative to the
    nearest power of two (`compute_latent_norm_weight`). The weights that read the latent are
    multiplied by this ratio, so that the norm has no effect.
    """
    return CONSTANT / math.sqrt(rank) / compute_latent_norm_weight(rank)


def _concatenate_head_dims(nope: Tensor, rope: Tensor) -> Tensor:
    """Concatenate unrotated dims ``[H, N, ...]`` and rotary dims ``[H, P, ...]`` of each head to
    ``[H, N + P, ...]``; the rotary dims become interleaved.
    """
    return torch.cat([nope, interleave_rotary_dims(rope, 1)], 1)


def _zeros_if_none(bias: Tensor | None, like: Tensor) -> Tensor:
    """Return ``bias``, or zeros of the shape of ``like`` if it is None."""
    return torch.zeros_like(like) if bias is None else bias


def pad_heads(latent: LatentWeights, spec: MlaSpec) -> LatentWeights:
    """Pad heads and rotary keys with zeros to the sizes stored in layout ``engine``, which the MLA
    kernels of inference engines support.
    """
    nope, value = spec.choose_head_dims(latent.value_dim)
    return replace(
        latent,
        rope_key=pad_rotary_pairs(latent.rope_key, 0, spec.rope_dim),
        q_nope=pad(latent.q_nope, (0, 0, 0, nope - latent.nope_dim)),
        q_rope=pad_rotary_pairs(latent.q_rope, 1, spec.rope_dim),
        uk=pad(latent.uk, (0, 0, 0, nope - latent.nope_dim)),
        uv=pad(latent.uv, (0, 0, 0, value - latent.value_dim)),
        o=pad(latent.o, (0, value - latent.value_dim)),
    )


def pad_rotary_pairs(rows: Tensor, dim: int, size: int) -> Tensor:
    """Move the rotary pairs of ``rows`` along ``dim`` to every ``k``-th pair of ``size`` dims, in
    half-split order; the other dims are zeros.

    Plain RoPE with ``size`` dims turns pair ``k i`` at the same frequency as plain RoPE with ``size
    / k`` dims turns pair ``i``.
    """
    step = size // rows.shape[dim]
    halves = torch.unflatten(rows.movedim(dim, -1), -1, (2, -1, 1))
    return pad(halves, (0, step - 1)).flatten(-3).movedim(-1, dim)


@dataclass(frozen=True)
class ConstantSlice:
    """The slice of a tensor that writes or reads the constant latent channel, and the learning rate
    that training uses for it.

    axis, index: the slice ``index`` along ``axis``
    pace: its learning rate relative to the rest of the tensor; 0 freezes it
    """

    axis: int
    index: int
    pace: float


def find_constant_slices(tensors: Mapping[str, Tensor]) -> dict[str, ConstantSlice]:
    """Return the slice that belongs to the constant latent channel in each of ``tensors`` that has
    one, by tensor name. Values are not read, only shapes.

    Training must preserve the constant: gradient steps would change the bias and the channel's row
    of zeros for a slightly lower error, so these are frozen. The columns that read the channel have
    an input ``B`` times larger than the others, so their learning rate is ``B`` times lower.
    """
    slices: dict[str, ConstantSlice] = {}
    for name in tensors:
        *path, projection, kind = name.split(".")
        if projection in _NORM_OF:
            rank = len(tensors[".".join([*path, _NORM_OF[projection], "weight"])])
            slices[name] = ConstantSlice(0, rank - 1, 0.0)
        elif projection in _READERS and kind == "weight":
            slices[name] = ConstantSlice(1, tensors[name].shape[1] - 1, 1 / CONSTANT)
    return slices


def list_latent_norms(names: Iterable[str]) -> list[str]:
    """Return those of the tensor ``names`` that are RMSNorm weights of an MLA latent, which
    training must not change.
    """
    norms = tuple(f"{norm}.weight" for norm in _NORM_OF.values())
    return [name for name in names if name.endswith(norms)]
