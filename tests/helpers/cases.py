"""Cases of parametrized tests, most of them left to ``pytest --all``."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: int) -> list[Any]:
    """``cases``, with all but every ``quick``-th, from the first, marked slow; tuples are several
    arguments.
    """
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if at % quick else [])
        for at, case in enumerate(several)
    ]
