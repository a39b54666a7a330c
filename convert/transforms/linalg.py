"""Linear algebra shared by the calibrated transforms: second moments of projections, roots of metrics, complex pairs.

Everything is float64. Covariances of queries, keys and values never come from stored activations: with
``x~ = [x; 1]`` and a projection's bias as its last column, ``E[(W x~)(W x~)^T] = W E[x~ x~^T] W^T``.
"""

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import LayerStatistics

RIDGE = 1e-9
"""Share of isotropic variance added to the Gram matrix. Directions that the calibration text never visits then still
count a little, so that folding is exact on every input (not only on the calibration's span) where it can be.

Where the text visits all, it does not matter: from 1e-12 to 1e-4 the errors of a trained layer stay the same to 5e-5 of
themselves (tests/convert/transforms/test_constants.py).
"""


def input_moment(statistics: LayerStatistics, ridge: float | None = None) -> Tensor:
    """``E[x~ x~^T] [E+1, E+1]`` of the inputs with a constant 1 appended, regularized by ``ridge`` (`RIDGE`)."""
    gram, mean = statistics.gram.double(), statistics.mean.double()
    size = gram.shape[0]
    moment = gram.new_empty(size + 1, size + 1)
    moment[:size, :size] = gram
    isotropic = gram.trace() / size
    isotropic = torch.where(isotropic > 0, isotropic, 1.0)  # inputs that are all zero say nothing: any scale serves
    moment[:size, :size].diagonal().add_((RIDGE if ridge is None else ridge) * isotropic)
    moment[:size, size] = moment[size, :size] = mean
    moment[size, size] = 1.0
    return moment


def covariance(moment: Tensor) -> Tensor:
    """``[E+1, E+1]`` from `input_moment` -> the covariance ``[E, E]`` of the inputs."""
    mean = moment[-1, :-1]
    return moment[:-1, :-1] - torch.outer(mean, mean)


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[n, D, E]`` and ``[n, D]`` -> ``[n, D, E+1]`` float64: the bias as the weight of a constant input."""
    column = weight.new_zeros(weight.shape[:-1]) if bias is None else bias
    return torch.cat((weight.double(), column.double()[..., None].to(weight.device)), -1)


def joint_moment(rows: Tensor, moment: Tensor) -> Tensor:
    """``[n, D, F]``, ``[F, F]`` -> ``[n, D, n, D]``: second moments between all dims of all heads."""
    heads, dims, _ = rows.shape
    flat = rows.flatten(0, 1)
    return (flat @ moment @ flat.T).reshape(heads, dims, heads, dims)


def among(joint: Tensor, heads: list[int]) -> Tensor:
    """The part of ``[n, D, n, D]`` between some heads, ``[m, D, m, D]``."""
    return joint[heads][:, :, heads]


def head_moments(rows: Tensor, moment: Tensor) -> Tensor:
    """``[n, D, F]``, ``[F, F]`` -> ``[n, D, D]``: the second moment of each head alone."""
    return (rows @ moment) @ rows.mT


def symmetric_eig(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending, at least 0) and eigenvectors (columns) of Hermitian matrices ``[..., n, n]``."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


def metric_root(metric: Tensor, tolerance: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Square root and (pseudo-)inverse square root of positive semi-definite matrices ``[..., n, n]``.

    Directions whose eigenvalue is below ``tolerance`` times the largest count as absent in both.
    """
    values, vectors = symmetric_eig(metric)
    present = values > tolerance * values[..., :1]
    root = torch.where(present, values, 0).sqrt()
    inverse = torch.where(present, values, 1).rsqrt() * present
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors * inverse[..., None, :]) @ vectors.mT


def output_metric(output: Tensor, kv_heads: int) -> Tensor:
    """``W_o [E, H, D]`` -> ``[G, D, D]``: how much a change of each KV head's values moves the layer's output."""
    columns = torch.unflatten(output.double(), 1, (kv_heads, -1))  # [E, G, H/G, D]
    return torch.einsum("egrc,egrd->gcd", columns, columns)


def pair_moment(joint: Tensor, pairs: int) -> Tensor:
    """``[n, D, n, D]`` -> ``[pairs, n, n]``: ``E[z_a conj(z_b)]`` of the complex ``z = x[l] + i x[l + pairs]``."""
    low, high = slice(0, pairs), slice(pairs, 2 * pairs)

    def block(a: slice, b: slice) -> Tensor:
        return joint[:, a, :, b].diagonal(dim1=1, dim2=3)  # [n, n, pairs]

    real = block(low, low) + block(high, high)
    imaginary = block(high, low) - block(low, high)
    return torch.complex(real, imaginary).permute(2, 0, 1)


def pair_matrices(factors: Tensor, dims: int) -> Tensor:
    """Complex factors ``[..., pairs]`` -> the real ``[..., dims, dims]`` maps that multiply half-split pairs by them.

    Dims beyond ``2 * pairs`` are left at zero.
    """
    pairs = factors.shape[-1]
    result = factors.real.new_zeros(*factors.shape[:-1], dims, dims)
    low = torch.arange(pairs, device=factors.device)
    high = low + pairs
    result[..., low, low] = result[..., high, high] = factors.real
    result[..., high, low] = factors.imag
    result[..., low, high] = -factors.imag
    return result
