"""Attention layers for the tests of the transforms: random numbers, statistics, and the formula in
float64.

Shapes: inputs ``x [B, T, E]``, rotated rows ``[..., T, D]``, weights as ``AttentionWeights`` has
them.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from helpers.checkpoints import read_json
from kvfold.convert.transforms.head_norms import project_with_norms
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, LayerStatistics, Rotary

NORMS = read_json(Path(__file__).with_name("norms.json"))


def normal(seed, *shape):
    """Standard normal numbers in float64, the same for the same seed and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_norm(seed, heads, dims, name):
    """A norm of ``NORMS`` with random gains, about 1.5, and biases."""
    kind = NORMS[name]
    rows = 1 if kind.get("shared") else heads
    gain = (1.5 + 0.3 * normal(seed, rows, dims)).expand(heads, dims) - kind.get("offset", 0.0)
    bias = (0.2 * normal(seed + 1, rows, dims)).expand(heads, dims) if kind.get("bias") else None
    return HeadNorm(**{**kind, "weight": gain, "bias": bias})


def plain_rotary(dims, base=100.0):
    """Rotary embedding of the first ``dims`` dims, with frequencies ``base^(-i / dims)`` for even
    i; none for 0.
    """
    return Rotary(base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / max(dims, 1)))


def random_layer(heads=4, kv_heads=2, dim=8, model=24, bias=False, seed=0):
    """Random weights, the statistics of correlated inputs, and those inputs ``[160, model]``."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    maps = rand(heads, dim, model) * 2, rand(kv_heads, dim, model) * 2, rand(kv_heads, dim, model)
    output = rand(model, heads, dim)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim), (model,)] if bias else []
    weights = AttentionWeights(*maps, output, *(rand(*shape) for shape in shapes))
    x = rand(160, model) * math.sqrt(model) @ rand(model, model) + rand(model)
    return weights, LayerStatistics(x.T @ x / 160, x.mean(0), 160, rand(heads, 12).softmax(1)), x


def turned(rows, angle):
    """``rows [..., D]`` whose pairs are turned by ``angle [..., pairs]``; dims after the pairs
    stay.
    """
    pairs = angle.shape[-1]
    z = torch.complex(rows[..., :pairs], rows[..., pairs : 2 * pairs]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((z.real, z.imag, rows[..., 2 * pairs :]), -1)


def rotated(rows, theta):
    """``rows [..., T, D]`` turned by ``position * theta``."""
    return turned(rows, torch.arange(rows.shape[-2], dtype=torch.float64)[:, None] * theta)


def statistics_of(x, heads):
    """The statistics of inputs ``x [B, T, E]`` to a layer whose heads look equally far at all T
    distances.
    """
    flat = x.flatten(0, 1)
    profile = torch.full((heads, x.shape[1]), 1 / x.shape[1], dtype=torch.float64)
    return LayerStatistics(flat.T @ flat / len(flat), flat.mean(0), len(flat), profile)


def dense_distances(profile, reach, uniform=0.0, tail=0.5):
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


def normed_statistics(weights, x):
    """The same, with those of what is behind the norms of ``weights`` on queries and keys."""
    flat = x.flatten(0, 1)
    rows, divisors = project_with_norms(weights, flat)
    cross = torch.einsum(
        "nhd,ne->hde", rows, torch.nn.functional.pad(flat, (0, 1), value=1.0)
    ) / len(flat)
    seen = torch.stack([divisors, divisors.square()], -1).mean(0)
    return replace(statistics_of(x, weights.heads), normed=cross, divisors=seen)


def normalized(y, norm):
    """``y [B, H, T, D]`` after the norm, as the definition of each kind says."""
    if norm is None:
        return y
    over = (1, 3) if norm.extent == "flat" else (3,)
    if norm.kind == "layer":
        y = y - y.mean(over, keepdim=True)
    y = y / (y.square().mean(over, keepdim=True) + norm.eps).sqrt()
    y = y * (norm.weight.double() + norm.offset)[:, None]
    return y if norm.bias is None else y + norm.bias.double()[:, None]


def project_heads(weight, bias, x):
    """``weight [H, D, E]`` and ``bias [H, D]`` on ``x [..., T, E]``, in float64: ``[..., H, T,
    D]``.
    """
    y = torch.einsum("hde,...te->...htd", weight.double(), x)
    return y if bias is None else y + bias.double()[:, None]


def mix_values(scores, v, o, o_bias):
    """The output ``[..., T, E]`` of causal attention with ``scores [..., H, T, T]``."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    y = torch.einsum("ehd,...htd->...te", o.double(), mixed)
    return y if o_bias is None else y + o_bias.double()


def attend(weights, x, rotary):
    """The layer's causal output ``[B, T, E]`` in float64: project, normalize, rotate, softmax,
    project.
    """
    repeat = weights.heads // weights.kv_heads
    amplitude = torch.ones(weights.head_dim, dtype=torch.float64)
    amplitude[: rotary.dims] = rotary.amplitude
    q, k = (
        amplitude * rotated(normalized(project_heads(weight, bias, x), norm), rotary.theta)
        for weight, bias, norm in (
            (weights.q, weights.q_bias, weights.q_norm),
            (weights.k, weights.k_bias, weights.k_norm),
        )
    )
    v = project_heads(weights.v, weights.v_bias, x).repeat_interleave(repeat, 1)
    scores = q @ k.repeat_interleave(repeat, 1).mT / math.sqrt(weights.head_dim)
    return mix_values(scores, v, weights.o, weights.o_bias)


def attend_latent(latent, x, normed=False):
    """The causal output ``[..., T, E]`` of ``latent`` for ``x [..., T, E]``, by the formula of
    `LatentWeights`.

    ``normed``: an RMSNorm without weights and with an eps of 1e-6 is applied to both latents.
    """

    def compress(weight, bias, normed=normed):
        c = (x @ weight.mT + (0 if bias is None else bias))[..., None, :, :]
        return c / c.square().mean(-1, keepdim=True).add(1e-6).sqrt() if normed else c

    c = compress(latent.down, latent.down_bias)
    key = compress(latent.rope_key, latent.rope_key_bias, normed=False)
    q = latent.query or latent
    source = compress(q.down, None).squeeze(-3) if latent.query else x
    nope = project_heads(q.q_nope, latent.q_nope_bias, source)
    rope = project_heads(q.q_rope, latent.q_rope_bias, source)
    scores = nope @ (c @ latent.uk.mT).mT
    scores = scores + rotated(rope, latent.theta) @ rotated(key, latent.theta).mT
    return mix_values(scores * latent.scale, c @ latent.uv.mT, latent.o, latent.o_bias)


def relative_error(result, expected):
    """``|result - expected| / |expected|``, Frobenius norms."""
    return ((result - expected).norm() / expected.norm()).item()
