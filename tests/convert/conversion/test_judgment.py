"""The verdict on a conversion and the command that it recommends, against the rows that the limits
are taken from.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.conversion import judgment
from kvfold.convert.conversion.judgment import (
    LEFT,
    LIMITS,
    NEAR,
    UNTRAINED,
    WORSE,
    Loss,
    judge,
    judge_with_doubt,
    next_command,
)
from kvfold.convert.data import demo_folder

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs" / "choosing.md").read_text()
ROWS = json.loads((REPOSITORY / "recipes" / "results" / "real_models.json").read_text())["rows"][1:]


def measured(target, stage, text):
    rows = {(row["target"], row["stage"]): row["measured"] for row in ROWS}
    figures = rows[target, stage][text]
    return Loss(figures["excess"], figures["kl"], figures["top_1_agreement"])


def test_polishing_left_no_more_than_is_expected():
    for target in ("MLA 128+64", "MLA 64+64", "MQA"):
        before, after = (measured(target, stage, "text") for stage in ("fitted", "polished"))
        assert after.excess <= LEFT.excess * before.excess
        assert after.kl <= LEFT.kl * before.kl
        assert 1 - after.agreement <= LEFT.agreement * (1 - before.agreement)


@pytest.mark.parametrize("worse", [{"excess": 0.21}, {"kl": 0.21}, {"agreement": 0.7}])
def test_the_worst_figure_decides(worse):
    limits = LIMITS[NEAR]
    assert judge(limits) == NEAR
    assert judge(limits._replace(**worse)) == WORSE
    (name,) = worse
    assert judge(limits._replace(**{name: float("nan")})) == UNTRAINED


@pytest.fixture
def planned(tmp_path):
    def plan(**options):
        out = tmp_path / "out"
        request = ConvertRequest(demo_folder(), out, **{"seq_len": 256, **options})
        return replace(convert_checkpoint(replace(request, dry_run=True)).plan, request=request)

    return plan


GOOD = Loss(0.01, 0.02, 0.95)
POOR = Loss(0.12, 0.15, 0.79)
AWFUL = Loss(1.6, 1.7, 0.34)
LATENT = {"to": "mla", "kv_rank": 24, "rope_dim": 8}
POLISHED = {"refine": 200, "polish": "1M"}


@pytest.mark.parametrize(("margin", "verdict"), [(0.01, WORSE), (0.06, f"{WORSE}, uncertain")])
def test_a_verdict_is_uncertain_near_a_limit(margin, verdict):
    drift = Mock(identical=False, **POOR._asdict(), excess_margin=margin)
    assert judge_with_doubt(drift) == verdict


@pytest.mark.parametrize(
    ("options", "loss", "expected"),
    [
        (LATENT, POOR, {"effort": "thorough", "overwrite": True}),
        (LATENT | {"refine": "auto"}, POOR, {"effort": "thorough"}),
        (LATENT, AWFUL, {"budget": 64, "kv_rank": None, "overwrite": False}),
        (LATENT | POLISHED, POOR, {"budget": 64, **POLISHED}),
        # Without text no budget can be split.
        (LATENT | {"method": "svd", "refine": 5}, AWFUL, {"budget": 64, "method": None}),
        ({"to": "mqa"}, AWFUL, {"to": "gqa", "kv_heads": 2}),
        ({"to": "gqa", "kv_heads": 4, "effort": "normal"}, AWFUL, {"effort": "thorough"}),
    ],
)
def test_the_command_that_helps_most(planned, options, loss, expected):
    words = next_command(planned(**options), loss)
    assert words[:2] == ["kvfold", "convert"]
    given = kvfold.commands["convert"].make_context("convert", words[2:]).params
    assert {name: str(given[name]) for name in expected} == {
        name: str(value) for name, value in expected.items()
    }


def test_a_result_near_the_source_or_unmeasured_is_measured(planned):
    plan = planned(to="mqa")
    drift = ["kvfold", "drift", plan.request.model, plan.request.out]
    assert next_command(plan, GOOD) == next_command(plan, None) == drift


def test_without_a_larger_target_or_more_polishing_the_result_is_trained(planned, monkeypatch):
    words = next_command(planned(to="gqa", kv_heads=4, **POLISHED), AWFUL)
    assert words[:2] == ["kvfold", "uptrain"]
    kvfold.commands["uptrain"].make_context("uptrain", words[2:])
    monkeypatch.setattr(judgment, "free_bytes", lambda plan: 1000)
    assert "uptrain" in next_command(planned(to="gqa", kv_heads=4), AWFUL)
