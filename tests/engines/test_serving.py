"""Engines, really run: equal tokens or a refusal, never wrong ones, and the cache that was
promised.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.convert.data import demo_folder

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "serve_check.py"
VARIABLES = {
    "vllm": "KVFOLD_VLLM_PYTHON",
    "mlx": "KVFOLD_MLX_PYTHON",
    "llama.cpp": "KVFOLD_LLAMA_CPP_PYTHON",
}
SOURCES = os.environ.get("KVFOLD_LLAMA_CPP", "")
# Of each engine and checkpoint: true for served, or a part of the message of the refusal.
OUTCOMES = json.loads(Path(__file__).with_name("outcomes.json").read_text())
OPTIONS = {"vllm --model-impl transformers": ["--option", 'model_impl="transformers"']}


@pytest.mark.parametrize("case", OUTCOMES)
def test_tokens_equal_or_refused_and_the_cache_as_promised(case, python_with, made, tmp_path):
    engine = case.split()[0]
    expected = OUTCOMES[case]
    out = tmp_path / "rows.json"
    python = python_with(VARIABLES[engine], *(["kvfold"] if "kvfold" in case else []))
    if engine == "llama.cpp" and not Path(SOURCES, "convert_hf_to_gguf.py").is_file():
        pytest.skip(
            "no convert_hf_to_gguf.py; set KVFOLD_LLAMA_CPP to the folder of llama.cpp's sources"
        )
    folders = [str(demo_folder()), *(str(made(name)) for name in expected)]
    options = ["--engine", engine, "--python", python, *OPTIONS.get(case, [])]
    call = [sys.executable, str(SCRIPT), *folders, *options]
    done = subprocess.run([*call, "--json", str(out)], capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    rows = {row["checkpoint"]: row for row in json.loads(out.read_text())["rows"]}
    served = {name: row for name, row in rows.items() if row["verdict"] == "equal"}
    assert served.keys() == {
        demo_folder().name,
        *(name for name, outcome in expected.items() if outcome is True),
    }
    refused = {
        name: row.get("message", "wrong") for name, row in rows.items() if name not in served
    }
    assert {
        name: message for name, message in refused.items() if str(expected[name]) not in message
    } == {}
    assert {name: row["cache"] for name, row in served.items()} == {
        name: row["cache_promised"] for name, row in served.items()
    }
