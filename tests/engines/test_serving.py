"""Engines, really run: equal tokens or a refusal, never wrong ones, and the cache that was promised."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.data import demo_folder

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "serve_check.py"
VARIABLES = {"vllm": "KVFOLD_VLLM_PYTHON", "mlx": "KVFOLD_MLX_PYTHON", "llama.cpp": "KVFOLD_LLAMA_CPP_PYTHON"}
SOURCES = os.environ.get("KVFOLD_LLAMA_CPP", "")
# Served, or a part of the message of the refusal.
SERVED = True
OUTCOMES = {
    "vllm": {
        "gqa-2": SERVED,
        "mqa": SERVED,
        "mla-engine": "Head dimension 64 is not supported by MLA",
        "mla-free": "Head dimension 64 is not supported by MLA",
        "mla-512-64-engine": SERVED,
        "mla-512-64-free": SERVED,
        "experts-512-64-engine": SERVED,
    },
    "vllm --model-impl transformers": {"mla-512-64-engine": SERVED, "mla-512-64-free": SERVED},
    "mlx": {
        "gqa-2": SERVED,
        "mqa": SERVED,
        "mla-engine": SERVED,
        "mla-free": "Model type youtu not supported",
        "mla-512-64-engine": SERVED,
        "mla-512-64-free": "Model type youtu not supported",
        "experts-engine": SERVED,
        "experts-free": "float division by zero",
    },
    "llama.cpp": {
        "gqa-2": SERVED,
        "mqa": SERVED,
        "mla-engine": SERVED,
        "mla-free": "wrong number of tensors",
        "mla-512-64-engine": SERVED,
        "mla-512-64-free": "wrong number of tensors",
        "experts-engine": SERVED,
    },
}
OPTIONS = {
    "vllm --model-impl transformers": ["--option", 'model_impl="transformers"'],
}
Rows = dict[str, dict[str, Any]]
FindPython = Callable[[str], str]


def serve_check(engine: str, python: str, folders: list[Path], out: Path, options: list[str]) -> tuple[int, Rows]:
    """The exit status of ``recipes/serve_check.py`` and its rows, by checkpoint."""
    call = [sys.executable, str(SCRIPT), *map(str, folders), "--engine", engine, "--python", python]
    done = subprocess.run([*call, *options, "--json", str(out)], capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    return done.returncode, {row["checkpoint"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.fixture(scope="module", params=OUTCOMES)
def rows(
    request: pytest.FixtureRequest,
    python_with: FindPython,
    made: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Rows]:
    """The case of OUTCOMES, and the rows of the source and of every result."""
    case = request.param
    engine = case.split()[0]
    python = python_with(VARIABLES[engine])
    if engine == "llama.cpp" and not Path(SOURCES, "convert_hf_to_gguf.py").is_file():
        pytest.skip("no convert_hf_to_gguf.py; set KVFOLD_LLAMA_CPP to the folder of llama.cpp's sources")
    folders = [demo_folder(), *(made(name) for name in OUTCOMES[case])]
    out = tmp_path_factory.mktemp("rows") / "rows.json"
    return case, serve_check(engine, python, folders, out, OPTIONS.get(case, []))[1]


def test_tokens_equal_or_refused(rows: tuple[str, Rows]) -> None:
    case, found = rows
    assert found[demo_folder().name]["verdict"] == "equal"
    results = {name: row for name, row in found.items() if name != demo_folder().name}
    told = {name: SERVED if row["verdict"] == "equal" else row.get("message", "wrong") for name, row in results.items()}
    expected = OUTCOMES[case]
    assert {name: said for name, said in told.items() if said is not SERVED and str(expected[name]) not in said} == {}
    assert {name for name, said in told.items() if said is SERVED} == {n for n, o in expected.items() if o is SERVED}


def test_cache_is_as_promised(rows: tuple[str, Rows]) -> None:
    served = [row for row in rows[1].values() if row["verdict"] == "equal"]
    assert served
    assert {row["checkpoint"]: row["cache"] for row in served} == {
        row["checkpoint"]: row["cache_promised"] for row in served
    }
