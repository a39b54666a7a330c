"""Converts MHA or GQA to multi-head latent attention, with calibration statistics or without
(`factor_by_svd`).

1. Rotary keys are the principal complex components over the heads at the frequencies in
   ``RotarySlots``. The remaining keys lose their rotation; the gain from ``compute_pair_gains`` is
   the best constant in its place.
2. These keys, in units of scores, and the values, in units of the layer's output, share one latent:
   the principal components of both together.
3. From there ``als`` alternates between up-projections and down-projection: a head may then use
   every rotary key, not only that at its pair's frequency, and compensate for a lost rotation with
   one at another frequency.
4. ``balance_channels`` chooses equivalent coordinates in which the rounding of a cache costs least.

Norms on queries and keys are kept if the layout supports them (otherwise `linearize_norms` replaces
them). A norm divides a key by a number ``d_g(x)`` that depends on the token and the head; otherwise
it is linear. So the latent is fitted to keys divided by one number per head instead, and the
weights that read the latent are multiplied by that number. Scores are then divided by the source's
exact ``d_g``, whatever the size of the latent (`LatentHeadNorms`). Queries keep their projection
and their norm.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert.transforms.distances import (
    DistanceMixture,
    average_rotation_factors,
    mix_distances,
)
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent.als import LatentFactors
from kvfold.convert.transforms.latent.latent_weights import (
    LatentHeadNorms,
    LatentWeights,
    LayerProjections,
    build_projections,
)
from kvfold.convert.transforms.latent.slots import (
    RotarySlots,
    compute_pair_gains,
    split_rotary_keys,
)
from kvfold.convert.transforms.linalg import (
    choose_product_dtype,
    compute_covariance_root,
    compute_input_moment,
    compute_metric_roots,
    decompose_symmetric,
    multiply_pairs,
    whiten_inputs,
)
from kvfold.convert.transforms.weights import (
    AttentionWeights,
    LayerStatistics,
    Rotary,
    make_blank_statistics,
)

# The least cost of a channel relative to the largest, in `balance_channels`: what is below is lost
# to rounding errors of float32. Chosen.
_FAINTEST = 1e-10

# Vectors more than are kept, with which `compute_principal_basis` iterates where it approximates.
_SPARE = 64
# Iterations only have to find a start: alternating least squares follow. KL of the reference MHA
# model as MLA 48 + 16, with the limits of `choose_product_dtype` lowered to its size: 1: 0.0681, 2:
# 0.0682, 4: 0.0683, in full: 0.0684; in layout engine 0.0869, 0.0850, 0.0849, 0.0848 (2026-11-28).
_ITERATIONS = 2


def factor_layer(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: RotarySlots,
    rank: int,
    *,
    context: int = 0,
    scale: float | None = None,
    centered: bool = True,
) -> LatentWeights:
    """Return the layer converted to latent attention, fitted to calibration ``statistics``, in
    float32 or wider. ``rank`` is the number of its channels without the constant one that layout
    ``free`` adds.

    ``context``: the number of positions to support; 0 means the length of the calibration text.
    ``centered`` moves the mean from the latent to the biases; otherwise the result has only biases
    that the source has. ``scale`` multiplies scores, by default ``head_dim ** -0.5``. A layer
    without rotation gets zero rotary keys. Norms on queries and keys are kept, which requires
    ``centered``.
    """
    original = build_projections(weights, statistics, rotary, scale, key_constant=True)
    moment = compute_input_moment(statistics)
    mean = moment[-1]
    root = compute_covariance_root(moment)
    dtype = choose_product_dtype(rank + slots.rope_dim, len(root))
    queries = whiten_inputs(original.queries, root, mean, dtype)
    queries = queries @ queries.mT
    projections = replace(
        original,
        keys=whiten_inputs(original.keys, root, mean, dtype),
        values=whiten_inputs(original.values, root, mean, dtype),
    )
    # 1. Rotary keys, and the gains that stand in for the rotation of the remaining keys.
    split = split_rotary_keys(projections, slots, queries)
    gains = compute_pair_gains(statistics, rotary, context)
    # 2. One latent for the remaining keys and the values.
    rows = _stack_key_and_value_rows(projections, queries, split[2], gains)
    basis = compute_principal_basis(rows, rank, dtype)
    down = pad(basis, (0, 1))
    center = None
    if not centered:
        # Without a bias, a latent also carries the means.
        center = torch.linalg.solve_triangular(root, mean[:-1, None], upper=False)[:, 0]
        down[:, -1] = basis @ center
    factors = _join_factors(projections, split, gains, down)
    # 3. Alternating least squares; if nothing is left for the latent, the factors are exact.
    distances = mix_distances(statistics.profile, context, als.LATENT_UNIFORM, als.LATENT_TAIL)
    if down.any():
        factors = als.alternate_least_squares(
            projections, queries, center, slots.theta, distances, factors, dtype
        )
    factors = balance_channels(factors, queries, projections.metric)
    return _make_latent_weights(
        original, projections, factors, slots, root, mean, distances, centered
    )


def factor_by_svd(
    weights: AttentionWeights,
    rotary: Rotary,
    slots: RotarySlots,
    rank: int,
    *,
    scale: float | None = None,
    gain: Tensor | None = None,
) -> LatentWeights:
    """Return the layer converted to latent attention with ``rank`` channels without calibration, by
    a truncated SVD of the stacked key and value projections.

    ``slots`` are from ``spread_rotary_slots``, as in MHA2MLA (arXiv:2502.14837): one shared key per
    slot, the principal component over the heads' weights. The remaining keys lose their rotation.
    ``gain [E]``, the weight of the norm in front of the attention, only affects the scale of the
    norms on queries and keys, which are kept. ``scale`` as in `factor_layer`.
    """
    blank = make_blank_statistics(weights, gain)
    projections = build_projections(weights, blank, rotary, scale)
    # Without calibration, assume white inputs.
    root = torch.eye(weights.model_dim, dtype=torch.float64, device=weights.q.device)
    mean = pad(torch.zeros_like(root[0]), (0, 1), value=1.0)
    queries = projections.queries @ projections.queries.mT
    split = split_rotary_keys(projections, slots, queries)
    rows = torch.cat([split[2], projections.values])[..., :-1].flatten(0, 1)
    down = pad(compute_principal_basis(rows, rank), (0, 1))
    # Text of one token: every rotation is 1.
    distances = DistanceMixture(blank.profile, 1)
    gains = average_rotation_factors(distances, rotary.theta)
    factors = _join_factors(projections, split, gains, down)
    factors = balance_channels(factors, queries, projections.metric)
    return _make_latent_weights(
        projections, projections, factors, slots, root, mean, distances, False
    )


def _join_factors(
    projections: LayerProjections,
    split: tuple[Tensor, Tensor, Tensor],
    gains: Tensor,
    down: Tensor,
) -> LatentFactors:
    """Return factors of rotary keys (``split``, from `split_rotary_keys`) and of a latent with
    orthonormal directions (``down [R, E+1]``) for the remaining keys, multiplied by ``gains [H,
    L]``, and the values.
    """
    rope_key, up_rope, rest = split
    keys = multiply_pairs(rest.repeat_interleave(projections.query_heads_per_kv_head, 0), gains)
    readout = down[:, :-1].mT
    return LatentFactors(
        down=torch.cat([rope_key, down]),
        up_keys=torch.cat([up_rope, keys[..., :-1] @ readout], -1),
        up_values=projections.values[..., :-1] @ readout,
    )


def _stack_key_and_value_rows(
    projections: LayerProjections, queries: Tensor, rest: Tensor, gains: Tensor
) -> Tensor:
    """Return the unrotated keys ``rest [G, D, E+1]`` in units of scores, and the values in units of
    the output, as rows ``[n, E]`` for whitened inputs.
    """
    # A key's unit is the energy of its scores; rotation spreads a query's energy evenly over the
    # two dims of a pair.
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    half = projections.rotary.dims // 2
    pair = (energy[:, :half] + energy[:, half : 2 * half]) * gains.abs().square() / 2
    energy = torch.cat([pair, pair, energy[:, 2 * half :]], 1)
    energy = torch.unflatten(energy, 0, (-1, projections.query_heads_per_kv_head)).sum(1)
    # A value's unit is the layer's output: M^{1/2} v.
    metric, _ = compute_metric_roots(projections.metric)
    blocks = []
    for block in (rest * energy.sqrt()[..., None], metric @ projections.values):
        rows = block[..., :-1].flatten(0, 1)
        blocks.append(rows / rows.norm().clamp_min(torch.finfo(rows.dtype).tiny))
    return torch.cat(blocks)


def balance_channels(factors: LatentFactors, queries: Tensor, metric: Tensor) -> LatentFactors:
    """Return equivalent ``factors`` in the coordinates in which the rounding of a cache costs
    least. The latent of ``factors`` is white, that of the result has unit energy.

    ``queries [H, D, D]`` are second moments, ``metric [G, D, D]`` is that of the output. Rounding
    adds errors of one size to a group of neighboring channels, in proportion to the largest. If a
    channel of energy ``E`` is multiplied by ``a``, and errors in it cost ``u``, all of them cost
    ``sum(a^2 E) sum(u / a^2)``, which is least for ``a^2 = sqrt(u / E)``. Channels of the latent
    may mix as well: first so that costs are diagonal, and at last by a discrete Hartley transform,
    an orthogonal matrix that spreads both evenly, so that no channel makes the errors of its group
    large. Those of a rotary pair may not.
    """
    rope = factors.rope_dim
    down = factors.down.double()
    up_keys = factors.up_keys.double()
    up_values = factors.up_values.double()
    moment = down @ down.mT
    keys = torch.einsum("hdr,hde,hes->rs", up_keys, queries.double(), up_keys)
    values = torch.einsum("gdr,gde,ges->rs", up_values, metric.double(), up_values)
    # Costs are shares of the energy of the scores, and of the output.
    tiny = torch.finfo(moment.dtype).tiny
    keys = keys / (keys * moment).sum().clamp_min(tiny)
    values = values / (values * moment[rope:, rope:]).sum().clamp_min(tiny)
    cost, turn = decompose_symmetric(keys[rope:, rope:] + values)
    size = cost.clamp_min(cost[0] * _FAINTEST).pow(0.25)
    size = torch.where(size > 0, size, 1.0)
    white = turn.mT @ down[rope:]
    # Eigenvectors have a free sign: make the largest entry positive for reproducible results.
    largest = white.gather(1, white.abs().argmax(1, keepdim=True))[:, 0]
    size = torch.where(largest < 0, -size, size)
    mixing = make_hartley_matrix(len(size)).to(size)
    channels = mixing @ (size[:, None] * white)
    back = turn / size @ mixing
    scale = size.norm()
    pairs = [matrix.diagonal()[:rope].view(2, -1).sum(0) for matrix in (keys, moment)]
    grown = (pairs[0] / pairs[1]).pow(0.25).nan_to_num(1.0, 1.0) / scale
    grown = torch.where(grown > 0, grown, 1.0).repeat(2)
    factors_of_keys = [up_keys[..., :rope] / grown, up_keys[..., rope:] @ back * scale]
    return LatentFactors(
        down=torch.cat([grown[:, None] * down[:rope], channels / scale]),
        up_keys=torch.cat(factors_of_keys, -1),
        up_values=up_values @ back * scale,
    )


def make_hartley_matrix(size: int) -> Tensor:
    """Return the symmetric orthogonal matrix ``[size, size]`` of the discrete Hartley transform, in
    float64.
    """
    channels = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(channels, channels) * (2 * math.pi / size)
    return (angles.cos() + angles.sin()) / math.sqrt(size)


def compute_principal_basis(rows: Tensor, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the orthonormal directions ``[rank, E]`` of white inputs that ``rows [n, E]`` read
    most, their right singular vectors, which project inputs to a white latent. Directions are zero
    where singular values are rounding errors.

    With ``dtype`` float32, if few of many are needed, a few subspace iterations from a random start
    approximate them (Halko et al., arXiv:0909.4061), with most products in float32: a start for
    least squares. Otherwise the decomposition is exact.
    """
    if torch.float64 in (dtype, choose_product_dtype(rank, min(rows.shape))):
        _, sigma, vectors = torch.linalg.svd(rows, full_matrices=False)
    else:
        single = rows.float()
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(rows.shape[1], rank + _SPARE, generator=generator).to(single)
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(single.mT @ (single @ basis)).Q
        basis = torch.linalg.qr(basis.to(rows)).Q
        product = rows @ basis
        squares, turn = decompose_symmetric(product.mT @ product)
        sigma = squares.sqrt()
        vectors = (basis @ turn).mT
    used = sigma > sigma.max() * 1e-12
    vectors = (vectors * used[:, None])[:rank]
    return pad(vectors, (0, 0, 0, rank - len(vectors)))


def _make_latent_weights(
    original: LayerProjections,
    projections: LayerProjections,
    factors: LatentFactors,
    slots: RotarySlots,
    root: Tensor,
    mean: Tensor,
    distances: DistanceMixture,
    centered: bool,
) -> LatentWeights:
    """Return the weights of the latent attention layer described by ``factors``: ``original`` is
    the source's layer on the inputs ``[x; 1]``, ``projections`` on whitened inputs (``root [E, E]``
    and ``mean [E+1]`` as in `linalg.whiten_inputs`).
    """
    source = projections.source
    rope = slots.rope_dim
    rows = torch.linalg.solve_triangular(root, factors.down[:, :-1], upper=False, left=False)
    biases = factors.down[:, -1] - rows @ mean[:-1]
    queries = original.queries
    rope_query = torch.einsum("hdp,hde->hpe", factors.up_keys[..., :rope], queries)
    q_biased = source.q_bias is not None
    o_bias = source.o_bias
    if centered or source.v_bias is not None:
        # Attention rows sum to one, so constant values reach the output unchanged.
        constant = (projections if centered else original).values[..., -1]
        constant = constant.repeat_interleave(projections.query_heads_per_kv_head, 0)
        moved = torch.einsum("ehd,hd->e", source.o.double(), constant)
        o_bias = moved if o_bias is None else moved + o_bias.double()
    # Maps in place of norms are float64.
    divided = projections.divisors is not None
    dtype = torch.float64 if divided else torch.promote_types(source.q.dtype, torch.float32)
    latent = LatentWeights(
        down=rows[rope:],
        rope_key=rows[:rope],
        q_nope=queries[..., :-1],
        q_rope=rope_query[..., :-1],
        uk=factors.up_keys[..., rope:],
        uv=factors.up_values.repeat_interleave(projections.query_heads_per_kv_head, 0),
        o=source.o,
        theta=slots.theta,
        scale=projections.scale,
        down_bias=biases[rope:] if centered else None,
        rope_key_bias=biases[:rope] if centered or source.k_bias is not None else None,
        q_nope_bias=queries[..., -1] if q_biased else None,
        q_rope_bias=rope_query[..., -1] if q_biased else None,
        o_bias=o_bias,
    ).map_tensors(lambda tensor: tensor.to(dtype).contiguous())
    return latent if not divided else _keep_source_norms(latent, projections, factors, distances)


def _keep_source_norms(
    latent: LatentWeights,
    projections: LayerProjections,
    factors: LatentFactors,
    distances: DistanceMixture,
) -> LatentWeights:
    """Return ``latent`` for a layer that keeps the source's norms on queries and keys. It was
    fitted to keys divided by one constant per head in place of the norm; the weights that read the
    latent are multiplied by that constant, which undoes the division.
    """
    source = projections.source
    assert projections.divisors is not None
    assert source.q_norm is not None
    assert source.k_norm is not None
    rope = latent.rope_dim
    # The constant part of the keys as queries see it over the distances, minus the part in the
    # rotary keys: the latent has no mean.
    constant = projections.keys[..., -1:].repeat_interleave(projections.query_heads_per_kv_head, 0)
    constant = multiply_pairs(
        constant, average_rotation_factors(distances, projections.rotary.theta)
    )
    in_rope = factors.down[:rope, -1].expand(latent.heads, -1)[..., None]
    in_rope = multiply_pairs(
        in_rope, average_rotation_factors(distances, latent.theta)
    )  # [H, P, 1]
    constant = constant - factors.up_keys[..., :rope] @ in_rope
    divisors = projections.divisors.repeat_interleave(projections.query_heads_per_kv_head)[
        :, None, None
    ]
    times = divisors * projections.rotary.expand_amplitude(constant)
    up_keys = factors.up_keys * times
    norms = LatentHeadNorms(
        q=source.q,
        k=source.k,
        q_norm=source.q_norm,
        k_norm=source.k_norm,
        rope=up_keys[..., :rope].mT,
        constant=(constant * times)[..., 0],
        q_bias=source.q_bias,
        k_bias=source.k_bias,
    )
    norms = norms.map_tensors(lambda tensor: tensor.to(latent.down).contiguous())
    return replace(latent, uk=up_keys[..., rope:].to(latent.down).contiguous(), norms=norms)
