"""One file holds the error messages that tests compare word for word: ``tests/messages.txt``.

A test passes what it was told to the fixture ``told``; ``pytest --rewrite-messages`` writes the file anew from the
tests that run, and its diff is read like that of code. An entry is the test's name and its messages::

    == convert/test_request.py::test_what_is_refused[kv_heads=0]
    --kv-heads must be a whole number of at least 1, not 0
"""

from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "messages.txt"
_HEAD = "== "


class Messages:
    """The recorded messages by test, and those of the tests that ran."""

    def __init__(self, file: Path = FILE) -> None:
        self.file, self.seen = file, dict[str, list[str]]()
        blocks = file.read_text().split(f"\n{_HEAD}") if file.exists() else []
        self.recorded = dict(block.removeprefix(_HEAD).rstrip("\n").split("\n", 1) for block in blocks if block.strip())

    def add(self, test: str, text: str) -> str | None:
        """Notes a message of a test; returns the record of all messages of that test, None where there is none."""
        self.seen.setdefault(test, []).append(text)
        return self.recorded.get(test)

    def rewrite(self, files: Iterable[str]) -> None:
        """Writes what was seen; entries of ``files`` that no test used are dropped."""
        ran = tuple(f"{file}::" for file in files)
        kept = {test: text for test, text in self.recorded.items() if not test.startswith(ran)}
        entries = kept | {test: "\n".join(texts) for test, texts in self.seen.items()}
        self.file.write_text("\n".join(f"{_HEAD}{test}\n{text}\n" for test, text in sorted(entries.items())))
