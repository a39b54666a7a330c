"""``--json`` of every command, for every kind of checkpoint that it can be asked about, as a strict
reader takes it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import run_python

from kvfold.convert import cli
from kvfold.convert.data import demo_folder, read_text

SMALL = ["--samples", "2", "--seq-len", "32"]
RESULTS = {
    "gqa": "--to gqa --kv-heads 2 --method mean",
    "free": "--to mla --kv-rank 24 --rope-dim 8 --method svd",
    "engine": "--to mla --kv-rank 24 --rope-dim 8 --layout engine --samples 2 --seq-len 32",
}


def parse(text: str) -> Any:
    """JSON as a strict reader takes it, without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(map(str, words)))
    assert caught.value.code == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model that ships, converted to each of ``RESULTS``; what ``convert --json`` printed is
    beside it.
    """
    folder = tmp_path_factory.mktemp("json")
    converted = {"demo": demo_folder()}
    for name, options in RESULTS.items():
        converted[name] = folder / name
        files = ["--quiet", "--json", folder / f"{name}.json"]
        run("convert", demo_folder(), folder / name, *options.split(), *files)
    return converted


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, name) for command in ("inspect", "drift") for name in ["demo", *RESULTS]),
        *(("verify", name) for name in RESULTS),
        *(("sweep", name) for name in ("demo", "gqa")),
    ],
)
def test_every_command_writes_json_for_every_checkpoint(results, tmp_path, name, command):
    model = results[name]
    if name in RESULTS:
        assert parse(model.with_suffix(".json").read_text())["cache_elements"]["to"] > 0
    arguments: dict[str, list[object]] = {
        "inspect": [model],
        "verify": [model],
        "drift": [demo_folder(), model, *SMALL],
        "sweep": [model, "--targets", "mqa", *SMALL, "--quiet"],
    }
    run(command, *arguments[command], "--json", tmp_path / "file.json")
    assert parse((tmp_path / "file.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_commands_that_load_whole_models_write_json(results, tmp_path, name):
    (tmp_path / "text.txt").write_text(read_text("calibration"))
    bench = "--context 16 --batch 1 --prefill-tokens 0 --seconds 0 --device cpu --quiet --json"
    uptrain = "--steps 1 --batch-tokens 64 --seq-len 32 --quiet --json"
    evaluate = "--lengths 256 --samples 2 --quiet --json"
    text = ["--text", tmp_path / "text.txt"]
    run("eval", demo_folder(), results[name], *evaluate.split(), tmp_path / "e")
    run("bench", results[name], *bench.split(), tmp_path / "b")
    run("uptrain", results[name], tmp_path / "out", *text, *uptrain.split(), tmp_path / "u")
    run("recipes", "--json", tmp_path / "r")
    assert all(parse((tmp_path / file).read_text()) for file in "ebur")


def test_json_on_stdout_is_alone_when_a_library_prints_past_python():
    # As the Rust code of tokenizers does for special tokens that it does not know.
    code = (
        "import os; from kvfold.convert.console import check_files, print_result;"
        " check_files('-'); os.write(1, b'a warning');"
        " print_result('-', lambda: {'a': 1}, 'a table')"
    )
    ended = run_python("-c", code)
    assert parse(ended.stdout) == {"a": 1}
    assert ended.stderr == "a warninga table\n"
