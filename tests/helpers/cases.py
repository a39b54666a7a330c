"""Cases of parametrized tests: read from the JSON beside a test, most left to ``pytest --all``."""

import json
from pathlib import Path

import pytest


def read_cases(file):
    """The tables of configs and expected facts beside a test, whose ``__file__`` is given."""
    return json.loads(Path(file).with_suffix(".json").read_text())


def mostly_slow(cases, quick):
    """``cases``, with all but every ``quick``-th, from the first, marked slow; tuples and lists
    are several arguments.
    """
    several = (case if isinstance(case, tuple | list) else (case,) for case in cases)
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if at % quick else [])
        for at, case in enumerate(several)
    ]
