"""Uptraining from end to end: the output of ``convert`` trains as it is, and is written in the same layout."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import forked
from helpers.checkpoints import stock_model, tensors
from helpers.processes import run_python
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder, read_documents
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.targets.mla.tensors import CONSTANT
from kvfold.convert.training.fit import distillation_loss, next_token_loss
from kvfold.convert.uptrain import run as uptrain_run
from kvfold.convert.uptrain import trainer as uptrain_trainer
from kvfold.convert.uptrain.__main__ import main
from kvfold.convert.uptrain.__main__ import uptrain as uptrain_command
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.run import uptrain_checkpoint
from kvfold.convert.uptrain.trainer import training_arguments
from kvfold.convert.uptrain.work import COMPLETE

ROOT = Path(__file__).resolve().parents[3]
TARGETS = {
    "gqa": {"to": "gqa", "kv_heads": 2, "method": "mean"},
    "mqa": {"to": "mqa", "method": "mean"},
    "free": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "method": "svd"},
    "queries": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "q_rank": 40, "method": "svd"},
    "engine": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "layout": "engine", "samples": 16, "seq_len": 32},
}
QUICK = {"steps": 10, "batch_tokens": 512, "seq_len": 64, "micro_batch": 8, "relative_lr": 0.05, "eval_sequences": 8}
QUICK |= {"eval_every": 5, "log_every": 1, "device": "cpu", "quiet": True}


def letters(folder):
    """A tokenizer of characters for the 97 tokens of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    vocabulary |= {chr(32 + i): 4 + i for i in range(91)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing one takes longer than most runs here."""
    monkeypatch.setattr(uptrain_run, "find_spec", lambda name: None if name == "matplotlib" else name)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(read_documents("held_out"))[:200_000])
    return path


@pytest.fixture(scope="module")
def source(tiny_family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "tiny"
    shutil.copytree(tiny_family("llama", attention_bias=False, mlp_bias=False), folder)
    letters(folder)
    return folder


@pytest.fixture(scope="module")
def converted(source, text, tmp_path_factory):
    """``converted("gqa")``: a folder as ``convert`` writes it."""
    parent = tmp_path_factory.mktemp("converted")

    def folder(target):
        out = parent / target
        if not out.exists():
            options = {"calibration": str(text)} if target == "engine" else {}
            convert_checkpoint(ConvertRequest(str(source), str(out), **TARGETS[target], **options, quiet=True))
        return out

    return folder


def train(model, out, text, **options):
    return uptrain_checkpoint(UptrainRequest(model=str(model), out=str(out), text=str(text), **{**QUICK, **options}))


def losses(done):
    return [row["loss"] for row in done.rows if "loss" in row]


@pytest.mark.parametrize("target", TARGETS)
def test_what_convert_writes_is_ready_to_train_and_learns(converted, text, tmp_path, target):
    start, out = converted(target), tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(start, dtype="auto")
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    done = train(start, out, text, weight_decay=0.1 if target == "queries" else 0.0)
    found = losses(done)
    assert len(found) == 10
    assert max(row.get("learning_rate", 0) for row in done.rows) == pytest.approx(QUICK["relative_lr"])
    assert found[-1] < found[0] - 0.3
    drift = done.record["held_out"]
    assert drift["after"]["eval_loss"] < drift["before"]["eval_loss"] - 0.3
    assert [row["step"] for row in done.rows if "eval_loss" in row] == [0, 5, 10]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (start / name).read_bytes(), name
    before, after = tensors(start), tensors(out)
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    still = [name for name in before if torch.equal(before[name], after[name])]
    held = "a_layernorm.weight" if target in ("free", "queries") else "nothing"
    assert all(name.endswith(held) for name in still), still
    for name in (name for name in after if held != "nothing" and name.endswith("a_proj_with_mqa.bias")):
        assert after[name][24 - 1] == CONSTANT
        assert not after[name.replace("bias", "weight")][24 - 1].any()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(start))
    tokens = AutoTokenizer.from_pretrained(out)("some words", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, tokens.shape[1] + 3)


def test_training_attention_alone_leaves_the_rest(converted, text, tmp_path):
    start = shutil.copytree(converted("gqa"), tmp_path / "start")
    before = tensors(start)
    (file,) = start.glob("*.safetensors")
    # Old checkpoints have such tables; they need not come back.
    save_file({**before, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file, {"format": "pt"})
    train(start, tmp_path / "out", text, train="attention", steps=1, eval_every=0, gradient_checkpointing=True)
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".self_attn." in name}


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_weight_mixes_both_losses(source, converted, weight):
    """Softened by the temperature; without a weight the distillation is all."""
    model, teacher = stock_model(converted("mqa")), stock_model(source)
    request = UptrainRequest("m", "o", "t", teacher="x", distill_weight=weight if weight < 1 else None, temperature=2.0)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    own, other = (each(input_ids=tokens).logits for each in (model, teacher))
    trainer = SimpleNamespace(_request=request, _teacher=teacher)
    found = uptrain_trainer.Uptrainer.compute_loss(trainer, model, {"input_ids": tokens})
    expected = (1 - weight) * next_token_loss(own, tokens) + weight * distillation_loss(own, other, 2.0)
    torch.testing.assert_close(found, expected)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(converted, text, tmp_path, monkeypatch, told):
    """Killed in a step, then while OUT is written, after which no step is trained twice."""
    options = {"steps": 8, "save_every": 3, "log_every": 2, "eval_every": 4}
    whole = train(converted("free"), tmp_path / "whole", text, **options)
    written, work = uptrain_trainer.RunLog.on_step_end, tmp_path / "out.training"

    def run(**changes):
        return train(converted("free"), tmp_path / "out", text, **{**options, **changes})

    def killed(self, args, state, control, **rest):
        if state.global_step == 7:
            raise KeyboardInterrupt
        return written(self, args, state, control, **rest)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(uptrain_trainer.RunLog, "on_step_end", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not (tmp_path / "out").exists()
    (work / "checkpoint-6" / COMPLETE).unlink()  # killed while it wrote this one
    for changes in ({}, {"resume": True, "relative_lr": 0.1}):
        with pytest.raises(InputError) as raised:
            run(**changes)
        told(raised.value)
    with monkeypatch.context() as patch:
        patch.setattr(uptrain_run, "write_trained", full)
        with pytest.raises(OSError, match="No space left"):
            run(resume=True)
    monkeypatch.setattr(uptrain_trainer.Uptrainer, "training_step", None)
    done = run(resume=True)
    assert done.rows == whole.rows
    assert [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()] == whole.rows
    before, after = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert sorted(path.name for path in work.iterdir()) == ["log.jsonl", "request.json"]


def test_distillation_closes_the_drift_and_the_record_and_the_card_say_so(source, converted, text, tmp_path):
    start, out = converted("engine"), tmp_path / "out"
    done = train(start, out, text, teacher=str(source), plot=str(tmp_path / "curve.png"), relative_lr=0.01)
    drift = done.record["held_out"]
    assert drift["after"]["eval_kl"] < 0.9 * drift["before"]["eval_kl"]
    assert drift["after"]["eval_excess"] < drift["before"]["eval_excess"]
    assert (tmp_path / "curve.png").stat().st_size > 1000
    before, after = (json.loads((folder / "kvfold.json").read_text()) for folder in (start, out))
    assert after["drift_before_uptraining"] == before.pop("drift")
    assert after["files"].keys() == before["files"].keys()
    assert after["files"]["model.safetensors"] != before.pop("files")["model.safetensors"]
    assert {name: after[name] for name in before} == before
    found = after["uptraining"]
    assert (found["request"]["text"], found["request"]["model"], found["teacher"]) == ("words.txt", "engine", "tiny")
    assert str(tmp_path.parent) not in json.dumps(found)
    card = (out / "README.md").read_text()
    begun, made = card.split("\n## Before the uptraining\n"), (start / "README.md").read_text()
    assert begun[0].startswith(made.split("\n# ")[0])
    assert made.split("## Engines")[1].split("## How")[0] in begun[1]
    assert "all weights were trained for 10 steps of 512 tokens of words.txt, distilled from `tiny`" in card
    assert "| on 8 x 64 held-out tokens | before | after |" in begun[0]
    assert "Everything else is the source's, byte for byte." in made
    assert "byte for byte" not in card
    assert "Everything else was the source's before the uptraining, which changed it." in begun[1]


def test_the_stored_dtype_is_kept(source, text, tmp_path):
    start = tmp_path / "half"
    convert_checkpoint(ConvertRequest(str(source), str(start), **TARGETS["free"], dtype="bfloat16", quiet=True))
    train(start, tmp_path / "out", text, steps=1, eval_every=0, precision="bfloat16")
    assert {value.dtype for value in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_loss_that_is_not_finite_ends_the_run(converted, text, tmp_path, monkeypatch):
    monkeypatch.setattr(uptrain_trainer, "next_token_loss", lambda logits, tokens: logits.mean() * float("nan"))
    with pytest.raises(KvfoldError, match="step 1: the loss is no longer a finite number; lower --relative-lr"):
        train(converted("gqa"), tmp_path / "out", text, eval_every=0)
    assert not (tmp_path / "out").exists()


def test_evaluation_on_another_text(converted, text, tmp_path):
    """Of sequences that do not fill up their last batch."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.read_text()[:9000].split("\n")))
    options = {"steps": 1, "eval_sequences": 7, "micro_batch": 4}
    done = train(converted("gqa"), tmp_path / "out", text, eval_text=str(other), **options)
    assert done.record["held_out"]["sequences"] == 7
    with pytest.raises(InputError, match=r"--eval-text .* must be another text than --text"):
        train(converted("gqa"), tmp_path / "out2", text, eval_text=str(text))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_tokens": 500},
        {"schedule": "slow"},
        {"steps": 0, "warmup": "long"},
        {"relative_lr": 3.0},
        {"distill_weight": 0.5},
        {"teacher": "x", "distill_weight": 1.5},
        {"temperature": 0.0},
        {"warmup": 1.0},
        {"seed": 2**32},
        {"max_shard_size": "x"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_requests_that_cannot_be(options, told):
    with pytest.raises(InputError) as raised:
        UptrainRequest(model="a", out="b", text="c", **{**QUICK, **options})
    told(raised.value)


def options_of(**options):
    given = {**QUICK, **options}
    given.pop("quiet")
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_errors_name_what_to_do(converted, text, tmp_path, tiny_family, monkeypatch, capsys, told):
    """The command line: one `error:` line, status 2, and nothing written."""
    start, out = converted("gqa"), tmp_path / "out"
    stranger = tiny_family("llama", attention_bias=False, mlp_bias=False, vocab_size=101)
    both = (start, out, "--text", text)
    for arguments in (
        (start,),
        (start, out),
        (start, out, *options_of(), "--text", "no.txt"),
        (tmp_path / "no", out, "--text", text),
        (start, start, "--text", text),
        both,
        (*both, *options_of(teacher=stranger)),
        (*both, *options_of(precision="float16")),
        (*both, "--plot", "x.gif"),
    ):
        monkeypatch.setattr(sys, "argv", ["uptrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        told(said.replace(str(start), "START").replace(str(stranger), "STRANGER"))
        assert not list(tmp_path.iterdir()), said


@pytest.mark.slow
def test_a_tied_head_in_bfloat16_stays_tied(text, tmp_path):
    options = {"to": "mqa", "method": "mean", "quiet": True}
    convert_checkpoint(ConvertRequest(str(demo_folder()), str(tmp_path / "mqa"), **options))
    train(tmp_path / "mqa", tmp_path / "out", text, steps=1, eval_every=0)
    assert "lm_head.weight" not in tensors(tmp_path / "out")


def test_learning_rates():
    """The default falls with the root of the width; `--lr` is another name of `--relative-lr`."""
    request = UptrainRequest(model="m", out="o", text="t", device="cpu")
    rates = [training_arguments(request, width, False).learning_rate for width in (256, 1024, 4096)]
    assert rates == pytest.approx([0.003125, 0.0015625, 0.00078125])
    for name in ("--lr", "--relative-lr"):
        options = uptrain_command.make_context("uptrain", ["a", "b", "--text", "c", name, "0.02"]).params
        del options["json_file"]
        assert UptrainRequest(**options).relative_lr == 0.02


def test_without_accelerate_the_extra_is_named(converted, text, tmp_path, monkeypatch):
    monkeypatch.setattr("kvfold.convert.uptrain.run.find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape("not installed: pip install 'kvfold[train]'")):
        train(converted("gqa"), tmp_path / "out", text)


def test_help_is_quick_to_load():
    arguments = ("-X", "importtime", "-m", "kvfold.convert.uptrain", "--help")
    started = run_python(*arguments, check=False, environment={"TOKENIZERS_PARALLELISM": "false"})
    modules = {line.split("|")[-1].strip() for line in started.stderr.splitlines()}
    assert not modules & {"torch", "transformers", "numpy"}
    assert "--relative-lr, --lr RATE" in started.stdout


def test_the_configuration_for_fsdp_is_one_that_accelerate_reads():
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(ROOT / "recipes" / "fsdp.yaml"))
    assert found.fsdp_config["fsdp_version"] == 2  # the constant channel needs it
    assert "fsdp_transformer_layer_cls_to_wrap" not in found.fsdp_config


def test_two_processes_give_the_losses_of_one(source, converted, text, tmp_path):
    """By the recipe's script, in processes that begin as torchrun's do."""
    options = ["--text", text, "--teacher", source, *options_of(steps=4, eval_every=2, micro_batch=4, eval_sequences=7)]
    start = converted("free")

    def work():
        AcceleratorState._reset_state(reset_partial_state=True)  # it remembers that the tests are one process
        sys.argv = ["uptrain.py", *map(str, [start, tmp_path / "two", *options])]
        runpy.run_path(str(ROOT / "recipes" / "uptrain.py"), run_name="__main__")

    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(tmp_path / "log", work)
    assert [each.status for each in ended] == [0, 0], ended
    train(start, tmp_path / "one", text, teacher=str(source), steps=4, eval_every=2, micro_batch=4, eval_sequences=7)
    logs = [tmp_path / f"{name}.training" / "log.jsonl" for name in ("one", "two")]
    rows = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert len(rows[0]) == len(rows[1]) == 7
    for name in ("loss", "eval_loss", "eval_kl", "eval_excess"):
        first, second = ([row[name] for row in found if name in row] for found in rows)
        assert first == pytest.approx(second, abs=1e-3), name
    assert [each.stdout.count("wrote ") for each in ended] == [1, 0]
    before, after = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-3, msg=name)


def test_a_folder_that_is_not_a_run_is_left_alone(converted, text, tmp_path):
    mine = tmp_path / "out.training" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="holds something else than a run, which would write its log there"):
        train(converted("gqa"), tmp_path / "out", text, steps=1)
    assert mine.read_text() == "mine"
