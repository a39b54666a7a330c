"""Uptraining from end to end: the output of ``convert`` trains as it is, and is written in the same
layout.
"""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import forked
from helpers.cases import mostly_slow
from helpers.checkpoints import stock_model, tensors
from safetensors.torch import save_file
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint, device
from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder, read_documents
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.targets.mla.encode import CONSTANT
from kvfold.convert.training.loop import distillation_loss, next_token_loss
from kvfold.convert.uptrain import trainer as uptrain_trainer
from kvfold.convert.uptrain import training_folder, uptraining
from kvfold.convert.uptrain.trainer import divide_batch, training_arguments
from kvfold.convert.uptrain.uptrain_request import UptrainRequest
from kvfold.convert.uptrain.uptraining import STATE, uptrain_checkpoint

ROOT = Path(__file__).resolve().parents[3]
TARGETS = {
    "gqa": {"to": "gqa", "kv_heads": 2, "method": "mean"},
    "mqa": {"to": "mqa", "method": "mean"},
    "free": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "method": "svd"},
    "engine": {
        "to": "mla",
        "kv_rank": 24,
        "rope_dim": 8,
        "layout": "engine",
        "samples": 16,
        "seq_len": 32,
    },
}
QUICK = {
    "steps": 10,
    "batch_tokens": 512,
    "seq_len": 64,
    "micro_batch": 8,
    "relative_lr": 0.05,
    "eval_sequences": 8,
}
QUICK |= {"eval_every": 5, "log_every": 1, "warmup": 0.0, "device": "cpu", "quiet": True}


def letters(folder):
    """A tokenizer of characters for the 97 tokens of the tiny models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    vocabulary |= {chr(32 + i): 4 + i for i in range(91)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(read_documents("held_out"))[:200_000])
    return path


@pytest.fixture(scope="module")
def source(tiny_family, tmp_path_factory):
    made = tiny_family("llama", attention_bias=False, mlp_bias=False)
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("source") / "tiny"))
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
            convert_checkpoint(
                ConvertRequest(str(source), str(out), **TARGETS[target], **options, quiet=True)
            )
        return out

    return folder


def train(model, out, text, **options):
    return uptrain_checkpoint(
        UptrainRequest(model=str(model), out=str(out), text=str(text), **{**QUICK, **options})
    )


@pytest.mark.parametrize("target", mostly_slow(TARGETS, 4))
def test_what_convert_writes_is_ready_to_train_and_learns(converted, text, tmp_path, target):
    start = converted(target)
    out = tmp_path / "out"
    model = stock_model(start)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert all(value.grad is not None and value.grad.any() for value in model.parameters())
    decay = 0.1 if target == "free" else 0.0
    record = train(start, out, text, weight_decay=decay).record
    losses = [row["loss"] for row in record["log"] if "loss" in row]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.3
    rates = [row["learning_rate"] for row in record["log"] if "loss" in row]
    assert max(rates) == pytest.approx(QUICK["relative_lr"])
    drift = record["held_out"]
    assert drift["after"]["eval_loss"] < drift["before"]["eval_loss"] - 0.3
    assert [row["step"] for row in record["log"] if "eval_loss" in row] == [0, 5, 10]
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (start / name).read_bytes(), name
    before = tensors(start)
    after = tensors(out)
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    still = {name for name in before if torch.equal(before[name], after[name])}
    if target == "free":
        assert all(name.endswith("a_layernorm.weight") for name in still), still
        for name in (name for name in after if name.endswith("a_proj_with_mqa.bias")):
            assert after[name][24 - 1] == CONSTANT
            assert not after[name.replace("bias", "weight")][24 - 1].any()
    else:
        assert not still
    tokens = AutoTokenizer.from_pretrained(out)("some words", return_tensors="pt").input_ids
    assert stock_model(out).generate(tokens, max_new_tokens=3, min_new_tokens=3).shape[1] > 3


def test_training_attention_alone_leaves_the_rest(converted, text, tmp_path):
    start = shutil.copytree(converted("gqa"), tmp_path / "start")
    before = tensors(start)
    (file,) = start.glob("*.safetensors")
    # Old checkpoints have such tables; they need not come back.
    save_file(
        {**before, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        file,
        {"format": "pt"},
    )
    train(
        start,
        tmp_path / "out",
        text,
        train="attention",
        steps=1,
        eval_every=0,
        gradient_checkpointing=True,
    )
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".self_attn." in name}


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_weight_mixes_both_losses(source, converted, weight):
    """Softened by the temperature; without a weight the distillation is all."""
    model = stock_model(converted("mqa"))
    teacher = stock_model(source)
    request = UptrainRequest(
        "m", "o", "t", teacher="x", distill_weight=weight if weight < 1 else None, temperature=2.0
    )
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    own, other = (each(input_ids=tokens).logits for each in (model, teacher))
    trainer = uptrain_trainer.Uptrainer.__new__(uptrain_trainer.Uptrainer)
    trainer._request = request
    trainer._teacher = teacher
    found = trainer.compute_loss(model, {"input_ids": tokens})
    expected = (1 - weight) * next_token_loss(own, tokens) + weight * distillation_loss(
        own, other, 2.0
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(converted, text, tmp_path, monkeypatch):
    """Killed in a step, then while OUT is written, after which no step is trained twice."""
    options = {"steps": 8, "save_every": 3, "log_every": 2, "eval_every": 4}
    whole = train(converted("free"), tmp_path / "whole", text, **options)
    on_step_end = uptrain_trainer.RunCallback.on_step_end
    work = tmp_path / "out.training"

    def run():
        return train(converted("free"), tmp_path / "out", text, **options)

    def kill_in_step_7(self, args, state, control, **rest):
        if state.global_step == 7:
            raise KeyboardInterrupt
        return on_step_end(self, args, state, control, **rest)

    def fill_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(uptrain_trainer.RunCallback, "on_step_end", kill_in_step_7)
        with pytest.raises(KeyboardInterrupt) as raised:
            run()
    assert "is kept" in raised.value.__notes__[0]
    assert not (tmp_path / "out").exists()
    (work / "checkpoint-6" / STATE).unlink()  # killed while it wrote this one
    with monkeypatch.context() as patch:
        patch.setattr(uptraining, "_write_checkpoint", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            run()
    monkeypatch.setattr(uptrain_trainer.Uptrainer, "training_step", None)
    monkeypatch.setattr(training_folder, "load_training", None)
    (work / "best.pt.new").touch()  # killed while it wrote this one
    assert run().record == whole.record
    before = tensors(tmp_path / "whole")
    after = tensors(tmp_path / "out")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not work.exists()


def test_distillation_closes_the_drift_and_the_record_and_the_card_say_so(
    source, converted, text, tmp_path
):
    start = converted("engine")
    out = tmp_path / "out"
    record = train(start, out, text, teacher=str(source), relative_lr=0.01).record
    errors = [row["eval_kl"] for row in record["log"] if "eval_kl" in row]
    assert errors == sorted(errors, reverse=True)
    drift = record["held_out"]
    assert drift["after"]["eval_kl"] < 0.9 * drift["before"]["eval_kl"]
    assert drift["after"]["eval_excess"] < drift["before"]["eval_excess"]
    before, after = (json.loads((folder / "kvfold.json").read_text()) for folder in (start, out))
    assert after["drift_before_uptraining"] == before.pop("drift")
    assert after["files"].keys() == before.pop("files").keys()
    assert after["tensors"].keys() == before.pop("tensors").keys()
    assert {name: after[name] for name in before} == before
    request = after["uptraining"]["request"]
    assert (request["text"], request["model"], request["teacher"]) == (
        "words.txt",
        "engine",
        "tiny",
    )
    assert str(tmp_path.parent) not in json.dumps(after["uptraining"])
    card = (out / "README.md").read_text()
    section, _ = card.split("\n## Before the uptraining\n")
    assert "distilled from `tiny`" in section
    assert "on 8 x 64 held-out tokens | before | after |" in section


@pytest.mark.parametrize(("speed", "expected"), [(4.0, "bfloat16"), (1.1, "float32")])
def test_a_cpu_trains_in_the_faster_dtype_and_the_stored_one_is_kept(
    text, tmp_path, monkeypatch, speed, expected
):
    monkeypatch.setattr(device, "measure_bfloat16_speedup", lambda *shape: speed)
    start = tmp_path / "mqa"
    out = tmp_path / "out"
    convert_checkpoint(ConvertRequest(str(demo_folder()), str(start), **TARGETS["mqa"], quiet=True))
    assert train(start, out, text, steps=1, eval_every=0).record["precision"] == expected
    assert {value.dtype for value in tensors(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert "lm_head.weight" not in tensors(out)  # a tied head stays tied


def test_a_loss_that_is_not_finite_ends_the_run(converted, text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        uptrain_trainer, "next_token_loss", lambda logits, tokens: logits.mean() * float("nan")
    )
    with pytest.raises(
        KvfoldError, match="step 1: the loss is NaN or infinite; lower --relative-lr"
    ):
        train(converted("gqa"), tmp_path / "out", text, eval_every=0)
    assert not (tmp_path / "out").exists()


def test_evaluation_on_another_text(converted, text, tmp_path):
    """Of sequences that do not fill up their last batch."""
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in text.read_text()[:9000].split("\n"))
    )
    options = {"steps": 1, "eval_sequences": 7, "micro_batch": 4}
    trained = train(converted("gqa"), tmp_path / "out", text, eval_text=str(other), **options)
    assert trained.record["held_out"]["sequences"] == 7


WRONG = {
    "relative_lr": 3.0,
    "temperature": 0.0,
    "weight_decay": 1e80,
    "warmup": 1.0,
    "seed": 2**32,
    "max_shard_size": "x",
}


@pytest.mark.parametrize("wrong", [WRONG, {"distill_weight": 0.5, "batch_tokens": 500}])
def test_all_invalid_options_are_told_at_once(wrong):
    with pytest.raises(InputError) as raised:
        UptrainRequest(model="a", out="b", text="c", **{**QUICK, **wrong})
    for name in wrong:
        assert f"--{name.replace('_', '-')}" in str(raised.value)


def options_of(**options):
    given = {**QUICK, **options}
    given.pop("quiet")
    return [
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)
    ]


def test_errors_of_the_command_leave_nothing(converted, text, tmp_path, tiny_family, capsys):
    start = converted("gqa")
    stranger = tiny_family("llama", attention_bias=False, mlp_bias=False, vocab_size=61)
    both = (start, tmp_path / "out", "--text", text)
    for arguments, expected in (
        ((start,), "OUT"),
        ((start, start, "--text", text), "another OUT"),
        (both, "--seq-len"),
        ((*both, *options_of(teacher=stranger)), f"--teacher {stranger.name}"),
        ((*both, *options_of(precision="float16")), "--precision float16"),
        ((*both, *options_of(eval_text=text)), "--eval-text"),
        ((start, tmp_path / "out", "--text", f"{text}:3"), "--text"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["uptrain", *map(str, arguments)])
        assert ended.value.code == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert expected in line
        assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".training")]


def test_what_is_written_is_the_best_state_even_that_before_training(
    source, converted, text, tmp_path
):
    options = {"teacher": str(source), "relative_lr": 0.9, "schedule": "constant"}
    record = train(converted("free"), tmp_path / "out", text, **options).record
    errors = [row["eval_kl"] for row in record["log"] if "eval_kl" in row]
    assert errors[0] < min(errors[1:])
    assert record["held_out"]["after"] == record["held_out"]["before"]
    before = tensors(converted("free"))
    after = tensors(tmp_path / "out")
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 1000}, {"warmup_steps": 50}),
        ({"steps": 3}, {"warmup_steps": 10}),  # short runs warm up too, unless told otherwise
        ({"steps": 3, "warmup": 0.0}, {"warmup_steps": 0}),
        ({"steps": 1000, "warmup": 0.2}, {"warmup_steps": 200}),
        # A CPU takes a thousand tokens at a time, unless told otherwise.
        ({"seq_len": 2048}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
        ({"seq_len": 256}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}),
        ({"micro_batch": 2}, {"per_device_eval_batch_size": 2, "gradient_accumulation_steps": 4}),
        # The rate falls with the root of the width and of a small batch.
        ({}, {"learning_rate": 0.05 / 16 * (8192 / 65536) ** 0.5}),
        ({"batch_tokens": 131072}, {"learning_rate": 0.05 / 16}),
    ],
    ids=str,
)
def test_arguments_for_the_trainer(options, expected):
    given = {"batch_tokens": 8192, "device": "cpu", **options}
    request = UptrainRequest(model="m", out="o", text="t", **given)
    arguments = training_arguments(request, 256, torch.float32)
    for name, value in expected.items():
        assert getattr(arguments, name) == pytest.approx(value), name


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(source, converted, text, tmp_path):
    """By the recipe's script, in processes that begin as torchrun's do."""
    options = [
        "--text",
        text,
        "--teacher",
        source,
        *options_of(steps=4, eval_every=2, micro_batch=4, eval_sequences=7),
    ]
    start = converted("free")

    def work():
        AcceleratorState._reset_state(
            reset_partial_state=True
        )  # it remembers that the tests are one process
        sys.argv = ["uptrain.py", *map(str, [start, tmp_path / "two", *options])]
        runpy.run_path(str(ROOT / "recipes" / "uptrain.py"), run_name="__main__")

    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(tmp_path / "log", work)
    assert [each.status for each in ended] == [0, 0], ended
    train(
        start,
        tmp_path / "one",
        text,
        teacher=str(source),
        steps=4,
        eval_every=2,
        micro_batch=4,
        eval_sequences=7,
    )
    records = [json.loads((tmp_path / name / "kvfold.json").read_text()) for name in ("one", "two")]
    rows = [record["uptraining"]["log"] for record in records]
    assert len(rows[0]) == len(rows[1]) == 7
    for name in ("loss", "eval_loss", "eval_kl", "eval_excess"):
        first, second = ([row[name] for row in log if name in row] for log in rows)
        assert first == pytest.approx(second, abs=1e-3), name
    assert [each.stdout.count("wrote ") for each in ended] == [1, 0]
    before = tensors(tmp_path / "one")
    after = tensors(tmp_path / "two")
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-3, msg=name)


def test_a_teacher_may_pad_its_vocabulary_further(source, converted, text, tmp_path):
    teacher = shutil.copytree(source, tmp_path / "teacher")
    model = stock_model(source)
    model.resize_token_embeddings(model.config.vocab_size + 7)
    model.save_pretrained(teacher)
    record = train(converted("mqa"), tmp_path / "out", text, steps=1, teacher=str(teacher)).record
    assert record["held_out"]["before"]["eval_kl"] > 0


def test_without_accelerate_the_extra_is_named(converted, text, tmp_path, monkeypatch):
    monkeypatch.setattr(uptraining, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape("not installed: pip install 'kvfold[train]'")):
        train(converted("gqa"), tmp_path / "out", text)


def test_a_batch_that_does_not_divide():
    assert divide_batch(24, 5, 2) == (4, 3)
    with pytest.raises(InputError, match=r"--batch-tokens: 6 sequences .* among 4"):
        divide_batch(6, 1, 4)
