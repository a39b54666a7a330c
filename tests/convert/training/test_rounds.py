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
    assert slowdown(errors) == expected
