"""A sample of the inputs of ``python tests/fuzz``, and headers that are read as the safetensors
library reads them.

``KVFOLD_INPUTS=20000 python -m pytest tests/fuzz`` judges that many, instead of 300.
"""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from fuzz.judge import run_all, sentence
from fuzz.mutations import broken, header_changed
from fuzz.seeds import make_seeds
from safetensors import SafetensorError, deserialize

from kvfold.convert.checkpoint.headers import parse_header

ENTRIES: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    "__metadata__": {"format": "pt"},
}


@pytest.mark.slow
def test_a_sample_of_inputs(tmp_path: Path) -> None:
    make_seeds(tmp_path)
    failures: list[str] = []
    run_all(tmp_path, range(int(os.environ.get("KVFOLD_INPUTS", "300"))), 1, failures.append)
    assert not failures, "\n".join(failures)


def test_the_counts_in_the_documentation() -> None:
    root = Path(__file__).parents[2]
    result = json.loads((root / "recipes" / "results" / "fuzz.json").read_text())
    assert result["failures"] == 0
    assert sentence(result) in (root / "docs" / "safety.md").read_text().splitlines()


@pytest.mark.parametrize("part", range(4))
def test_headers_as_the_safetensors_library_reads_them(part: int, tmp_path: Path) -> None:
    """What the library takes is taken, and what it refuses refused."""
    text = json.dumps(ENTRIES).encode()
    path = tmp_path / "x"
    for number in range(part, 800, 4):
        drawn = random.Random(number)
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(40))
        said = (broken if number % 3 else header_changed)(path, drawn)
        assert not (found := disagreement(path.read_bytes())), f"{number}, {said}: {found}"


def disagreement(data: bytes) -> str:
    """What differs between the two readings of a file, or nothing."""
    header = parse_header("x", len(data), lambda start, count: data[start : start + count])
    try:
        taken = sorted(name for name, _ in deserialize(data))
    except (SafetensorError, UnicodeError, OverflowError):
        taken = None
    if not header.problems:
        return (
            ""
            if taken == sorted(tensor.name for tensor in header.tensors)
            else f"the library takes {taken}"
        )
    allowed = [
        "must contain exactly dtype, shape and data_offsets",
        "the name",
        "surrogate",
        "must be one of",
    ]
    if data[8:9] != b"{":  # the format asks for it there, the library takes spaces before it
        allowed.append("its header must be a JSON object")
    stricter = any(reason in problem for problem in header.problems for reason in allowed)
    return "" if taken is None or stricter else f"the library takes it, but {header.problems}"
