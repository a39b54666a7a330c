"""Many targets in one walk: each is what its conversion alone would be, and the smallest within a
loss is named.
"""

import json
import math
import shutil
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import pytest

from kvfold.convert import (
    ConvertRequest,
    SweepRequest,
    convert_checkpoint,
    sweep_checkpoint,
)
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.commands.sweep_command import summarize_sweep
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import model_of
from kvfold.convert.measure import sweep
from kvfold.convert.measure.sweep_targets import default_targets, format_target, parse_targets

TEXT = {"samples": 4, "seq_len": 24, "quiet": True}


@pytest.fixture(scope="module")
def swept(reader):
    return sweep_checkpoint(SweepRequest(str(reader), "gqa:2 mqa mla:16+8,8", **TEXT))


def with_losses(found, losses, margin=0.005):
    """The rows of ``found`` with other losses, in nats."""
    rows = []
    for row, loss in zip(found.rows, losses, strict=True):
        student = row.measured.teacher_loss + loss
        rows.append(
            replace(row, measured=replace(row.measured, student_loss=student, excess_margin=margin))
        )
    return replace(found, rows=tuple(rows))


@pytest.mark.parametrize("index", [0, 2], ids=["gqa", "mla"])
def test_a_target_is_what_its_conversion_alone_would_be(tmp_path, swept, index):
    row = swept.rows[index]
    done = convert_checkpoint(replace(row.request, out=str(tmp_path / "out")))
    alone = done.drift.measured
    assert replace(alone, layers=(), stretches=(), by_sequence=()) == row.measured
    assert tuple(layer.residual_propagated for layer in alone.layers) == row.distances
    assert (done.plan.output.kind, done.plan.output.cache_elements) == (
        row.kind,
        row.cache_elements,
    )


def test_targets_are_fitted_in_the_requested_precision(reader, swept):
    request = SweepRequest(str(reader), "mqa", **TEXT, precision="bfloat16")
    (row,) = sweep_checkpoint(request).rows
    assert row.precision == "bfloat16"
    assert row.measured.kl != swept.rows[1].measured.kl
    assert "bfloat16" in row.command("MODEL", "OUT")


def test_a_budget_gets_a_split_and_its_request_names_it(swept):
    row = swept.rows[3]
    assert len(row.splits) > 2
    assert {split["kv_rank"] + split["rope_dim"] for split in row.splits} == {8}
    best = min(row.splits, key=lambda split: split["kl"])
    request = row.request
    assert (request.budget, request.kv_rank, request.rope_dim) == (
        None,
        best["kv_rank"],
        best["rope_dim"],
    )
    command = " ".join(row.command("MODEL", "OUT"))
    assert f"--kv-rank {best['kv_rank']} --rope-dim {best['rope_dim']} --samples 4" in command


def test_the_smallest_target_within_a_loss_is_named_with_its_command(swept, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = with_losses(swept, (0.001, 0.2, 0.009, 0.3))
    assert found.smallest(0.01) is found.rows[2]
    assert found.smallest(0.002) is found.rows[0]
    assert found.verdict(0.01) == "within 1 % perplexity: MLA 16+8, uncertain"
    assert found.verdict(0.02) == "within 2 % perplexity: MLA 16+8"
    lines = summarize_sweep(found, 0.01).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("target"))
    table = lines[head : head + 5]
    assert [int(line[12:].split()[0]) for line in table[1:]] == [32, 24, 16, 8]
    assert max(map(len, table)) <= 80
    row = next(line for line in lines if line.startswith("MQA"))
    assert "75.0 % less" in row
    assert "+0.2000 ± 0.0050" in row
    assert "--kv-rank 16 --rope-dim 8" in "\n".join(lines[head + 5 :])


def test_where_none_is_within_the_loss_the_nearest_is_named_and_nothing_is_written(swept, refused):
    found = with_losses(swept, (0.1, 0.2, 0.3, 0.4))
    assert found.smallest(0.01) is None
    assert found.verdict(0.01) == "none within 1 % perplexity; nearest: GQA-2"
    assert summarize_sweep(found, 0.01).endswith("--effort thorough")
    with refused() as caught:
        found.convert(0.01)
    assert caught.value.field == "within"
    assert with_losses(swept, (math.nan, 0.3, 0.2, math.nan)).nearest().excess == pytest.approx(0.2)


def test_without_a_usable_cache_folder_a_sweep_ends_as_with_one(reader, swept, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    (row,) = sweep_checkpoint(SweepRequest(str(reader), "mqa", **TEXT)).rows
    assert row.measured == swept.rows[1].measured
    assert "finished rows are not kept (Not a directory)" in capsys.readouterr().err


def test_an_interrupted_sweep_shows_its_rows_and_continues_after_them(
    reader, tmp_path, monkeypatch, capsys, swept
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {**TEXT, "quiet": False, "model": str(reader), "targets": "mla:8 gqa:2 mqa"}
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "survey_layers", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as raised:
            sweep_checkpoint(SweepRequest(**options))
    assert raised.value.__notes__ == ["finished rows kept for the same request: 2"]
    assert "MQA: 75.0 % less cache, " in capsys.readouterr().err
    convert_layer = Mock(side_effect=sweep.convert_layer)
    monkeypatch.setattr(sweep, "convert_layer", convert_layer)
    found = sweep_checkpoint(SweepRequest(**options))
    assert all(call.args[0].latent is not None for call in convert_layer.mock_calls)
    assert "resuming after 2 of 3 targets" in capsys.readouterr().err
    assert [row.target for row in found.rows] == ["mla:8", "gqa:2", "mqa"]
    for row, same in zip(found.rows, (swept.rows[3], *swept.rows[:2]), strict=True):
        assert (row.measured, row.distances) == (same.measured, same.distances)
    assert json.loads((tmp_path / "cache" / "kvfold" / "sweep.json").read_text()) == {}


def test_rows_of_an_interrupted_sweep_are_discarded_when_the_model_changed_or_on_request(
    reader, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = shutil.copytree(reader, tmp_path / "model")
    convert_layer = Mock(side_effect=sweep.convert_layer)
    monkeypatch.setattr(sweep, "convert_layer", convert_layer)

    def interrupt(**options):
        """The number of layers that are fitted until the sweep is interrupted before MLA."""
        convert_layer.reset_mock()
        with monkeypatch.context() as patch:
            patch.setattr(sweep, "survey_layers", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                sweep_checkpoint(SweepRequest(str(model), "mqa mla:8", **TEXT, **options))
        return convert_layer.call_count

    layers = interrupt()
    assert layers > 0
    assert interrupt() == 0
    assert interrupt(fresh=True) == layers
    assert interrupt(seed=7) == layers
    with (model / "config.json").open("a") as config:
        config.write("\n")
    assert interrupt() == layers


def test_targets_are_spelled_with_commas_or_blanks():
    spelling = ["gqa:4", "gqa:2", "mqa", "mla:576", "mla:512+64"]
    for words in (
        ["gqa:4,2", "mqa", "mla:576,512+64"],
        "gqa:4,2,mqa,mla:576 512+64 mqa",
        ["GQA:4", *spelling],
    ):
        assert [format_target(options) for options in parse_targets(words)] == spelling


def test_a_wrong_target_is_named_with_the_spellings(refused):
    for words in ("gpa:4", "gqa", "4", "gqa:2+2", "mqa:1"):
        with refused():
            parse_targets(words)


def test_an_impossible_target_ends_the_sweep_before_it_begins(reader, refused):
    """The messages name no option but --targets, except in commands of another kind."""
    for words in ("gqa:3", "gqa:4", "mla:9999", "mla:24+7", "mla:200+8"):
        with refused():
            sweep_checkpoint(SweepRequest(str(reader), f"mqa {words}", **TEXT))


def test_targets_that_suit_a_model_are_the_default(tiny_family):
    def defaults(folder, layout=None):
        with closing(open_checkpoint(str(folder))) as checkpoint:
            model = model_of(checkpoint.config, checkpoint.tensors)
            targets = default_targets(model, layout)
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
