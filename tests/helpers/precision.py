"""Tolerances from the precision of the arithmetic, not from the machine that a test was written on.

Two orders of one sum of n products differ by the roundings on the way, each at most eps / 2 of the
sum so far. Like a random walk they reach sqrt(n) eps / 2 in each order, and sqrt(2) times that in
the difference. ``_reordered`` is four times that, for sums of up to 1,024 products: no processor,
number of threads or blocking of the sums should exceed it.

Where weights were folded, solved for and stored again, ``assert_same_function`` measures what that
costs a model.
"""

import copy

import torch

_PRODUCTS = 1024


def _reordered(dtype):
    return 4 * 2**0.5 * _PRODUCTS**0.5 * torch.finfo(dtype).eps / 2


FLOAT32 = _reordered(torch.float32)  # 1.1e-5
FLOAT64 = _reordered(torch.float64)  # 2.0e-14

LOGITS = {
    "rtol": FLOAT32,
    "atol": FLOAT32,
}  # entries around 1, after layers whose norms keep errors from growing
# Logits of up to three, after layers without norms on queries and keys; without AVX-512 they differ
# by 1.3e-5.
LARGE_LOGITS = {"rtol": 3 * FLOAT32, "atol": 3 * FLOAT32}
ACTIVATIONS = {
    "rtol": FLOAT32,
    "atol": FLOAT32 / 10,
}  # entries around 0.1: averages of values, outputs of a layer
# A converted attention has two matrices in the place of one for each of queries, keys, values and
# outputs, all of them rounded when they are stored.
CONVERTED = 8 * FLOAT32  # 8.6e-5, of logits around 1
EXACT = {
    "rtol": 0,
    "atol": 500 * FLOAT64,
}  # 1.0e-11: whole modules in float64, with sums over sums, softmax and norms


@torch.no_grad()
def assert_same_function(found, expected, run):
    """Asserts that two models of equal functions differ by rounding only: twice what arithmetic and
    storing explain.
    """
    generator = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.float32).eps
    results = [run(found), run(expected)]
    limit = 0.0
    for model, result in zip((found, expected), results, strict=True):
        exact = copy.deepcopy(model).double()
        for weight in exact.parameters():  # rounded otherwise
            weight.data *= 1 + eps * (
                torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 0.5
            )
        limit += 2 * float((result.double() - run(exact)).abs().max())
    difference = float((results[0] - results[1]).abs().max())
    assert difference <= limit, f"differ by {difference:.3g}, rounding explains {limit:.3g}"
