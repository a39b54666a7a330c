"""The line at the end of a run of the fuzz."""

from fuzz.counts import drawn


def pytest_terminal_summary(terminalreporter) -> None:
    if drawn["inputs"]:
        failed = len(terminalreporter.stats.get("failed", []))
        terminalreporter.write_line(f"fuzz: {drawn['inputs']} inputs, {drawn['refused']} refused, {failed} failures")
