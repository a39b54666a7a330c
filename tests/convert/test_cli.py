"""The command as a person meets it: fresh processes, exit status, the last line on stderr."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import run_python

from kvfold.convert.data import demo_folder

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors")


def kvfold(*arguments, **environment):
    return run_python("-m", "kvfold.convert", *arguments, check=False, environment=environment)


def imported(*arguments):
    done = run_python("-X", "importtime", "-m", "kvfold.convert", *arguments)
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_no_arguments_prints_help():
    done = kvfold()
    assert done.returncode == 0
    assert "inspect" in done.stdout
    assert "convert" in done.stdout


@pytest.mark.parametrize("command", [[], ["inspect"], ["convert"], ["drift"], ["demo"]])
def test_help_is_quick_to_load(command):
    assert not imported(*command, "--help") & set(HEAVY)


def test_inspect_is_quick_to_load():
    assert not imported("inspect", demo_folder()) & set(HEAVY)
    assert not imported("inspect", demo_folder(), "--json") & set(HEAVY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert"], "error: kvfold convert: missing argument 'MODEL'; see `kvfold convert --help`"),
        (["convert", "a", "b"], "error: kvfold convert: missing option '--to'"),
        (["convert", "a", "b", "--to", "gpa"], "error: kvfold convert: invalid value for '--to': 'gpa' is not one of"),
        (
            ["convert", "a", "b", "--to", "gqa", "--kv-heads", "x"],
            "error: kvfold convert: invalid value for '--kv-heads'",
        ),
        (["convert", "a", "b", "--to", "gqa"], "error: --to gqa needs --kv-heads"),
        (["convert", "a", "b", "--to", "mqa", "--refine", "-3"], "error: kvfold convert: invalid value for '--refine'"),
        (["melt"], "error: kvfold: no such command 'melt'"),
        (["inspect", "--colour"], "error: kvfold inspect: no such option '--colour'"),
        (["inspect", "nowhere/at/all"], "error: "),
    ],
)
def test_a_wrong_command_line_ends_in_one_error_line(arguments, message):
    done = kvfold(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_inspect_prints_a_summary_and_json():
    text = kvfold("inspect", demo_folder()).stdout
    assert "MHA: 8 query heads, 8 key/value heads, head dim 32" in text
    assert "--to mqa" in text
    facts = json.loads(kvfold("inspect", demo_folder(), "--json").stdout)
    assert (facts["heads"], facts["kv_heads"], facts["attention"]) == (8, 8, "MHA")


def test_dry_run_writes_nothing(tmp_path):
    done = kvfold("convert", demo_folder(), tmp_path / "out", "--to", "mqa", "--method", "mean", "--dry-run")
    assert done.returncode == 0
    assert "MHA -> MQA, method mean: 512 -> 64 KV-cache elements per token per layer (87.5 % less)" in done.stdout
    assert "model.layers.0.self_attn.k_proj.weight  BF16 256x256 -> 32x256" in done.stdout
    assert not list(tmp_path.iterdir())


def test_convert_says_what_it_did(tmp_path):
    done = kvfold("convert", demo_folder(), tmp_path / "out", "--to", "mqa", "--method", "mean")
    assert done.returncode == 0
    assert "MHA -> MQA" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "out" / "config.json").is_file()
    quiet = kvfold("convert", demo_folder(), tmp_path / "out2", "--to", "mqa", "--method", "mean", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


@pytest.mark.parametrize(("name", "reason"), [("no/x.json", "there is no folder"), (".", "it is a folder")])
def test_numbers_that_could_not_be_written_are_refused_before_measuring(tmp_path, name, reason):
    done = kvfold("drift", demo_folder(), "no/such/model", "--json", tmp_path / name)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --json {tmp_path / name}: cannot be written ({reason}")


def test_drift_asks_for_leave_to_run_a_tokenizers_code(tmp_path):
    from kvfold.convert.errors import InputError
    from kvfold.convert.measure.drift import drift_checkpoints

    model = Path(shutil.copytree(demo_folder(), tmp_path / "model"))
    ran = tmp_path / "ran"
    (model / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = r"model: measuring drift needs the model.s tokenizer: refusing to run .* then pass --trust-remote-code$"
    with pytest.raises(InputError, match=asked):
        drift_checkpoints(str(model), str(demo_folder()), samples=1, seq_len=16)
    assert not ran.exists()
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = kvfold("drift", model, demo_folder(), "--samples", 1, "--seq-len", 16, "--trust-remote-code", **environment)
    assert done.returncode == 0, done.stderr
    assert ran.exists()


def test_an_unforeseen_failure_is_one_line_too(tmp_path, monkeypatch, capsys):
    from kvfold.convert import cli
    from kvfold.convert.conversion import run

    def broken(request):
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(run, "convert_checkpoint", broken)
    monkeypatch.delenv("KVFOLD_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(["convert", "a", "b", "--to", "mqa"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError: one two (set KVFOLD_TRACEBACK=1")


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m kvfold.convert inspect {demo_folder()} --json | true"
    for _ in range(3):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        time.sleep(0.05)
