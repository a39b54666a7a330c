"""The verdict on a conversion and the command that it recommends, against the rows that the limits
are taken from.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.conversion import judgment
from kvfold.convert.conversion.judgment import (
    LIMITS,
    NEAR,
    UNTRAINED,
    WORSE,
    Loss,
    next_step,
    verdict_of,
    verdict_text,
)
from kvfold.convert.data import demo_folder
from kvfold.convert.training.budget import refining_batch

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs" / "choosing.md").read_text()
ROWS = json.loads((REPOSITORY / "recipes" / "results" / "real_models.json").read_text())["rows"][1:]


def drift_of(loss):
    agreement = 1 - loss.disagreement
    measured = Mock(excess_margin=0.06)
    return Mock(
        excess=loss.excess,
        kl=loss.kl,
        agreement=agreement,
        sequences=8,
        length=256,
        measured=measured,
    )


def measured(target, stage, text):
    figures = next(row for row in ROWS if (row["target"], row["stage"]) == (target, stage))[
        "measured"
    ][text]
    return Loss(figures["excess"], figures["kl"], 1 - figures["top_1_agreement"])


def test_the_page_shows_the_limits_and_the_verdicts_of_measured_rows():
    for verdict, limits in LIMITS.items():
        agreement = 100 - 100 * limits.disagreement
        cells = (
            f"at most {limits.excess:.2f} | at most {limits.kl:.2f} | at least {agreement:.0f} %"
        )
        assert f"| {verdict} | {cells} |" in PAGE
    rows = re.findall(
        r"^\| (.*), (.*), (text|code) \| (.*) \| (.*) \| (.*) % \| (.*) \|$", PAGE, re.MULTILINE
    )
    assert {verdict for *_, verdict in rows} == {NEAR, WORSE, UNTRAINED}
    for target, stage, text, excess, kl, agreement, verdict in rows:
        loss = measured(target, stage, text)
        shown = f"{loss.excess:+.3f}", f"{loss.kl:.3f}", f"{100 - 100 * loss.disagreement:.1f}"
        assert (shown, verdict_of(loss)) == ((excess, kl, agreement), verdict)


def test_polishing_left_no_more_than_is_expected():
    for target in ("MLA 128+64", "MLA 64+64", "MQA"):
        before, after = (vars(measured(target, stage, "text")) for stage in ("fitted", "polished"))
        left = vars(judgment._LEFT)
        assert all(after[name] <= left[name] * before[name] for name in left), target


@pytest.mark.parametrize("name", ["excess", "kl", "disagreement"])
def test_the_worst_figure_decides(name):
    assert verdict_of(LIMITS[NEAR]) == NEAR
    assert verdict_of(replace(LIMITS[NEAR], **{name: 0.21})) == WORSE
    assert verdict_of(replace(LIMITS[NEAR], **{name: 0.5})) == UNTRAINED
    assert verdict_of(replace(LIMITS[NEAR], **{name: float("nan")})) == UNTRAINED


@pytest.fixture
def planned(tmp_path):
    def plan(**options):
        request = ConvertRequest(
            demo_folder(), tmp_path / "out", dry_run=True, **{"seq_len": 256, **options}
        )
        return convert_checkpoint(replace(request, dry_run=True)).plan

    return plan


GOOD = Loss(0.01, 0.02, 0.05)
POOR = Loss(0.12, 0.15, 0.21)
AWFUL = Loss(1.6, 1.7, 0.66)
LATENT = {"to": "mla", "kv_rank": 24, "rope_dim": 8}


def test_verdicts_and_commands_are_told(planned, told):
    for loss in (GOOD, POOR, AWFUL):
        told(verdict_text(drift_of(loss)))
        told(
            next_step(planned(**LATENT), drift_of(loss), 60.0, 2.0)
            .to_text()
            .replace(str(demo_folder()), "DEMO")
        )


@pytest.mark.parametrize(
    ("options", "loss", "expected"),
    [
        (LATENT, POOR, {"effort": "thorough"}),
        (LATENT | {"refine": 5}, POOR, {"effort": "thorough"}),
        (
            LATENT | {"refine": "auto"},
            POOR,
            {"refine": "auto", "polish": "400k", "repeat_text": True},
        ),
        (LATENT, AWFUL, {"budget": 64, "kv_rank": None}),
        (LATENT | {"refine": 50, "polish": "1M"}, POOR, {"refine": 200, "polish": "1M"}),
        (
            LATENT | {"refine": 200, "polish": "1M"},
            POOR,
            {"budget": 64, "refine": 200, "polish": "1M"},
        ),
        # Without text no budget can be split.
        (
            LATENT | {"method": "svd", "refine": 5},
            AWFUL,
            {"budget": 64, "method": None, "refine": 5},
        ),
        ({"to": "mqa"}, AWFUL, {"to": "gqa", "kv_heads": 2}),
        (
            {"to": "gqa", "kv_heads": 4, "effort": "normal"},
            AWFUL,
            {"kv_heads": 4, "effort": "thorough"},
        ),
    ],
)
def test_the_command_that_helps_most(planned, options, loss, expected):
    step = next_step(planned(**options), drift_of(loss), 60.0, 2.0)
    made = {}
    words = shlex.split(step.command)
    made.update(kvfold.commands[words[1]].make_context(words[1], words[2:]).params)
    assert {name: str(made[name]) for name in expected} == {
        name: str(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("options", "repeated"),
    [
        ({}, ""),
        ({"samples": 65}, "--samples 65"),
        ({"seq_len": 256, "samples": 65}, "--samples 65 --seq-len 256"),
    ],
)
def test_a_length_that_was_left_to_the_model_stays_so(planned, options, repeated):
    command = next_step(
        planned(to="mqa", **{"seq_len": "auto", **options}), drift_of(POOR), 60.0, 2.0
    ).command
    assert re.search("--to mqa (.*?) ?--dry-run", command)[1] == repeated


def test_without_a_larger_target_or_more_polishing_the_result_is_trained(planned, monkeypatch):
    step = next_step(
        planned(to="gqa", kv_heads=4, refine=200, polish="1M"), drift_of(AWFUL), 60.0, 2.0
    )
    words = shlex.split(step.command)
    assert words[:2] == ["kvfold", "uptrain"]
    kvfold.commands["uptrain"].make_context("uptrain", words[2:])
    monkeypatch.setattr(judgment, "free_bytes", lambda plan: 1000)
    assert "uptrain" in next_step(planned(to="gqa", kv_heads=4), drift_of(AWFUL), 60.0, 2.0).command


def test_the_time_follows_from_the_timings_of_the_run(planned):
    fitted = planned(**LATENT)
    polished = planned(**LATENT, polish="200k", repeat_text=True)
    passed = 8 * 256 * 1e-4  # 1e-4 s per token
    step = judgment._REFINED * refining_batch(fitted.request.length) * fitted.request.length * 4e-4
    assert next_step(fitted, drift_of(POOR), 60.0, passed).seconds == pytest.approx(
        60 + 160 + 200 * step
    )
    assert next_step(polished, drift_of(POOR), 60.0, passed).seconds == pytest.approx(
        60 + 80 + 200 * step, rel=0.01
    )
    assert next_step(fitted, drift_of(POOR), 60.0, None).seconds is None
    normal = next_step(planned(**LATENT, effort="normal"), drift_of(POOR), 60.0, passed)
    assert normal.seconds == pytest.approx(60 + 120 + 150 * step, rel=0.01)
    assert normal.why == "refine and polish longer"
    refined = next_step(
        planned(**LATENT, refine="auto", polish="200k"), drift_of(POOR), 60.0, passed
    )
    assert refined.seconds == pytest.approx(60 + 80, rel=0.01)
    assert refined.why == "polish longer"
    long = next_step(planned(**LATENT, polish="1M", repeat_text=True), drift_of(POOR), 60.0, passed)
    assert long.seconds == pytest.approx(60 + 200 * step)
    assert long.why == "refine longer"


def test_a_model_that_writes_dialogues_takes_longer_to_polish(planned, monkeypatch):
    monkeypatch.setattr(judgment, "writes_text", lambda plan: True)
    told = next_step(planned(**LATENT), drift_of(POOR), 60.0, 2.0).to_text()
    assert " min on this machine, plus the time to write further dialogues):\n" in told


def test_a_conversion_ends_with_its_verdict(tiny_reader, tmp_path):
    done = convert_checkpoint(
        ConvertRequest(tiny_reader, tmp_path / "out", to="mqa", samples=2, seq_len=16, quiet=True)
    )
    assert done.to_dict()["verdict"] == done.verdict == verdict_of(judgment.loss_of(done.drift))
    assert done.pass_seconds > 0
    assert done.summary().splitlines()[-3].startswith(f"verdict: {done.verdict}, uncertain: ")
    assert f"\nVerdict: {done.verdict} " in (tmp_path / "out" / "README.md").read_text()
    pooled = convert_checkpoint(
        ConvertRequest(tiny_reader, tmp_path / "pooled", to="mqa", method="mean", quiet=True)
    )
    assert pooled.verdict is None
    assert "verdict:" not in pooled.summary()
