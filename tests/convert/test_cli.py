"""The command line: help, exit status, the end of stderr."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import read_cases
from helpers.checkpoints import edit_json, read_json
from helpers.processes import run_python

from kvfold.convert import cli
from kvfold.convert.commands import demo_command
from kvfold.convert.data import demo_folder
from kvfold.convert.recipes import list_recipe_names

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub")


def test_help_fits_80_columns(kvfold, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = kvfold()
    rows = re.findall(r"^  ([a-z]+) {2,}.*[^.]\.$", done.stdout, re.MULTILINE)
    assert rows == list(cli.kvfold.commands)
    helps = [done.stdout, *(kvfold(command, "--help").stdout for command in rows)]
    assert max(len(line) for text in helps for line in text.splitlines()) <= 80


def test_help_and_wrong_inputs_import_nothing_heavy(tmp_path):
    """In one process: what a line imports shows at that line."""
    (tmp_path / "words").write_text("some words")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    demo = str(demo_folder())
    helps = [[], *([command, "--help"] for command in cli.kvfold.commands)]
    commands = read_cases(__file__)
    wrong = {text: line.replace("DEMO", demo).split() for text, line in commands.items()}
    lines = [*helps, *wrong.values(), ["inspect", demo, "--json"]]
    # The last three open a checkpoint, for which numpy and huggingface_hub are needed.
    heavy = [HEAVY] * (len(lines) - 3) + [HEAVY[:2]] * 3
    script = f"""
import sys
import kvfold.attention
from kvfold.convert import cli
dir(kvfold.attention), dir(kvfold.convert), kvfold.convert.inspect_checkpoint
for line, heavy in {list(zip(lines, heavy, strict=True))}:
    print("line:", line, file=sys.stderr)
    try:
        cli.main(line)
    except SystemExit as end:
        imported = [name for name in heavy if name in sys.modules]
        print("end:", end.code, imported, file=sys.stderr)
"""
    told = run_python("-c", script, cwd=tmp_path).stderr
    ends = re.findall("^end: (.*)$", told, re.MULTILINE)
    assert ends == ["0 []"] * len(helps) + ["2 []"] * len(wrong) + ["0 []"], told
    errors = re.findall("^error: (.*)$", told, re.MULTILINE)
    assert all(text in error for text, error in zip(wrong, errors, strict=True)), errors


def test_pooling_heads_imports_torch_beside_copying_and_no_transformers(out):
    """They take as long to import as a gigabyte to copy."""
    paths = [str(demo_folder()), str(out)]
    line = ["convert", *paths, "--to", "mqa", "--method", "mean", "--quiet"]
    script = f"""
import atexit, sys
from kvfold.convert import cli
from kvfold.convert.checkpoint.writer import ShardWriter

def show():
    print([name for name in ("torch", "transformers") if name in sys.modules])

copy = ShardWriter.copy_source_tensors
ShardWriter.copy_source_tensors = lambda *arguments: show() or copy(*arguments)
atexit.register(show)
cli.main({line})
"""
    shown = run_python("-c", script).stdout.splitlines()
    assert (shown[0], shown[-1]) == ("[]", "['torch']")


@pytest.mark.parametrize(
    "line",
    [
        "convert",
        "convert a b",
        "convert a b --to mqa --json",
        "melt",
        "push a team/b",
        "convert a b --to mqa --resume",
        "convert a b --to mqa --keep-quantized",
        "inspect nowhere/at/all",
        "sweep a --within 5%",
        "inspect \x1b[2J\u202e",
    ],
)
def test_a_wrong_command_line_ends_in_one_error_line(kvfold, line, told):
    done = kvfold(*line.split(), status=2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "docs/" not in done.stderr  # which pip does not install
    told(done.stderr.strip())


def test_a_conversion_by_processes_of_torchrun_is_refused(kvfold, monkeypatch, out, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = kvfold("convert", demo_folder(), out, "--to", "mqa", status=2).stderr.strip()
    assert error.startswith("error: torchrun: ")
    assert "without torchrun, with --device cuda or with more threads" in error
    told(error)
    assert not out.exists()


@pytest.mark.parametrize(
    "line", ["convert a b --to mqa", "sweep a", "drift a b", "uptrain a b --text c", "chat a"]
)
def test_a_gpu_that_is_not_there_is_refused_before_the_model(kvfold, line, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = kvfold(*line.split(), "--device", "cuda", status=2).stderr
    assert error.startswith("error: --device cuda: torch finds no CUDA device")


def test_demo_converts_measures_and_writes_its_table(kvfold, monkeypatch, tmp_path):
    pooled = {"mqa-mean": demo_command.TARGETS["mqa-mean"]}
    monkeypatch.setattr(demo_command, "TARGETS", pooled)
    monkeypatch.setattr(demo_command, "_WINDOWS", 1)
    monkeypatch.setattr(demo_command, "_LENGTH", 16)
    result = json.loads(kvfold("demo", tmp_path / "kept", "--json", "-").stdout)
    assert [row["cache_elements"] for row in result["targets"]] == [512, 64]
    assert result["targets"][0]["perplexity"] < result["targets"][1]["perplexity"]
    assert (tmp_path / "kept" / "mqa-mean" / "config.json").is_file()
    kvfold("demo", tmp_path / "kept", status=2)


def test_convert_prints_its_plan_and_its_result(kvfold, tmp_path):
    out = tmp_path / "some" / "out"
    pooled = ("convert", demo_folder(), out, "--to", "mqa", "--method", "mean")
    saving = "512 -> 64 elements per token per layer, 87.5 % less"
    planned = kvfold(*pooled, "--dry-run", "--json", "-")
    assert json.loads(planned.stdout)["out"] is None
    assert saving in planned.stderr
    assert not list(tmp_path.iterdir())
    converted = kvfold(*pooled, "--json", tmp_path / "result.json")
    assert saving in converted.stdout
    result = read_json(tmp_path / "result.json")
    assert (result["out"], result["cache_elements"]) == (str(out), {"from": 512, "to": 64})
    quiet = kvfold(*pooled, "--overwrite", "--quiet")
    assert quiet.stdout == ""
    (line,) = quiet.stderr.splitlines()
    assert line.startswith("warning: --method mean ")
    assert json.loads(kvfold("verify", out, "--json", "-").stdout)["problems"] == []


def test_recipes_lists_models_and_caches(kvfold):
    shown = kvfold("recipes").stdout
    assert re.search("llama-2-7b-mqa +meta-llama/Llama-2-7b-hf +8192 +256", shown)
    listed = json.loads(kvfold("recipes", "--json", "-").stdout)
    assert [recipe["name"] for recipe in listed] == list_recipe_names()


def test_drift_runs_a_tokenizers_code_only_when_allowed(kvfold, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    model = Path(shutil.copytree(demo_folder(), tmp_path / "model"))
    ran = tmp_path / "ran"
    (model / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    edit_json(model / "tokenizer_config.json", **own)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    measured = ("drift", model, demo_folder(), "--samples", 1, "--seq-len", 16, "--json", "-")
    done = kvfold(*measured, status=2)
    assert re.search(
        "it runs code from the checkpoint; .* then pass --trust-remote-code$", done.stderr.strip()
    )
    assert not ran.exists()
    done = kvfold(*measured, "--trust-remote-code")
    assert ran.exists()
    assert json.loads(done.stdout)["sequences"] == 1


def test_an_unforeseen_failure_is_one_line_too(kvfold, monkeypatch):
    from kvfold.convert.conversion import convert

    def broken(request):
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(convert, "convert_checkpoint", broken)
    monkeypatch.delenv("KVFOLD_TRACEBACK", raising=False)
    done = kvfold("convert", "a", "b", "--to", "mqa", status=1)
    assert done.stderr.splitlines()[-1].startswith(
        "error: unexpected ZeroDivisionError: one two (set KVFOLD_TRACEBACK=1"
    )


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m kvfold.convert inspect {demo_folder()} --json | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
