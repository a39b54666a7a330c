"""How many cases run: KVFOLD_CASES, or 12; and their number at the end."""

import os
from collections import Counter

import pytest

CASES = int(os.environ.get("KVFOLD_CASES", "12"))
COUNTS = pytest.StashKey[Counter]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = (yield).get_result()
    if report.when == "call" and item.get_closest_marker("faults"):
        item.config.stash[COUNTS][report.outcome] += 1


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if counts := config.stash[COUNTS]:
        listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"faults: {sum(counts.values())} cases: {listed}")
