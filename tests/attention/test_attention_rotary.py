"""Rotary embedding against the reference's loops, and the property it exists for."""

import pytest
import torch
from helpers import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import apply_rotary, rotary_frequencies, rotary_tables


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_rotary_embedding_equals_the_reference(pairs, extra, interleaved, batched, seed):
    """Partial or whole, both layouts, any frequencies, any positions: shared or per sequence."""
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 5, 2 * pairs + extra, dtype=torch.float64)
    frequencies = torch.rand(pairs, dtype=torch.float64)
    positions = torch.randint(0, 5000, (2, 5) if batched else (5,))
    tables = rotary_tables(positions, frequencies, torch.float64)
    result = apply_rotary(x, tables, "interleaved" if interleaved else "half")
    rows = positions.expand(2, 5)
    expected = [
        reference.rotate(head, rows[b], frequencies, interleaved) for b in range(2) for head in x[b]
    ]
    torch.testing.assert_close(result.flatten(0, 1), torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_holds_at_a_long_context(dtype):
    """At position 130,000 the error is the rounding of the result, not of the angle."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 64).to(dtype)
    positions = torch.arange(130_000, 130_006)
    theta = rotary_frequencies(64)
    exact = apply_rotary(x.double(), rotary_tables(positions, theta, torch.float64))
    result = apply_rotary(x, rotary_tables(positions, theta))
    assert result.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (result.double() - exact).abs().max() <= 2 * rounding
