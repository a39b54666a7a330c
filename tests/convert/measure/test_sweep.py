"""Many targets in one walk: each is what its conversion alone would be, and the smallest within a
loss is named.
"""

import math
from contextlib import closing
from dataclasses import replace

import pytest

from kvfold.convert import ConvertRequest, SweepRequest, convert_checkpoint, sweep_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.commands.sweep_command import summarize_sweep
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import make_model
from kvfold.convert.measure.sweep_targets import (
    format_target,
    parse_targets,
    propose_default_targets,
)

TEXT = {"samples": 4, "seq_len": 24, "quiet": True}


@pytest.fixture(scope="module")
def swept(reader):
    return sweep_checkpoint(SweepRequest(str(reader), "gqa:2 mqa mla:16+8,8", **TEXT))


def with_losses(found, losses, within=0.01):
    """``found`` with other losses, in nats, all with a margin of 0.005."""
    rows = []
    for row, loss in zip(found.rows, losses, strict=True):
        student = row.measured.teacher_loss + loss
        measured = replace(row.measured, student_loss=student, excess_margin=0.005)
        rows.append(replace(row, measured=measured))
    return replace(found, rows=rows, within=within)


@pytest.mark.parametrize("index", [0, 2, 3], ids=["gqa", "mla", "budget"])
def test_a_target_is_what_its_conversion_alone_would_be(out, swept, index):
    row = swept.rows[index]
    done = convert_checkpoint(replace(row.request, out=str(out)))
    for figure in ("kl", "agreement", "teacher_loss", "student_loss", "by_sequence"):
        assert getattr(done.drift, figure) == getattr(row.measured, figure), figure
    assert (done.plan.output.kind, done.cache_elements.after) == (row.kind, row.cache_elements)


def test_a_sweep_tells_its_stages_and_their_time_before_it_starts(reader, capsys):
    sweep_checkpoint(SweepRequest(str(reader), "mqa mla:8", **{**TEXT, "quiet": False}))
    shown = capsys.readouterr().err
    told = shown[shown.index("stages ") : shown.index("MQA:")]
    assert "in all" in told
    assert all(f"{stage} " in told for stage in ("survey", "splits", "sweep", "measure"))


def test_targets_are_fitted_in_the_requested_precision(reader, swept):
    request = SweepRequest(str(reader), "mqa", **TEXT, precision="bfloat16")
    (row,) = sweep_checkpoint(request).rows
    assert row.measured.kl != swept.rows[1].measured.kl
    assert "bfloat16" in row.command


def test_a_shorter_context_is_stated(reader):
    fold, latent = sweep_checkpoint(
        SweepRequest(str(reader), "mqa mla:16+8", context=32, **TEXT)
    ).rows
    assert latent.kind.endswith("(context 32)")
    assert "--context" in latent.command
    assert "--context" not in fold.command


def test_a_budget_gets_a_split_and_its_request_names_it(swept):
    row = swept.rows[3]
    request = row.request
    assert request.budget is None
    assert request.kv_rank + request.rope_dim == 8
    split = f"--kv-rank {request.kv_rank} --rope-dim {request.rope_dim} --samples 4"
    assert split in " ".join(row.command)


def test_the_smallest_target_within_a_loss_is_named_with_its_command(swept, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = with_losses(swept, (0.001, 0.2, 0.009, 0.3))
    assert found.smallest is found.rows[2]
    assert replace(found, within=0.002).smallest is found.rows[0]
    assert found.verdict == "within 1 % perplexity: MLA 16+8, uncertain"
    assert replace(found, within=0.02).verdict == "within 2 % perplexity: MLA 16+8"
    lines = summarize_sweep(found).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("target"))
    table = lines[head : head + 5]
    assert [int(line[12:].split()[0]) for line in table[1:]] == [32, 24, 16, 8]
    row = next(line for line in lines if line.startswith("MQA"))
    assert "75.0 %" in row
    assert "+0.2000 ± 0.0050" in row
    assert "--kv-rank 16 --rope-dim 8" in "\n".join(lines[head + 5 :])


def test_what_normal_effort_is_expected_to_leave_may_be_within_the_limit(swept):
    found = with_losses(swept, (0.1, 0.2, 0.015, 0.4))
    assert found.smallest is None
    assert found.smallest_after_training is found.rows[2]
    assert found.verdict.endswith("expected with --effort normal: MLA 16+8")
    text = summarize_sweep(found)
    assert (
        next(line for line in text.splitlines() if line.startswith("MQA")).split()[-3] == "+0.1100"
    )
    command = text.split("\nnext\n")[1].replace("\\\n", "").split()
    assert command[:4] == ["kvfold", "convert", found.model, "OUT"]
    assert command[-2:] == ["--effort", "normal"]
    assert "--samples" not in command  # a toy number, for a quick sweep


def test_where_none_is_within_the_loss_the_nearest_is_named(swept):
    found = with_losses(swept, (0.1, 0.2, 0.3, 0.4))
    assert found.smallest is found.smallest_after_training is None
    assert found.verdict == "none within 1 % perplexity; nearest: GQA-2"
    assert summarize_sweep(found).endswith("--effort normal")
    broken = with_losses(swept, (math.nan, 0.3, 0.2, math.nan))
    assert broken.least_loss_row is broken.rows[2]


def test_the_default_limit_is_that_of_the_verdict(swept):
    assert SweepRequest("MODEL").within is None
    found = with_losses(swept, (0.05, 0.05, 0.5, 0.05), within=None)
    near = [replace(row.measured, kl=0.1, agreement=0.9) for row in found.rows]
    near[3] = replace(near[3], agreement=0.1)
    rows = [replace(row, measured=measured) for row, measured in zip(found.rows, near, strict=True)]
    found = replace(found, rows=rows)
    assert found.smallest is rows[1]
    assert found.verdict == "near the source: MQA"


def test_targets_are_spelled_with_commas_or_blanks():
    spelling = ["gqa:4", "gqa:2", "mqa", "mla:576", "mla:512+64"]
    for words in (
        ["gqa:4,2", "mqa", "mla:576,512+64"],
        "gqa:4,2,mqa,mla:576 512+64 mqa",
        ["GQA:4", *spelling],
    ):
        assert [format_target(options) for options in parse_targets(words)] == spelling


def test_an_impossible_target_ends_the_sweep_before_it_begins(reader, refused):
    spelled_wrongly = ["gpa:4", "gqa", "4", "gqa:2+2", "mqa:1"]
    for word in (*spelled_wrongly, "gqa:3", "gqa:4", "mla:9999", "mla:24+7", "mla:200+8"):
        with refused("--targets"):
            sweep_checkpoint(SweepRequest(str(reader), f"mqa,{word}", **TEXT))


def test_targets_that_suit_a_model_are_the_default(tiny_family):
    def defaults(folder, layout=None):
        with closing(open_checkpoint(str(folder))) as checkpoint:
            model = make_model(checkpoint.config, checkpoint.tensors)
            targets = propose_default_targets(model, layout)
            for options in targets:
                given = {"layout": layout} if options["to"] == "mla" else {}
                make_plan(ConvertRequest(folder, "OUT", **options, **given), checkpoint)
        return " ".join(map(format_target, targets))

    folds = "gqa:4 gqa:2 mqa"
    assert defaults(demo_folder()) == f"{folds} mla:256 mla:170 mla:128 mla:64"
    assert defaults(tiny_family("phi")) == folds  # no stock class holds its MLA
    assert defaults(tiny_family("phi"), "kvfold") == folds  # its norms have biases
    assert "mla:" in defaults(tiny_family("olmo2"), "kvfold")
    gpt2 = tiny_family("gpt2", n_embd=512, n_head=8)
    assert "mla:" in defaults(gpt2)
    assert "mla:" not in defaults(gpt2, "engine")
    wide = tiny_family("llama", head_dim=128, num_hidden_layers=1, mlp_bias=False)  # 2048 elements
    assert defaults(wide) == f"{folds} mla:512+64 mla:448+64 mla:256+64"
