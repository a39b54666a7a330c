"""How many inputs each test draws: KVFOLD_INPUTS in all, or 600; and how many there were at the end."""

import os

INPUTS = int(os.environ.get("KVFOLD_INPUTS", "600"))
TESTS = 9  # that share the inputs
drawn = {"inputs": 0, "refused": 0}


def pytest_terminal_summary(terminalreporter) -> None:
    if drawn["inputs"]:
        failed = len(terminalreporter.stats.get("failed", []))
        terminalreporter.write_line(f"fuzz: {drawn['inputs']} inputs, {drawn['refused']} refused, {failed} failures")
