"""``--json`` of every command, for every kind of checkpoint that it can be asked about, as a strict
reader takes it.
"""

import json

import pytest
from helpers.processes import run_python

from kvfold.convert.data import read_text

SMALL = ["--samples", "2", "--seq-len", "32"]
RESULTS = {
    "gqa": "--to gqa --kv-heads 2 --method mean",
    "free": "--to mla --kv-rank 24 --rope-dim 8 --method svd",
    "engine": "--to mla --kv-rank 24 --rope-dim 8 --layout engine --samples 2 --seq-len 32",
}


def parse(text):
    """JSON as a strict reader takes it, without NaN and infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(kvfold):
    """Runs a command with ``--json`` on stdout, and parses what is there."""

    def run(*words):
        return parse(kvfold(*words).stdout)

    return run


@pytest.mark.parametrize("name", RESULTS)
def test_commands_write_json_for_every_checkpoint(run, tiny_reader, tmp_path, name):
    out = tmp_path / name
    json_ = ["--json", "-"]
    assert (
        run("convert", tiny_reader, out, *RESULTS[name].split(), *json_)["cache_elements"]["to"] > 0
    )
    assert run("inspect", out, "--json")["cache"]["cache_elements"] > 0
    assert run("drift", tiny_reader, out, *SMALL, *json_)["sequences"] == 2
    assert run("verify", out, *json_)["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_commands_that_load_whole_models_write_json(run, tiny_reader, tmp_path, name):
    (tmp_path / "text.txt").write_text(read_text("calibration"))
    out = tmp_path / name
    run("convert", tiny_reader, out, *RESULTS[name].split(), "--json", "-")
    bench = "--context 16 --batch 1 --prefill-tokens 0 --seconds 0 --device cpu --json -"
    evaluate = "--lengths 128 --samples 2 --json -"
    uptrain = "--steps 1 --batch-tokens 64 --seq-len 32 --json -"
    assert run("bench", out, *bench.split())["rows"]
    assert run("eval", tiny_reader, out, *evaluate.split())["rows"]
    text = ["--text", tmp_path / "text.txt"]
    assert run("uptrain", out, tmp_path / "trained", *text, *uptrain.split())


def test_json_on_stdout_is_alone_when_a_library_prints_past_python():
    # As the Rust code of tokenizers does for special tokens that it does not know.
    code = (
        "import os; from kvfold.convert.console import check_output_files, print_result;"
        " check_output_files('-'); os.write(1, b'a warning');"
        " print_result('-', lambda: {'a': 1}, 'a table')"
    )
    ended = run_python("-c", code)
    assert parse(ended.stdout) == {"a": 1}
    assert ended.stderr == "a warninga table\n"
