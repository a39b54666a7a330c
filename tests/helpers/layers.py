"""Attention layers for the tests of the transforms: random numbers, statistics, and the formula in
float64.

Shapes: inputs ``x [B, T, E]``, rotated rows ``[..., T, D]``, weights as ``AttentionWeights`` has
them.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.head_norms import project_with_norms
from kvfold.convert.transforms.latent.latent_weights import LatentWeights
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, LayerStatistics, Rotary

NORMS = {
    "rms one row": {"kind": "rms", "shared": True},
    "rms one row gain minus one": {"kind": "rms", "shared": True, "offset": 1.0},
    "rms row per head": {"kind": "rms"},
    "rms over all heads": {"kind": "rms", "extent": "flat"},
    "layer one row": {"kind": "layer", "shared": True},
    "layer row per head with bias": {"kind": "layer", "eps": 1e-5, "bias": True},
    "layer over all heads with bias": {"kind": "layer", "extent": "flat", "bias": True},
}


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64, the same for the same seed and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_norm(seed: int, heads: int, dims: int, name: str) -> HeadNorm:
    """A norm of ``NORMS`` with random gains, about 1.5, and biases."""
    kind = NORMS[name]
    rows = 1 if kind.get("shared") else heads
    gain = (1.5 + 0.3 * normal(seed, rows, dims)).expand(heads, dims) - kind.get("offset", 0.0)
    bias = (0.2 * normal(seed + 1, rows, dims)).expand(heads, dims) if kind.get("bias") else None
    return HeadNorm(**{**kind, "weight": gain, "bias": bias})


def plain_rotary(dims: int, base: float = 100.0) -> Rotary:
    """Rotary embedding of the first ``dims`` dims, with frequencies ``base^(-i / dims)`` for even
    i; none for 0.
    """
    return Rotary(base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / max(dims, 1)))


def random_layer(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    model: int = 24,
    bias: bool = False,
    seed: int = 0,
) -> tuple[AttentionWeights, LayerStatistics, Tensor]:
    """Random weights, the statistics of correlated inputs, and those inputs ``[160, model]``."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    maps = rand(heads, dim, model) * 2, rand(kv_heads, dim, model) * 2, rand(kv_heads, dim, model)
    weights = AttentionWeights(*maps, rand(model, heads, dim))
    if bias:
        biases = {
            "q_bias": (heads, dim),
            "k_bias": (kv_heads, dim),
            "v_bias": (kv_heads, dim),
            "o_bias": (model,),
        }
        weights = replace(weights, **{name: rand(*shape) for name, shape in biases.items()})
    x = rand(160, model) * math.sqrt(model) @ rand(model, model) + rand(model)
    return weights, LayerStatistics(x.T @ x / 160, x.mean(0), 160, rand(heads, 12).softmax(1)), x


def turned(rows: Tensor, angle: Tensor) -> Tensor:
    """``rows [..., D]`` whose pairs are turned by ``angle [..., pairs]``; dims after the pairs
    stay.
    """
    pairs = angle.shape[-1]
    z = torch.complex(rows[..., :pairs], rows[..., pairs : 2 * pairs]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((z.real, z.imag, rows[..., 2 * pairs :]), -1)


def rotated(rows: Tensor, theta: Tensor) -> Tensor:
    """``rows [..., T, D]`` turned by ``position * theta``."""
    return turned(rows, torch.arange(rows.shape[-2], dtype=torch.float64)[:, None] * theta)


def statistics_of(x: Tensor, heads: int) -> LayerStatistics:
    """The statistics of inputs ``x [B, T, E]`` to a layer whose heads look equally far at all T
    distances.
    """
    flat = x.flatten(0, 1)
    profile = torch.full((heads, x.shape[1]), 1 / x.shape[1], dtype=torch.float64)
    return LayerStatistics(flat.T @ flat / len(flat), flat.mean(0), len(flat), profile)


def dense_distances(profile: Tensor, reach: int, uniform: float = 0.0, tail: float = 0.5) -> Tensor:
    """The mixture of distances that fits average over, ``[H, reach]``, written out for ``profile
    [H, S]``.
    """
    octaves = torch.tensor([1 / (1 + distance) for distance in range(reach)], dtype=torch.float64)
    ahead = torch.tensor(
        [float(reach - distance) for distance in range(reach)], dtype=torch.float64
    )
    seen = torch.nn.functional.pad(profile.double(), (0, reach - profile.shape[1]))
    mixed = (1 - tail) * seen + tail * octaves / octaves.sum()
    return (1 - uniform) * mixed + uniform * ahead / ahead.sum()


def normed_statistics(weights: AttentionWeights, x: Tensor) -> LayerStatistics:
    """The same, with those of what is behind the norms of ``weights`` on queries and keys."""
    flat = x.flatten(0, 1)
    rows, divisors = project_with_norms(weights, flat)
    cross = torch.einsum(
        "nhd,ne->hde", rows, torch.nn.functional.pad(flat, (0, 1), value=1.0)
    ) / len(flat)
    seen = torch.stack([divisors, divisors.square(), rows.square().sum(-1)], -1).mean(0)
    return replace(statistics_of(x, weights.heads), normed=cross, divisors=seen)


def normalized(y: Tensor, norm: HeadNorm | None) -> Tensor:
    """``y [B, H, T, D]`` after the norm, as the definition of each kind says."""
    if norm is None:
        return y
    over = (1, 3) if norm.extent == "flat" else (3,)
    if norm.kind == "layer":
        y = y - y.mean(over, keepdim=True)
    y = y / (y.square().mean(over, keepdim=True) + norm.eps).sqrt()
    y = y * (norm.weight.double() + norm.offset)[:, None]
    return y if norm.bias is None else y + norm.bias.double()[:, None]


def attend(weights: AttentionWeights, x: Tensor, rotary: Rotary) -> Tensor:
    """The layer's causal output ``[B, T, E]`` in float64: project, normalize, rotate, softmax,
    project.
    """

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.einsum("hde,bte->bhtd", weight.double(), x)
        return y if bias is None else y + bias.double()[:, None]

    repeat = weights.heads // weights.kv_heads
    amplitude = torch.ones(weights.head_dim, dtype=torch.float64)
    amplitude[: rotary.dims] = rotary.amplitude
    q = amplitude * rotated(
        normalized(project(weights.q, weights.q_bias), weights.q_norm), rotary.theta
    )
    k = amplitude * rotated(
        normalized(project(weights.k, weights.k_bias), weights.k_norm), rotary.theta
    )
    v = project(weights.v, weights.v_bias).repeat_interleave(repeat, 1)
    scores = q @ k.repeat_interleave(repeat, 1).mT / math.sqrt(weights.head_dim)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    y = torch.einsum("ehd,bhtd->bte", weights.o.double(), mixed)
    return y if weights.o_bias is None else y + weights.o_bias.double()


def attend_latent(latent: LatentWeights, x: Tensor, normed: bool = False) -> Tensor:
    """The causal output ``[..., T, E]`` of ``latent`` for ``x [..., T, E]``, by the formula of
    `LatentWeights`.

    ``normed``: an RMSNorm without weights and with an eps of 1e-6 is applied to both latents.
    """

    def rows(weight: Tensor, bias: Tensor | None, inputs: Tensor = x) -> Tensor:
        return inputs @ weight.mT + (0 if bias is None else bias)

    def norm(c: Tensor) -> Tensor:
        return c / c.square().mean(-1, keepdim=True).add(1e-6).sqrt() if normed else c

    c = norm(rows(latent.down, latent.down_bias))
    key = rows(latent.rope_key, latent.rope_key_bias)
    source, q = (
        (x, latent) if latent.query is None else (norm(rows(latent.query.down, None)), latent.query)
    )
    out: Tensor = torch.zeros(()) if latent.o_bias is None else latent.o_bias
    for head in range(latent.heads):
        nope, rope = (
            rows(weight[head], None if bias is None else bias[head], source)
            for weight, bias in ((q.q_nope, latent.q_nope_bias), (q.q_rope, latent.q_rope_bias))
        )
        score = (
            nope @ (c @ latent.uk[head].mT).mT
            + rotated(rope, latent.theta) @ rotated(key, latent.theta).mT
        )
        future = torch.ones_like(score, dtype=torch.bool).triu(1)
        mixed = (score * latent.scale).masked_fill(future, -math.inf).softmax(-1) @ (
            c @ latent.uv[head].mT
        )
        out = out + mixed @ latent.o[:, head].mT
    return out


def relative_error(result: Tensor, expected: Tensor) -> float:
    """``|result - expected| / |expected|``, Frobenius norms."""
    return ((result - expected).norm() / expected.norm()).item()
