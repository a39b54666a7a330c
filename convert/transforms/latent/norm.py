"""A latent that stays behind a live RMSNorm, for readers that leave no way around it.

A norm does no harm to vectors that all have the same length, and the coordinates of a latent are free: its readers
undo any invertible matrix that multiplies it. ``constant_length`` looks for coordinates in which its length varies
least.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.weights import LatentWeights, QueryLatent
from kvfold.convert.transforms.linalg import symmetric_eig

# Excess loss of a trained model in layout engine at 48 + 16, nats per token (recipes/benchmarks/bench_constants.py):

STEPS = 40  # of conjugate gradients; 0: 0.287, 10: 0.124, 40: 0.131
TOKENS = 32768  # a limit on time: a walk on a CPU hands over fewer
FLATTEST = 1e-3
"""Least to largest stretch, squared: what a direction may lose before rounding.

1e-6: 0.130, 1e-3: 0.131, 0.1: 0.172.
"""
_EXACT = 1e-2  # how far from one the rms may be where inputs come from an RMSNorm: rounding in bfloat16


def live_norm(latent: LatentWeights, inputs: Tensor) -> LatentWeights:
    """``latent`` in coordinates in which an RMSNorm of weight one changes it least, over ``inputs [..., E]``.

    Its rms is one on average, whatever the eps of the reader. The latent must not be centered: a norm acts on all of
    it. Raises ``ValueError`` when it has a bias.
    """
    if latent.down_bias is not None:
        raise ValueError("latent: expected one that is not centered (to_latent(..., centered=False)), found down_bias")
    down, back = coordinates(latent.down, inputs)
    renormed = replace(
        latent,
        down=_cast(down, latent.down),
        uk=_cast(latent.uk.double() @ back, latent.down),
        uv=_cast(latent.uv.double() @ back, latent.down),
    )
    if latent.query is None:
        return renormed
    query = latent.query
    down, back = coordinates(query.down, inputs)
    read = (_cast(part.double() @ back, query.down) for part in (query.q_nope, query.q_rope))
    return replace(renormed, query=QueryLatent(_cast(down, query.down), *read))


def coordinates(down: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[R, E]`` whose rms over ``inputs [..., E]`` is one, and ``back [R, R]``: ``down x = back (rows x)``.

    Exact where the latent is as wide as its inputs; float64.
    """
    exact = _whole_input(down, inputs) if down.shape[0] >= down.shape[1] else None
    if exact is not None:
        return exact
    forth, back = constant_length(down, inputs)
    return forth @ down.double(), back


def _whole_input(down: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
    """The inputs themselves as the latent, in the coordinates in which the norm before the layer left their rms at one.

    These follow from the inputs: the scales of the channels are the solution of ``sum_e d_e x_e^2 = 1`` for all tokens.
    None where there is no solution, since the layer before was no RMSNorm, and with too few tokens to tell.
    """
    rank, width = down.shape
    squares = inputs.reshape(-1, width)[:TOKENS].to(down.device).double().square()
    if len(squares) < 2 * width:
        return None
    gram = squares.mT @ squares
    energy = gram.diagonal().mean()
    gram.diagonal().add_(1e-12 * torch.where(energy > 0, energy, 1.0))
    scales = torch.linalg.solve(gram, squares.sum(0))
    uneven = float((squares @ scales - 1).square().mean().sqrt())
    if not (uneven < _EXACT and scales.min() > 0):
        return None
    root = (scales * rank).sqrt()
    pad = torch.nn.functional.pad
    return pad(root.diag(), (0, 0, 0, rank - width)), pad(down.double() / root, (0, rank - width))


def constant_length(down: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates ``forth [R, R]`` of ``c = down x`` with an rms of nearly one, and their inverse ``back``; float64.

    Least squares for a quadratic form ``c^T A c = R`` over the tokens, by conjugate gradients from the whitened latent
    on (tokens set apart say when to stop), projected on the positive definite ones; ``forth`` is a root of ``A``.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])[:TOKENS].to(down.device)
    latent = (rows @ down.to(rows.dtype).mT).double()
    white, undo = _whitening(latent)
    form = _constant_form(latent @ white.mT)
    stretch, axes = symmetric_eig(form)
    root = stretch.clamp_min(stretch[0] * FLATTEST).sqrt()
    forth, back = (root[:, None] * axes.mT) @ white, undo @ (axes / root)
    rms = (latent @ forth.mT).square().mean(-1).sqrt().mean()
    rms = torch.where(rms > 0, rms, 1.0)  # a latent that is always zero stays so
    return forth / rms, back * rms


def _whitening(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric whitening of ``latent [n, R]`` and its inverse; channels that never move keep their scale."""
    energy, axes = symmetric_eig(latent.mT @ latent / len(latent))
    root = energy.clamp_min(energy[0] * 1e-10).sqrt()
    root = torch.where(root > 0, root, 1.0)
    return (axes / root) @ axes.mT, (axes * root) @ axes.mT


def _constant_form(latent: Tensor) -> Tensor:
    """Symmetric ``A [R, R]`` with ``c^T A c`` close to ``R`` for whitened ``c [n, R]``: conjugate gradients on squares.

    Every eighth token judges; the step that does best by them is taken.
    """
    judging = torch.arange(len(latent), device=latent.device) % 8 == 7
    fitted, judges = latent[~judging], latent[judging] if judging.any() else latent
    rank = latent.shape[1]
    form = torch.eye(rank, dtype=latent.dtype, device=latent.device)
    best, least = form, _uneven(judges, form)
    left = rank - _lengths(fitted, form)
    gradient = _adjoint(fitted, left)
    step, energy = gradient, gradient.square().sum()
    for _ in range(STEPS):
        seen = _lengths(fitted, step)
        reach = energy / seen.square().mean().clamp_min(1e-300)
        form, left = form + reach * step, left - reach * seen
        gradient, before = _adjoint(fitted, left), energy
        energy = gradient.square().sum()
        step = gradient + energy / before.clamp_min(1e-300) * step
        if (uneven := _uneven(judges, form)) < least:
            best, least = form, uneven
    return best


def _lengths(latent: Tensor, form: Tensor) -> Tensor:
    """``c^T A c`` of every row."""
    return ((latent @ form) * latent).sum(1)


def _adjoint(latent: Tensor, weight: Tensor) -> Tensor:
    return (latent * weight[:, None]).mT @ latent / len(latent)


def _uneven(latent: Tensor, form: Tensor) -> float:
    return float((len(form) - _lengths(latent, form)).square().mean())


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like).contiguous()
