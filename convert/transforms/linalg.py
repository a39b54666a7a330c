"""Linear algebra shared by the calibrated transforms: second moments, damped least squares, roots,
complex pairs.

Everything is float64, but for products of wide layers (`choose_moment_dtype`). Covariances of
queries, keys and values are never computed from stored activations: with ``x~ = [x; 1]`` and a
projection's bias as its last column, ``E[(W x~)(W x~)^T] = W E[x~ x~^T] W^T``.
"""

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import LayerStatistics

# Share of isotropic variance added to the Gram matrix, so that a fold that can be exact is exact
# even on inputs that do not occur in the calibration text. From 1e-12 to 1e-4 the errors of a layer
# of the shipped model change by less than 5e-5 of their value.
RIDGE = 1e-9

# Columns per block of a product with a triangular matrix.
_BLOCK = 512

# With B blocks per side, (B + 1) / 2B of the multiplications for a Gram matrix remain. Chosen.
_GRAM_BLOCKS = 8

# `choose_moment_dtype`, `choose_product_dtype`: matrices this small, or with fewer than `_SPARSE`
# times the dims that are kept, are multiplied in float64.
_FULL = 1024
_SPARSE = 4

# Pull of `fit_output_projection` toward the present projection, relative to the mean energy of the
# heads' dims: it preserves directions that are rare in the text. Chosen, not tuned: held-out
# sequences decide whether a projection is used.
OUTPUT_RIDGE = 0.1


def compute_input_moment(statistics: LayerStatistics, ridge: float = RIDGE) -> Tensor:
    """Return the second moment ``[E+1, E+1]`` of the inputs with a constant 1 appended, plus
    ``ridge`` times the identity in units of their energy.
    """
    gram = statistics.gram.double()
    moment = torch.nn.functional.pad(gram, (0, 1, 0, 1), value=1.0)
    moment[-1, :-1] = moment[:-1, -1] = statistics.mean.double()
    isotropic = gram.trace() / len(gram)
    # All-zero inputs have no scale, so use 1.
    isotropic = torch.where(isotropic > 0, isotropic, 1.0)
    moment[:-1, :-1].diagonal().add_(ridge * isotropic)
    return moment


def compute_covariance_root(moment: Tensor) -> Tensor:
    """Return the lower Cholesky factor ``[E, E]`` of the inputs' covariance, from their second
    moment ``[E+1, E+1]`` (`compute_input_moment`).
    """
    mean = moment[-1, :-1]
    root: Tensor = torch.linalg.cholesky(torch.addr(moment[:-1, :-1], mean, mean, alpha=-1))
    return root


def whiten_inputs(
    rows: Tensor, root: Tensor, mean: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return projections ``rows [..., E+1]`` on ``[x; 1]`` as projections on ``[z; 1]`` for
    whitened inputs ``z``: ``x = root z + mean``, with the lower triangular ``root [E, E]`` and
    ``mean [E+1]``. The last column of the result is the mean of each row's output. Float64;
    ``dtype`` is that of the products.
    """
    width = len(root)
    result = torch.empty_like(rows)
    linear = rows[..., :width].to(dtype)
    # Above the diagonal the root is zero: blocks save almost half of the products.
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        result[..., start:stop] = linear[..., start:] @ root[start:, start:stop].to(dtype)
    result[..., -1] = rows @ mean
    return result


def append_bias(weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``weight [n, D, E]`` in ``dtype`` with ``bias [n, D]`` (or zeros) appended as a last
    column, ``[n, D, E+1]``.
    """
    *shape, width = weight.shape
    rows = torch.empty(*shape, width + 1, dtype=dtype, device=weight.device)
    rows[..., :-1] = weight
    rows[..., -1] = 0 if bias is None else bias
    return rows


def split_bias(rows: Tensor, present: bool) -> tuple[Tensor, Tensor | None]:
    """Split ``rows [n, D, E+1]`` into weight ``[n, D, E]`` and bias ``[n, D]``, the last column;
    the bias is None unless ``present``.
    """
    return rows[..., :-1], rows[..., -1] if present else None


def compute_moments_between_heads(projections: Tensor) -> Tensor:
    """Return second moments ``[n, D, n, D]`` between all dims of all heads, from
    ``projections [n, D, E+1]`` of whitened inputs (`whiten_inputs`).
    """
    upper = compute_upper_gram(projections.flatten(0, 1).mT).triu_()
    return (upper + upper.triu(1).mT).view(*projections.shape[:2], *projections.shape[:2])


def compute_upper_gram(rows: Tensor) -> Tensor:
    """Return ``rows^T rows`` for ``rows [n, m]`` on and above the diagonal, as it is symmetric; it
    is computed in blocks, and entries below the diagonal have no meaning.
    """
    width = rows.shape[1]
    gram = rows.new_zeros(width, width)
    size = -(-width // _GRAM_BLOCKS)
    for start in range(0, width, size):
        gram[start : start + size, start:] = rows[:, start : start + size].mT @ rows[:, start:]
    return gram


def compute_output_metric(output: Tensor, kv_heads: int) -> Tensor:
    """Return ``M_g = sum_h W_o,h^T W_o,h [D, D]`` for each KV head, ``[G, D, D]``, which converts a
    change of its values into a squared change of the layer's output. ``output`` is ``W_o [E, H,
    D]``.

    ``d^T M_g d`` is the squared output change if KV head ``g``'s values change by ``d``, summed
    over its query heads.
    """
    columns = torch.unflatten(output.transpose(0, 1), 0, (kv_heads, -1)).flatten(1, 2)
    return columns.mT @ columns


def decompose_symmetric(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (descending, clamped at 0) and eigenvectors (columns) of Hermitian
    matrices ``[..., n, n]``.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


def choose_moment_dtype(size: int) -> torch.dtype:
    """Return float32, in half the time, for second moments from products of matrices of ``size``
    dims, if these are many; otherwise float64.
    """
    return torch.float32 if size > _FULL else torch.float64


def choose_product_dtype(rank: int, size: int) -> torch.dtype:
    """Return float32, in half the time, for products of matrices of ``size`` dims of which an
    approximation keeps ``rank``, if these are few of many; otherwise float64.

    An approximation that keeps most dims may be exact, also for inputs that do not occur in the
    text, whose errors the inverse of a covariance multiplies.
    """
    return choose_moment_dtype(size) if _SPARSE * rank <= size else torch.float64


def compute_metric_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root and (pseudo-)inverse square root of positive semi-definite matrices
    ``[..., n, n]``.

    Directions whose eigenvalue is below 1e-10 times the largest, or is rounding noise, are treated
    as absent in both.
    """
    values, vectors = decompose_symmetric(metric)
    least = max(1e-10, 10 * torch.finfo(values.dtype).eps)
    present = values > least * values[..., :1]
    # Absent directions are zero in the inverse too: 1 / sqrt would blow up their rounding noise.
    root = torch.where(present, values, 0).sqrt()
    inverse = torch.where(present, values, torch.inf).rsqrt()
    rooted = (vectors * root[..., None, :]) @ vectors.mT
    return rooted, (vectors * inverse[..., None, :]) @ vectors.mT


def solve_damped(gram: Tensor, residual: Tensor, damping: float) -> Tensor:
    """Return ``X [..., n, m]`` with ``(gram + damping e I) X = residual``, where ``e`` is the mean
    diagonal element of ``gram [..., n, n]``.

    One least-squares step from a present solution, ``residual = cross - gram @ present``: damping
    keeps the present solution in directions in which ``gram [..., n, n]`` has no energy.
    """
    solution: Tensor = torch.linalg.solve(_add_ridge(gram, damping)[0], residual)
    return solution


def _add_ridge(gram: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return ``gram [..., n, n]`` plus ``damping`` times its mean diagonal element on the diagonal,
    or plus ``damping`` if that element is 0; and what was added, ``[..., 1, 1]``.
    """
    level = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = damping * torch.where(level > 0, level, 1.0)[..., None, None]
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return gram + ridge * identity, ridge


def fit_output_projection(present: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """Return the output projection ``W [E, n]`` that maps the heads' results best to the target of
    a ridge regression, which prefers weights near ``present [E, n]``.

    It minimizes ``E|target - W z|^2 + OUTPUT_RIDGE e |W - present|^2`` for the results ``z`` of the
    heads. ``gram [n, n] = E[z z^T]`` and ``cross [E, n] = E[target z^T]``, both float64; ``e`` is
    the mean energy of the dims of ``z``. The solution is

        W = (cross + OUTPUT_RIDGE e present) (gram + OUTPUT_RIDGE e I)^-1

    Of many heads, it is computed in float32, whose rounding the ridge outweighs.
    """
    dtype = choose_moment_dtype(len(gram))
    damped, ridge = _add_ridge(gram.to(dtype), OUTPUT_RIDGE)
    wanted = cross.to(dtype) + ridge * present.to(dtype)
    return torch.cholesky_solve(wanted.mT, torch.linalg.cholesky(damped)).mT


def multiply_pairs(rows: Tensor, factors: Tensor) -> Tensor:
    """Return ``rows [..., D, n]`` with each complex pair ``x[l] + i x[l + L]`` along ``D``
    multiplied by ``factors [..., L]``; other dims are unchanged.
    """
    pairs = factors.shape[-1]
    real = rows[..., :pairs, :]
    imaginary = rows[..., pairs : 2 * pairs, :]
    a = factors.real[..., None]
    b = factors.imag[..., None]
    still = rows[..., 2 * pairs :, :]
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, still], -2)


def average_rotations(
    moment: Tensor, phi: Tensor, pairs: int, right_pairs: int | None = None
) -> Tensor:
    """Return ``E[R moment S^T]``, the average over rotations ``R`` and ``S`` by one random
    distance: real ``[..., D, D]``.

    The first ``2 pairs`` rows are the real, then the imaginary parts of rotary pairs ``x + iy``; so
    are the first ``2 right_pairs`` columns (default ``pairs``). ``phi [..., D, D]``: the averages
    ``E e^{-i (w_a - w_b) delta}`` with ``w = theta, -theta, 0`` for the pairs, their conjugates,
    and dims that do not rotate; so the conjugates' part of ``phi`` is the conjugate of the pairs'.
    """
    columns = pairs if right_pairs is None else right_pairs
    rows = torch.complex(moment[..., :pairs, :], moment[..., pairs : 2 * pairs, :])
    real = rows[..., :columns]
    imaginary = 1j * rows[..., columns : 2 * columns]
    factors_of_pairs = phi[..., :pairs, :]
    # E[p conj(q)^T] and E[p q^T] for pairs p of rows and q of columns, rotated, both halved.
    same = (real - imaginary) * factors_of_pairs[..., :columns] / 2
    mirrored = (real + imaginary) * factors_of_pairs[..., columns : 2 * columns] / 2
    other = rows[..., 2 * columns :] * factors_of_pairs[..., 2 * columns :]
    both = torch.cat([same + mirrored, 1j * (same - mirrored), other], -1)
    still = moment[..., 2 * pairs :, :]
    factors = phi[..., 2 * pairs :, :]
    across = torch.complex(still[..., :columns], -still[..., columns : 2 * columns])
    across = across * factors[..., :columns]
    rest = still[..., 2 * columns :] * factors[..., 2 * columns :].real
    return torch.cat([both.real, both.imag, torch.cat([across.real, -across.imag, rest], -1)], -2)
