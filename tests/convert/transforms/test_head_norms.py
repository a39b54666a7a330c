"""Linear maps in place of norms on queries and keys, against the norms' definition in float64."""

from dataclasses import replace

import pytest
import torch
from helpers import precision
from helpers.layers import NORMS, head_norm, normal, normalized, normed_statistics, relative_error

from kvfold.convert.transforms.head_norms import linearize_norms, project_with_norms
from kvfold.convert.transforms.weights import AttentionWeights, make_blank_statistics

E = 32
D = 8
H = 8
G = 4
TOKENS = 24


def make(norm, bias=False):
    maps = normal(0, H, D, E), normal(1, G, D, E), normal(2, G, D, E), normal(3, E, H, D)
    biases = {"q_bias": normal(4, H, D), "k_bias": normal(5, G, D)} if bias else {}
    norms = {"q_norm": head_norm(6, H, D, norm), "k_norm": head_norm(7, G, D, norm)}
    return AttentionWeights(*maps, **biases, **norms)


def inputs(seed=11, sequences=40):
    """Tokens of six sorts, some longer than others, with a little noise: what a norm divides by
    follows the sort.
    """
    sorts = normal(12, 6, E) * torch.linspace(0.5, 3.0, 6, dtype=torch.float64)[:, None]
    drawn = torch.randint(6, (sequences, TOKENS), generator=torch.Generator().manual_seed(seed))
    return sorts[drawn] + 0.3 * normal(seed, sequences, TOKENS, E)


def keys(weights, x):
    """Keys before they rotate, ``[B, G, T, D]``."""
    y = torch.einsum("hde,bte->bhtd", weights.k, x)
    y = y if weights.k_bias is None else y + weights.k_bias[:, None]
    return normalized(y, weights.k_norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_are_those_of_the_definition_and_the_map_misses_far_less_than_one_number(
    norm, bias
):
    """Keys of inputs that the fit has not seen, by the map and by one number per head."""
    weights = make(norm, bias)
    x = inputs()
    rows, _ = project_with_norms(weights, x.flatten(0, 1))
    found = rows[:, H:].unflatten(0, x.shape[:2]).transpose(1, 2)
    torch.testing.assert_close(found, keys(weights, x))
    gathered = normed_statistics(weights, x)
    fitted = linearize_norms(weights, gathered)
    divided = linearize_norms(weights, replace(gathered, normed=None))
    assert fitted.q_norm is fitted.k_norm is None
    assert (fitted.k_bias is None) == (weights.k_bias is None)
    seen = inputs(13)
    wanted = keys(weights, seen)
    assert relative_error(keys(fitted, seen), wanted) < 0.6 * relative_error(
        keys(divided, seen), wanted
    )


def test_without_text_a_map_is_the_projection_over_one_number_per_head():
    weights = make("rms one row")
    scales = torch.linspace(0.5, 2.0, E)
    linear = linearize_norms(weights, make_blank_statistics(weights, scales))
    rms = (weights.k * scales).square().sum(-1).mean(-1).sqrt()
    expected = weights.k_norm.weight[..., None] * weights.k / rms[:, None, None]
    torch.testing.assert_close(linear.k, expected, **precision.ACTIVATIONS)
