"""Coordinates for a latent that goes through a live RMSNorm, for engines that cannot switch the norm off.

A norm does no harm to vectors that all have the same length, and the coordinates of a latent are free: the weights that
read it undo any invertible matrix that multiplies it. ``constant_length`` looks for coordinates in which the length
varies least.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.weights import LatentWeights, QueryLatent
from kvfold.convert.transforms.linalg import symmetric_eig

# Excess loss of the reference MHA model in layout engine at 48 + 16, nats per token, by
# recipes/benchmarks/bench_constants.py. Steps of conjugate gradients, at most; held-out tokens choose among them.
STEPS = 40  # 0: 0.287, 10: 0.124, 40: 0.131
# The least stretch of a direction relative to the largest, squared: directions stretched less are lost to rounding.
FLATTEST = 1e-3  # 1e-6: 0.130, 1e-3: 0.131, 0.1: 0.172

TOKENS = 32768  # a limit on time; a walk on a CPU provides fewer

# Inputs whose rms differs from one by less than this come from an RMSNorm: rounding in bfloat16 moves it by 2^-9.
_EXACT = 1e-2


def live_norm(latent: LatentWeights, inputs: Tensor) -> LatentWeights:
    """``latent`` in coordinates in which an RMSNorm of weight one changes it least, over ``inputs [..., E]``.

    The rms is one on average, so that the norm's eps does not matter. Raises ``ValueError`` for a latent with a bias:
    the norm would act on it too, so the latent must not be centered.
    """
    if latent.down_bias is not None:
        raise ValueError("latent: a live norm needs a latent without down_bias; use to_latent(..., centered=False)")
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
    """The inputs themselves as the latent, without the weight of the RMSNorm before the layer: their rms is then one.

    That weight follows from the inputs: the scales of the channels solve ``sum_e d_e x_e^2 = 1`` for all tokens. None
    if there is no solution, because the layer before is no RMSNorm, or if there are too few tokens to decide.
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

    ``forth`` is a root of ``A``, the quadratic form with the least error of ``c^T A c = R`` over the tokens: conjugate
    gradients from the whitened latent, stopped by held-out tokens, then projected on positive definite forms.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])[:TOKENS].to(down.device)
    latent = (rows @ down.to(rows.dtype).mT).double()
    # Symmetric whitening; channels that never move keep their scale.
    energy, axes = symmetric_eig(latent.mT @ latent / len(latent))
    root = energy.clamp_min(energy[0] * 1e-10).sqrt()
    root = torch.where(root > 0, root, 1.0)
    white, undo = (axes / root) @ axes.mT, (axes * root) @ axes.mT
    form = _constant_form(latent @ white.mT)
    stretch, axes = symmetric_eig(form)
    root = stretch.clamp_min(stretch[0] * FLATTEST).sqrt()
    forth, back = (root[:, None] * axes.mT) @ white, undo @ (axes / root)
    rms = (latent @ forth.mT).square().mean(-1).sqrt().mean()
    rms = torch.where(rms > 0, rms, 1.0)  # a latent that is always zero stays so
    return forth / rms, back * rms


def _constant_form(latent: Tensor) -> Tensor:
    """Symmetric ``A [R, R]`` with ``c^T A c`` close to ``R`` for whitened ``c [n, R]``: conjugate gradients on squares.

    Every eighth token is held out; the step with the smallest error on these is taken.
    """

    def lengths(latent: Tensor, form: Tensor) -> Tensor:
        """``c^T A c`` of every row."""
        return ((latent @ form) * latent).sum(1)

    def adjoint(weight: Tensor) -> Tensor:
        return (fitted * weight[:, None]).mT @ fitted / len(fitted)

    def uneven(form: Tensor) -> float:
        return float((rank - lengths(judges, form)).square().mean())

    judging = torch.arange(len(latent), device=latent.device) % 8 == 7
    fitted, judges = latent[~judging], latent[judging] if judging.any() else latent
    rank = latent.shape[1]
    form = torch.eye(rank, dtype=latent.dtype, device=latent.device)
    best, least = form, uneven(form)
    left = rank - lengths(fitted, form)
    gradient = adjoint(left)
    step, energy = gradient, gradient.square().sum()
    for _ in range(STEPS):
        seen = lengths(fitted, step)
        reach = energy / seen.square().mean().clamp_min(1e-300)
        form, left = form + reach * step, left - reach * seen
        gradient, before = adjoint(left), energy
        energy = gradient.square().sum()
        step = gradient + energy / before.clamp_min(1e-300) * step
        if (error := uneven(form)) < least:
            best, least = form, error
    return best


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like).contiguous()
