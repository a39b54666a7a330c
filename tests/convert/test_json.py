"""``--json`` of every command, for every kind of checkpoint that it can be asked about, as a strict
reader takes it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.judge import strict

from kvfold.convert import cli
from kvfold.convert.data import demo_folder, read_text

SMALL = ["--samples", "2", "--seq-len", "32"]
RESULTS = {
    "gqa": "--to gqa --kv-heads 2 --method mean",
    "free": "--to mla --kv-rank 24 --rope-dim 8 --method svd",
    "engine": "--to mla --kv-rank 24 --rope-dim 8 --layout engine --samples 2 --seq-len 32",
}


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
    made = {"demo": demo_folder()}
    for name, options in RESULTS.items():
        run(
            "convert",
            demo_folder(),
            folder / name,
            *options.split(),
            "--quiet",
            "--json",
            folder / f"{name}.json",
        )
        made[name] = folder / name
    return made


@pytest.mark.parametrize("name", RESULTS)
def test_what_convert_tells_of_each_layout(results, name):
    assert strict(results[name].with_suffix(".json").read_text())["cache_elements"]["to"] > 0


@pytest.mark.parametrize("name", ["demo", *RESULTS])
@pytest.mark.parametrize("command", ["inspect", "verify", "drift", "sweep", "dry-run"])
def test_every_command_and_checkpoint(results, tmp_path, name, command):
    model = results[name]
    file = tmp_path / "told.json"
    if (command, name) == ("verify", "demo") or (
        command == "sweep" and name not in ("demo", "gqa")
    ):
        pytest.skip("it has no record, or nothing that a sweep could convert")
    arguments: dict[str, list[object]] = {
        "inspect": [model],
        "verify": [model],
        "drift": [demo_folder(), model, *SMALL],
        "sweep": [model, "--targets", "mqa", *SMALL, "--quiet"],
        "dry-run": [
            demo_folder(),
            tmp_path / "out",
            *RESULTS.get(name, "--to mqa").split(),
            "--dry-run",
        ],
    }
    run("convert" if command == "dry-run" else command, *arguments[command], "--json", file)
    assert strict(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_commands_that_load_whole_models(results, tmp_path, name):
    small = [
        "--context",
        "16",
        "--batch",
        "1",
        "--prefill-tokens",
        "0",
        "--seconds",
        "0",
        "--device",
        "cpu",
        "--quiet",
    ]
    lengths = ["--lengths", "256", "--samples", "2", "--quiet"]
    (tmp_path / "text.txt").write_text(read_text("calibration"))
    steps = [
        "--text",
        tmp_path / "text.txt",
        "--steps",
        "1",
        "--batch-tokens",
        "64",
        "--seq-len",
        "32",
        "--quiet",
    ]
    run("eval", demo_folder(), results[name], *lengths, "--json", tmp_path / "e")
    run("bench", results[name], *small, "--json", tmp_path / "b")
    run("uptrain", results[name], tmp_path / "trained", *steps, "--json", tmp_path / "u")
    run("recipes", "--json", tmp_path / "r")
    assert all(strict((tmp_path / file).read_text()) for file in "ebur")


def test_json_on_stdout_is_alone_when_a_library_prints_past_python():
    # As the Rust code of tokenizers does for special tokens that it does not know.
    code = (
        "import os; from kvfold.convert.console import check_files, tell; check_files('-'); "
        "os.write(1, b'a warning'); tell('-', lambda: {'a': 1}, 'a table')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert strict(ended.stdout) == {"a": 1}
    assert ended.stderr == "a warninga table\n"
