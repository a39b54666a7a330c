"""Many targets in one walk: each is what its conversion alone would be, and the smallest within a loss is named."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers.checkpoints import add_demo_tokenizer

from kvfold.convert import (
    InputError,
    KvfoldError,
    convert_checkpoint,
    inspect_checkpoint,
    sweep_checkpoint,
)
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import model_of
from kvfold.convert.measure.sweep_targets import default_targets, parse_targets, spelled

TEXT = {"samples": 4, "seq_len": 24, "quiet": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_family):
    folder = tmp_path_factory.mktemp("sweep") / "model"
    shutil.copytree(tiny_family("llama", vocab_size=2048, mlp_bias=False), folder)
    add_demo_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def swept(model):
    return sweep_checkpoint(str(model), "gqa:2 mqa mla:16+8,12", **TEXT)


def with_losses(sweep, *losses):
    """The rows of ``sweep`` with other losses, in nats, and intervals of half a percent."""

    def changed(row, loss):
        source = row.measured.teacher_loss
        return replace(row, measured=replace(row.measured, student_loss=source + loss, excess_margin=0.005))

    return replace(sweep, rows=tuple(map(changed, sweep.rows, losses)))


@pytest.mark.parametrize("place", [0, 2], ids=["gqa", "mla"])
def test_a_target_is_what_its_conversion_alone_would_be(tmp_path, swept, place):
    row = swept.rows[place]
    done = convert_checkpoint(replace(row.request, out=str(tmp_path / "out")))
    alone, measured = done.record["drift"], row.measured
    assert alone["kl"]["value"] == measured.kl
    assert (alone["excess"]["value"], alone["excess"]["margin"]) == (measured.excess, measured.excess_margin)
    assert alone["agreement"]["value"] == measured.agreement
    assert tuple(layer["residual_propagated"]["value"] for layer in alone["layers"]) == row.distances
    assert (done.plan.layout.kind, done.plan.layout.cache_elements) == (row.kind, row.elements)


def test_a_budget_gets_a_split_and_its_request_names_it(swept):
    row = swept.rows[3]
    assert len(row.splits) > 2
    assert {split["kv_rank"] + split["rope_dim"] for split in row.splits} == {12}
    best = min(row.splits, key=lambda split: split["kl"])
    request = row.request
    assert (request.budget, request.kv_rank, request.rope_dim) == (None, best["kv_rank"], best["rope_dim"])
    assert f"--kv-rank {best['kv_rank']} --rope-dim {best['rope_dim']} --samples 4" in row.command("MODEL", "OUT")


def test_the_smallest_target_within_a_loss_is_named_with_its_command(swept):
    found = with_losses(swept, 0.001, 0.2, 0.009, 0.3)
    assert found.smallest(0.01) is found.rows[2]
    assert found.smallest(0.002) is found.rows[0]
    first, command = found.decision(0.01).splitlines()
    assert first == (
        "within 1 % perplexity: MLA 16+8, 81.2 % less cache (+0.9 %, 95 % interval +0.4 to +1.4; the interval reaches "
        "beyond the limit: more --samples narrow it)"
    )
    assert command == (
        f"  kvfold convert {swept.source.name} OUT --to mla --kv-rank 16 --rope-dim 8 --samples 4 --seq-len 24"
    )


def test_where_none_is_within_the_loss_the_nearest_is_named_and_nothing_is_written(tmp_path, swept):
    found = with_losses(swept, 0.1, 0.2, 0.3, 0.4)
    assert found.smallest(0.01) is None
    expected = "within 1 % perplexity: none of these; GQA-2 comes nearest (+10.5 %, 95 % interval +10.0 to +11.1)"
    assert found.decision(0.01) == f"{expected}. Try --refine auto, or larger targets"
    wide = tuple(replace(row, measured=replace(row.measured, excess_margin=0.3)) for row in found.rows)
    assert "; the interval reaches the limit: more --samples narrow it). Try" in replace(found, rows=wide).decision(
        0.01
    )
    with pytest.raises(KvfoldError, match="OUT: nothing was written; within 1 % perplexity: none of these"):
        found.convert(0.01)


def test_the_table_has_a_line_per_target_largest_cache_first(swept):
    lines = swept.table().splitlines()
    assert [int(line[12:].split()[0]) for line in lines[4:8]] == [32, 24, 16, 12]
    assert max(map(len, lines[3:8])) <= 100
    row = next(line for line in lines if line.startswith("MQA"))
    assert f"{swept.rows[1].excess:+.4f}" in row
    assert "87.5 %" in row


def test_the_command_sweeps_decides_draws_and_writes(tmp_path, model):
    numbers, plot, out = tmp_path / "sweep.json", tmp_path / "curve.svg", tmp_path / "out"
    arguments = ["sweep", str(model), "--targets", "gqa:4", "mqa", "--samples", "4", "--seq-len", "24"]
    files = ["--json", str(numbers), "--plot", str(plot), "--within", "1e9", "--out", str(out)]
    done = CliRunner().invoke(kvfold, [*arguments, *files], catch_exceptions=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]  # "[0:50] reading .." if it is slow
    assert said[0] == f"reading {model}"
    assert said[1].startswith("sweeping over 2 targets on 4 x 24 tokens")
    found = json.loads(numbers.read_text())
    assert [target["target"] for target in found["targets"]] == ["gqa:4", "mqa"]
    assert found["smallest"] == "mqa"
    mqa = found["targets"][1]
    assert mqa["saving"] == 0.875
    assert mqa["excess"]["low"] < mqa["excess"]["value"] < mqa["excess"]["high"]
    assert mqa["command"] in done.stdout
    assert inspect_checkpoint(str(out)).attention == "MQA"
    record = json.loads((out / "kvfold.json").read_text())
    assert record["drift"]["kl"]["value"] == mqa["kl"]["value"]
    assert math.isclose(record["drift"]["excess"]["value"], mqa["excess"]["value"])
    assert all(word in plot.read_text() for word in ("GQA-4", "MQA"))


def test_targets_are_spelled_with_commas_or_blanks():
    spelling = ["gqa:4", "gqa:2", "mqa", "mla:576", "mla:512+64"]
    for words in (["gqa:4,2", "mqa", "mla:576,512+64"], "gqa:4,2,mqa,mla:576 512+64 mqa", ["GQA:4", *spelling]):
        assert [spelled(options) for options in parse_targets(words)] == spelling


@pytest.mark.parametrize(
    ("words", "named"),
    [("gpa:4", "gpa:4"), ("gqa", "gqa"), ("4", "4"), ("gqa:2+2", "gqa:2+2"), ("mqa:1", "mqa:1")],
)
def test_a_wrong_target_is_named_with_what_was_expected(words, named):
    with pytest.raises(InputError, match="must be gqa:HEADS, mqa, mla:ELEMENTS") as caught:
        parse_targets(words)
    assert f"--targets {named} must be" in str(caught.value)


def test_an_impossible_target_ends_the_sweep_before_it_begins(model):
    with pytest.raises(InputError, match="--targets gqa:3: 3 heads must divide the 8 key/value heads"):
        sweep_checkpoint(str(model), "mqa gqa:3", **TEXT)
    for words in ("mla:9999", "mla:24+7", "mla:200+8", "gqa:8"):
        with pytest.raises(InputError, match=f"--targets {re.escape(words)}: ") as caught:
            sweep_checkpoint(str(model), words, **TEXT)
        named = set(re.findall(r"(?<!convert )--[a-z-]+", str(caught.value)))
        assert named == {"--targets"}, str(caught.value)
    with pytest.raises(InputError, match="9999 elements must be below the source") as caught:
        sweep_checkpoint(str(model), "mla:9999", **TEXT)
    assert len(str(caught.value).splitlines()) == 1


def test_targets_given_several_times_are_all_swept(model):
    done = CliRunner().invoke(kvfold, ["sweep", str(model), "--targets", "gpa:3", "--targets", "mqa", "gqa:4"])
    assert "--targets gpa:3 must be" in str(done.exception)


def test_targets_that_suit_a_model_are_the_default(tiny_family):
    def defaults(folder):
        checkpoint = open_checkpoint(str(folder))
        return [spelled(each) for each in default_targets(model_of(checkpoint.config, checkpoint.tensors), "free")]

    assert defaults(demo_folder()) == ["gqa:4", "gqa:2", "mqa", "mla:128", "mla:64"]
    assert defaults(tiny_family("phi")) == ["gqa:4", "gqa:2", "mqa"]  # no stock class holds its MLA
    wide = tiny_family("llama", head_dim=128, num_hidden_layers=1, mlp_bias=False)  # 2048 elements
    assert defaults(wide) == ["gqa:4", "gqa:2", "mqa", "mla:512+64", "mla:256+64"]
