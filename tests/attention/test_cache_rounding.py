"""Rounded caches: the literal schemes in float64, and models that attend to what they return."""

import pytest
import torch
from helpers.attention import random_tokens, tiny_decoder
from helpers.layers import normal
from torch.testing import assert_close

from kvfold.attention.cache_rounding import (
    RoundedCache,
    round_cache,
    round_channels,
    round_rows,
)
from kvfold.attention.drift.report import measure_drift

ROUNDINGS = ("fp8", "int4")
LLAMA = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {"kv_lora_rank": 32}  # and a rotary key of 4


def nearest_integer(group, value, steps):
    """``value`` as the nearest of ``steps + 1`` values from the least to the greatest of
    ``group``.
    """
    zero = float(torch.tensor(min(group)).half())
    scale = float(torch.tensor((max(group) - min(group)) / steps).half())
    return zero + scale * min(steps, max(0, round((value - zero) / scale)))


@pytest.mark.parametrize(("rounding", "steps"), [("int8", 255), ("int4", 15), ("int2", 3)])
def test_integers_lie_between_the_least_and_the_greatest_value_of_a_group(rounding, steps):
    rows = normal(0, 2, 64)
    for row, rounded in zip(rows.tolist(), round_rows(rows, rounding).tolist(), strict=True):
        for start in (0, 32):
            group = row[start : start + 32]
            expected = [nearest_integer(group, value, steps) for value in group]
            assert rounded[start : start + 32] == pytest.approx(expected, abs=1e-12)


def test_keys_form_groups_of_tokens_of_which_the_last_may_be_short():
    keys = normal(1, 2, 3, 40, 5)
    rounded = round_channels(keys, "int4")
    for group in (slice(0, 32), slice(32, 40)):
        for channel in range(5):
            values = keys[1, 2, group, channel].tolist()
            expected = [nearest_integer(values, value, 15) for value in values]
            assert rounded[1, 2, group, channel].tolist() == pytest.approx(expected, abs=1e-12)


def test_fp8_has_three_bits_of_mantissa_and_saturates():
    values = torch.tensor([1.0, 1.07, -1.1, 1000.0, 2.0**-9, 0.4 * 2.0**-9], dtype=torch.float64)
    assert round_rows(values, "fp8").tolist() == [1.0, 1.125, -1.125, 448.0, 2.0**-9, 0.0]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradients_pass_as_if_nothing_was_rounded(rounding):
    rows = normal(2, 3, 64).requires_grad_()
    weights = normal(3, 3, 64)
    rounded = round_rows(rows, rounding)
    assert_close(rounded.detach(), round_rows(rows.detach(), rounding))
    (rounded * weights).sum().backward()
    assert torch.equal(rows.grad, weights)


def test_a_latent_is_rounded_as_values_are_and_its_rotary_key_as_keys():
    model = tiny_decoder("deepseek_v3", **LATENT)
    latent = normal(2, 1, 1, 40, 32)
    rope = normal(3, 1, 1, 40, 4)
    rounded = RoundedCache(model.config, "int4").update(latent, rope, 0)
    assert torch.equal(rounded[0], round_rows(latent, "int4"))
    assert torch.equal(rounded[1], round_channels(rope, "int4"))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", LLAMA), ("deepseek_v3", LATENT), ("bloom", {})]
)
def test_a_model_attends_to_a_rounded_cache(family, sizes, rounding):
    """In one pass, in a stream, and in a pass that goes on from the cache of another."""
    tokens = random_tokens(2, 40)
    model, rounded = (tiny_decoder(family, **sizes) for _ in range(2))
    round_cache(rounded, rounding)
    with torch.no_grad():
        expected = model(tokens, past_key_values=RoundedCache(model.config, rounding)).logits
        found = rounded(tokens)
        assert torch.equal(found.logits, expected)
        first = rounded(tokens[:, :32])
        later = rounded(tokens[:, 32:], past_key_values=first.past_key_values)
        assert_close(later.logits, expected[:, 32:], rtol=1e-4, atol=1e-5)
        assert not torch.equal(expected, model(tokens).logits)
    report = measure_drift(model, rounded, tokens, floor=False)
    loss = torch.nn.functional.cross_entropy(
        expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    assert report.kl > 0
    assert report.student_loss == pytest.approx(float(loss), abs=1e-6)
    bits = {"fp8": 8, "int4": 5}[rounding]
    assert report.student_cache_bytes == report.source_cache_bytes * bits // 32
