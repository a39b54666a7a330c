"""The learning rate of polishing after rounds that gained nothing."""

import pytest

from kvfold.convert.training.polish import slowdown


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([0.2], 1.0),
        ([0.2, 0.19, 0.18], 1.0),
        ([0.2, 0.21], 0.5),
        ([0.2, 0.1999], 0.5),  # hardly less
        ([0.2, 0.21, 0.205, 0.19], 0.25),  # of the least so far, not of the round before
        ([0.2, float("inf"), 0.19], 0.5),
        ([-1e-9, 1e-9], 0.5),  # rounding of a lossless model
    ],
)
def test_the_learning_rate_halves_after_every_round_that_hardly_gains(errors: list[float], expected: float) -> None:
    assert slowdown(errors, steps=200) == expected
    assert slowdown(errors, steps=20) == expected


def test_of_a_long_run_eighths_are_judged() -> None:
    """Rounds that gain half a percent each, 2.5 % in five."""
    errors = [0.2 * 0.995**rounds for rounds in range(41)]
    assert slowdown(errors, steps=200) == 0.5**40
    assert slowdown(errors, steps=1000) == 1.0
    assert slowdown(errors[:16], steps=375) == 0.5**7  # 15 rounds, 2 of them a part


def test_a_rise_within_a_part_that_gains_is_no_reason() -> None:
    errors = [0.2, 0.22, 0.21, 0.2, 0.19, 0.18]
    assert slowdown(errors, steps=1000) == 1.0
    assert slowdown([*errors, 0.2, 0.2, 0.2, 0.2, 0.2], steps=1000) == 0.5
