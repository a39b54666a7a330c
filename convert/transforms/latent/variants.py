"""Changes to a fitted latent that preserve its results, at least nearly: a live norm, a channel for
attention sinks, a query latent.

The coordinates of a latent are free: the weights that read it can undo any invertible matrix that
multiplies it.

Some engines cannot turn off the norm of a latent (a live norm). A norm has no effect on vectors
that all have the same length, so `equalize_lengths` searches for coordinates in which the length
varies least.

A query latent (DeepSeek's ``q_lora_rank``) saves weights but no cache.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert.transforms.latent.factorization import compute_principal_basis
from kvfold.convert.transforms.latent.latent_weights import LatentWeights, QueryLatent
from kvfold.convert.transforms.linalg import compute_input_moment, decompose_symmetric, solve_damped
from kvfold.convert.transforms.weights import LayerStatistics

# Excess loss in layout engine at 48 + 16, nats per token, measured by a script in git history.

# The maximum number of conjugate-gradient steps; held-out tokens choose one. Two seeds, 2026-11-24,
# at 10, 20 and 40: reference MHA model 0.090, 0.090, 0.091 and 0.097, 0.097, 0.098; shipped model
# 0.069, 0.068, 0.068 and 0.041, 0.042, 0.040: flat. At 0 the MHA model had 0.287 where 40 had 0.131
# (2026-11-22).
STEPS = 40
# The minimum squared stretch of a direction relative to the largest: below it, directions are lost
# to rounding.
FLATTEST = 1e-3  # MHA model, 2026-11-22: 1e-6: 0.130, 1e-3: 0.131, 0.1: 0.172

TOKENS = 32768  # a limit on time; a walk on a CPU provides fewer

# Isotropic share of the inputs' energy in the denominator of `add_sink_channel`: rare directions in
# the text are not sinks. Chosen, not tuned: held-out sequences decide whether a layer gets the
# channel.
SINK_RIDGE = 1e-4

# Inputs whose RMS differs from one by less than this come from an RMSNorm: rounding to bfloat16
# changes it by 2^-9.
_EXACT = 1e-2


def adapt_to_norm(latent: LatentWeights, inputs: Tensor) -> LatentWeights:
    """Return ``latent`` in the coordinates in which an RMSNorm of weight one changes it least over
    ``inputs [..., E]``, for engines that always normalize the latent.

    The RMS is one on average, so the norm's eps does not matter. The latent must not be centered,
    because the norm would apply to its bias too.
    """
    down, back = fit_norm_coordinates(latent.down, inputs)
    return replace(
        latent,
        down=down.to(latent.down).contiguous(),
        uk=(latent.uk.double() @ back).to(latent.uk).contiguous(),
        uv=(latent.uv.double() @ back).to(latent.uv).contiguous(),
    )


def fit_norm_coordinates(down: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a down-projection ``rows [R, E]`` whose outputs have an RMS close to one for all
    ``inputs [..., E]``, and ``back [R, R]``: ``down x = back (rows x)``.

    Float64. Exact if the latent is as wide as its inputs: it then consists of the inputs
    themselves, without the weight of the RMSNorm in front of the layer, and the channel scales
    solve ``sum_e d_e x_e^2 = 1`` for all tokens.
    """
    rank, width = down.shape
    rows = inputs.reshape(-1, width)[:TOKENS].to(down.device)
    # With fewer tokens, any inputs could pass as the output of an RMSNorm.
    if rank >= width and len(rows) >= 2 * width:
        squares = rows.double().square()
        scales = solve_damped(squares.mT @ squares, squares.sum(0)[:, None], 1e-12)[:, 0]
        uneven = float((squares @ scales - 1).square().mean().sqrt())
        if uneven < _EXACT and scales.min() > 0:
            root = (scales * rank).sqrt()
            padding = (0, rank - width)
            return pad(root.diag(), (0, 0, *padding)), pad(down.double() / root, padding)
    forth, back = equalize_lengths((rows @ down.to(rows.dtype).mT).double())
    return forth @ down.double(), back


def equalize_lengths(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix ``forth [R, R]`` that gives latents ``c [n, R]`` an RMS close to one, and
    its inverse ``back``; float64.

    ``forth`` is a root of ``A``, the quadratic form with the least error in ``c^T A c = R`` over
    the tokens, found by conjugate gradients from the whitened latent, stopped by held-out tokens,
    then projected to positive definite forms.
    """
    # Channels that are always zero keep their scale.
    energy, axes = decompose_symmetric(latent.mT @ latent / len(latent))
    root = energy.clamp_min(energy[0] * 1e-10).sqrt()
    root = torch.where(root > 0, root, 1.0)
    white = (axes / root).mT
    stretch, turn = decompose_symmetric(_fit_quadratic_form(latent @ white.mT))
    size = stretch.clamp_min(stretch[0] * FLATTEST).sqrt()
    forth = size[:, None] * (turn.mT @ white)
    rms = (latent @ forth.mT).square().mean(-1).sqrt().mean()
    # A latent that is always zero stays zero.
    forth /= torch.where(rms > 0, rms, 1.0)
    return forth, torch.linalg.inv(forth)


def _fit_quadratic_form(latent: Tensor) -> Tensor:
    """Return a symmetric matrix ``A [R, R]`` with ``c^T A c`` close to ``R`` for all whitened
    latents ``c [n, R]``, by conjugate gradients.
    """
    rank = latent.shape[1]
    # Hold out every eighth token, and choose the step with the smallest error on these.
    holding = torch.arange(len(latent), device=latent.device) % 8 == 7
    fitted = latent[~holding]
    held_out = latent[holding] if holding.any() else latent

    def compute_square_lengths(tokens: Tensor, form: Tensor) -> Tensor:
        return ((tokens @ form) * tokens).sum(1)

    def compute_held_out_error(form: Tensor) -> float:
        return float((rank - compute_square_lengths(held_out, form)).square().mean())

    form = torch.eye(rank, dtype=latent.dtype, device=latent.device)
    forms = [form]
    left = rank - compute_square_lengths(fitted, form)
    step = torch.zeros_like(form)
    before = latent.new_tensor(math.inf)
    for _ in range(STEPS):
        gradient = (fitted * left[:, None]).mT @ fitted / len(fitted)
        energy = gradient.square().sum()
        step = gradient + energy / before.clamp_min(1e-300) * step
        before = energy
        change = compute_square_lengths(fitted, step)
        reach = energy / change.square().mean().clamp_min(1e-300)
        form = form + reach * step
        left = left - reach * change
        forms.append(form)
    return min(forms, key=compute_held_out_error)


def add_sink_channel(latent: LatentWeights, statistics: LayerStatistics) -> LatentWeights:
    """Return ``latent`` with one more channel that nothing reads and that is large only for
    attention sinks; its mean square over all tokens is one.

    A sink's latent is short, because its value is almost zero, and a live norm would make it as
    long as all others. The channel is the row ``w`` with the largest ``E[r (w x)^2] / E[(w x)^2]``,
    where ``r`` is the attention a token receives. ``statistics`` weigh all tokens equally and
    include the averages weighted by received attention.
    """
    assert statistics.received_gram is not None
    # The generalized eigenproblem received w = lambda gram w, in units in which gram is 1.
    gram = compute_input_moment(statistics, SINK_RIDGE)[:-1, :-1]
    white = torch.linalg.inv(torch.linalg.cholesky(gram))
    _, vectors = torch.linalg.eigh(white @ statistics.received_gram @ white.mT)
    row = (vectors[:, -1:].mT @ white).to(latent.down)
    return replace(
        latent,
        down=torch.cat([latent.down, row]),
        uk=pad(latent.uk, (0, 1)),
        uv=pad(latent.uv, (0, 1)),
    )


def factor_queries(latent: LatentWeights, statistics: LayerStatistics, rank: int) -> LatentWeights:
    """Return ``latent`` with queries computed through a query latent of ``rank`` channels: the
    principal components of all heads' queries in units of scores.

    The unit of a query is the energy of its keys, which makes unrotated and rotary dims comparable.
    The biases do not change. Exact for ``rank >= min(E, H (N + P))``. A stock class with biases on
    queries needs it: it stores them in a query latent alone.
    """
    moment = compute_input_moment(statistics)
    root = torch.linalg.cholesky(moment[:-1, :-1])
    rope_key = latent.rope_key.double().expand(latent.heads, -1, -1)
    keys = torch.cat([latent.uk.double() @ latent.down.double(), rope_key], 1)
    energy = ((keys @ moment[:-1, :-1]) * keys).sum(-1).clamp_min(0)
    # The two dims of a rotary pair share their energy.
    rope = torch.unflatten(energy[:, latent.nope_dim :], 1, (2, -1)).mean(1)
    units = torch.cat([energy[:, : latent.nope_dim], rope, rope], 1).sqrt()
    # Dims of dead keys keep a little weight, so that no query vanishes.
    units = units.clamp_min(units.max() * 1e-6)
    rows = torch.cat([latent.q_nope, latent.q_rope], 1).double()  # [H, N + P, E]
    # The latent has unit energy, which layouts with a constant channel need.
    basis = compute_principal_basis((rows * units[..., None]).flatten(0, 1) @ root, rank)
    down = torch.linalg.solve_triangular(root, basis, upper=False, left=False) / math.sqrt(rank)
    read = rows @ (root @ basis.mT) * math.sqrt(rank)
    query = QueryLatent(down, read[:, : latent.nope_dim], read[:, latent.nope_dim :])
    return replace(
        latent, query=query.map_tensors(lambda tensor: tensor.to(latent.down).contiguous())
    )
