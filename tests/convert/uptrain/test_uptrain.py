"""Uptraining from end to end: the output of ``convert`` trains as it is, and is written in the same
layout.
"""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import forked
from helpers.cases import mostly_slow, read_cases
from helpers.checkpoints import (
    assert_same_tensors,
    read_json,
    run_conversion,
    stock_model,
    tensors,
)
from safetensors.torch import load_file, save_file

from kvfold.convert import device
from kvfold.convert.data import read_documents
from kvfold.convert.errors import KvfoldError
from kvfold.convert.options import format_argv
from kvfold.convert.targets.mla.encode import CONSTANT
from kvfold.convert.uptrain import trainer as uptrain_trainer
from kvfold.convert.uptrain import uptraining
from kvfold.convert.uptrain.trainer import make_training_arguments
from kvfold.convert.uptrain.uptrain_request import UptrainRequest
from kvfold.convert.uptrain.uptraining import STATE, uptrain_checkpoint

ROOT = Path(__file__).resolve().parents[3]
CASES = read_cases(__file__)
TARGETS = CASES["targets"]
QUICK = CASES["quick"]  # options of a run of seconds


@pytest.fixture(autouse=True)
def warmup(monkeypatch):
    """So that few steps learn."""
    monkeypatch.setattr(uptrain_trainer, "_WARMUP", 0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(read_documents("held_out"))[:200_000])
    return path


@pytest.fixture(scope="module")
def converted(tiny_reader, text, tmp_path_factory):
    """``converted("gqa")``: a folder as ``convert`` writes it."""
    parent = tmp_path_factory.mktemp("converted")

    def folder(target):
        out = parent / target
        if not out.exists():
            options = {"calibration": str(text)} if target == "engine" else {}
            run_conversion(tiny_reader, out, **TARGETS[target], **options)
        return out

    return folder


def train(model, out, text, **options):
    options = {**QUICK, "quiet": True, **options}
    request = UptrainRequest(model=str(model), out=str(out), text=str(text), **options)
    return uptrain_checkpoint(request).record


def options_of(**options):
    """``options`` in place of the quick ones, as words of a command line."""
    return format_argv({**QUICK, **options})


@pytest.mark.parametrize("target", mostly_slow(TARGETS, 4))
def test_what_convert_writes_is_ready_to_train_and_learns(converted, text, out, target):
    start = converted(target)
    options = {"weight_decay": 0.1} if target == "free" else {"gradient_checkpointing": True}
    record = train(start, out, text, **options)
    steps = [row for row in record["log"] if "loss" in row]
    assert len(steps) == 10
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert max(row["learning_rate"] for row in steps) == pytest.approx(QUICK["relative_lr"])
    drift = record["held_out"]
    assert drift["after"]["eval_loss"] < drift["before"]["eval_loss"] - 0.3
    assert [row["step"] for row in record["log"] if "eval_loss" in row] == [0, 5, 10]
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (start / name).read_bytes(), name
    before = tensors(start)
    after = tensors(out)
    still = {name for name in before if torch.equal(before[name], after[name])}
    if target == "free":
        assert all(name.endswith("a_layernorm.weight") for name in still), still
        for name in (name for name in after if name.endswith("a_proj_with_mqa.bias")):
            assert after[name][24 - 1] == CONSTANT
            assert not after[name.replace("bias", "weight")][24 - 1].any()
    else:
        assert not still


@pytest.mark.parametrize("family", mostly_slow(["gpt2", "mixtral"], 2))
def test_tensors_are_written_under_the_names_of_the_files(tiny_family, text, tmp_path, out, family):
    """Those of gpt2 lack a prefix and hold masks, those of mixtral have one tensor for each
    expert.
    """
    start = shutil.copytree(tiny_family(family, vocab_size=2048), tmp_path / "start")
    stored = load_file(start / "model.safetensors")
    if family == "gpt2":
        stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
        stored["h.0.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
    save_file(stored, start / "model.safetensors", {"format": "pt"})
    train(start, out, text, steps=1, eval_every=0)
    after = tensors(out)
    assert after.keys() == stored.keys()
    still = {name for name in stored if torch.equal(stored[name], after[name])}
    assert still <= {"h.0.attn.bias"}


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    converted, text, tmp_path, out, monkeypatch
):
    """Killed in a step, then while OUT is written, after which no step is trained twice."""
    options = {"steps": 8, "save_every": 3, "log_every": 2, "eval_every": 4}
    whole = train(converted("free"), tmp_path / "whole", text, **options)
    on_step_end = uptrain_trainer.PrintAndCheckLossCallback.on_step_end
    work = tmp_path / "out.training"

    def run():
        return train(converted("free"), out, text, **options)

    def kill_in_step_7(self, args, state, control, **rest):
        if state.global_step == 7:
            raise KeyboardInterrupt
        return on_step_end(self, args, state, control, **rest)

    def fill_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(uptrain_trainer.PrintAndCheckLossCallback, "on_step_end", kill_in_step_7)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not out.exists()
    (work / "checkpoint-6" / STATE).unlink()  # killed while it wrote this one
    with monkeypatch.context() as patch:
        patch.setattr(uptraining, "_write_checkpoint", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            run()
    monkeypatch.setattr(uptrain_trainer.Uptrainer, "training_step", None)
    (work / "best.pt.new").touch()  # killed while it wrote this one
    assert run() == whole
    assert_same_tensors(out, tmp_path / "whole")
    assert not work.exists()


def test_distillation_closes_the_drift_and_the_record_and_the_card_say_so(
    tiny_reader, converted, text, tmp_path, out
):
    start = converted("engine")
    # A larger sibling of the source may pad its vocabulary further.
    teacher = shutil.copytree(tiny_reader, tmp_path / "teacher")
    model = stock_model(tiny_reader)
    model.resize_token_embeddings(model.config.vocab_size + 7)
    model.save_pretrained(teacher)
    record = train(start, out, text, teacher=str(teacher), relative_lr=0.01)
    errors = [row["eval_kl"] for row in record["log"] if "eval_kl" in row]
    assert errors == sorted(errors, reverse=True)
    drift = record["held_out"]
    assert drift["after"]["eval_kl"] < 0.9 * drift["before"]["eval_kl"]
    assert drift["after"]["eval_excess"] < drift["before"]["eval_excess"]
    before, after = (read_json(folder / "kvfold.json") for folder in (start, out))
    assert after["drift_before_uptraining"] == before.pop("drift")
    assert after["files"].keys() == before.pop("files").keys()
    assert after["tensors"].keys() == before.pop("tensors").keys()
    assert before.items() <= after.items()
    names = {name: after["uptraining"]["request"][name] for name in ("text", "model", "teacher")}
    assert names == {"text": "words.txt", "model": "engine", "teacher": "teacher"}
    assert str(tmp_path.parent) not in json.dumps(after["uptraining"])
    card = (out / "README.md").read_text()
    assert f"KL from the teacher: {errors[0]:.4f} -> {errors[-1]:.4f}" in card


def test_a_cpu_trains_in_the_faster_dtype_and_the_stored_one_is_kept(
    shallow_demo, text, tmp_path, out, monkeypatch
):
    monkeypatch.setattr(device, "measure_speedup", lambda *timed: 4.0)
    start = tmp_path / "mqa"
    run_conversion(shallow_demo, start, **TARGETS["mqa"])
    assert (
        train(start, out, text, steps=1, batch_tokens=64, eval_every=0)["precision"] == "bfloat16"
    )
    assert {value.dtype for value in tensors(out).values()} == {torch.bfloat16}
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    assert "lm_head.weight" not in tensors(out)  # a tied head stays tied


def test_a_loss_that_is_not_finite_ends_the_run(converted, text, out, monkeypatch):
    monkeypatch.setattr(
        uptrain_trainer, "sum_loss", lambda head, states, *_: states.sum() * float("nan")
    )
    with pytest.raises(KvfoldError, match=r"step 1: .* lower --relative-lr"):
        train(converted("gqa"), out, text, eval_every=0)
    assert not out.exists()


def test_errors_of_the_command_leave_nothing(converted, text, tmp_path, tiny_family, kvfold):
    start = converted("gqa")
    stranger = tiny_family("llama", attention_bias=False, mlp_bias=False, vocab_size=61)
    both = (start, tmp_path / "out", "--text", text)
    for arguments, expected in (
        ((start, start, "--text", text), "another OUT"),
        (both, "--seq-len"),
        ((*both, *options_of(teacher=stranger)), f"{stranger.name}: a teacher needs"),
        ((*both, *options_of(batch_tokens=500)), "--batch-tokens"),
    ):
        done = kvfold("uptrain", *arguments, status=2)
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert expected in line
        assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".training")]


def test_what_is_written_is_the_best_state_even_that_before_training(tiny_reader, text, out):
    options = {"teacher": str(tiny_reader), "relative_lr": 0.9, "steps": 5}
    record = train(tiny_reader, out, text, **options)
    errors = [row["eval_kl"] for row in record["log"] if "eval_kl" in row]
    assert errors[0] < min(errors[1:])
    assert record["held_out"]["after"] == record["held_out"]["before"]
    torch.testing.assert_close(tensors(out), tensors(tiny_reader), rtol=0, atol=0)


def test_processes_that_cannot_share_the_tokens_of_a_step_are_refused(monkeypatch, refused):
    monkeypatch.setenv("WORLD_SIZE", "3")
    request = UptrainRequest(model="m", out="o", text="t", batch_tokens=8192)
    with refused("--batch-tokens", "among 3"):
        make_training_arguments(request, 256, torch.float32)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tiny_reader, converted, text, tmp_path):
    """By the recipe's script, in processes that begin as torchrun's do."""
    options = {"steps": 4, "eval_every": 2, "micro_batch": 4, "eval_sequences": 7}
    options["teacher"] = str(tiny_reader)
    start = converted("free")

    def work():
        # It remembers that the tests are one process.
        AcceleratorState._reset_state(reset_partial_state=True)
        words = [start, tmp_path / "two", "--text", text, *options_of(**options)]
        sys.argv = ["uptrain.py", *map(str, words)]
        runpy.run_path(str(ROOT / "recipes" / "uptrain.py"), run_name="__main__")

    ended = forked.run_ranks(tmp_path / "log", work)
    assert [end.status for end in ended] == [0, 0], ended
    train(start, tmp_path / "one", text, **options)
    records = [read_json(tmp_path / name / "kvfold.json") for name in ("one", "two")]
    rows = [record["uptraining"]["log"] for record in records]
    assert len(rows[0]) == len(rows[1]) == 7
    for name in ("loss", "eval_loss", "eval_kl", "eval_excess"):
        first, second = ([row[name] for row in log if name in row] for log in rows)
        assert first == pytest.approx(second, abs=1e-3), name
    assert [end.stdout.count("wrote ") for end in ended] == [1, 0]
    one, two = (tensors(tmp_path / name) for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-3)
