"""The verdict on a conversion and the command that it recommends."""

from dataclasses import replace

import pytest
from helpers.cases import read_cases

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.conversion.judgment import (
    LIMITS,
    NEAR,
    UNTRAINED,
    WORSE,
    LossFigures,
    judge_drift,
    suggest_next_command,
)
from kvfold.convert.data import demo_folder

POOR = LossFigures(0.12, 0.15, 0.79)
AWFUL = LossFigures(1.6, 1.7, 0.34)
LOSSES = {"good": LossFigures(0.01, 0.02, 0.95), "poor": POOR, "awful": AWFUL}
CASES = read_cases(__file__)


@pytest.mark.parametrize("worse", [{"excess": 0.21}, {"kl": 0.21}, {"agreement": 0.7}])
def test_the_worst_figure_decides(worse):
    limits = LIMITS[NEAR]
    assert judge_drift(limits) == NEAR
    assert judge_drift(limits._replace(**worse)) == WORSE
    (name,) = worse
    assert judge_drift(limits._replace(**{name: float("nan")})) == UNTRAINED


@pytest.mark.parametrize(("options", "loss", "command", "expected"), CASES["next_command"])
def test_the_next_command_trains_more_then_takes_a_larger_cache(
    out, options, loss, command, expected
):
    options = {"to": "mqa", "seq_len": 256} | options
    request = ConvertRequest(demo_folder(), out, **options)
    plan = convert_checkpoint(replace(request, dry_run=True)).plan
    words = suggest_next_command(replace(plan, request=request), LOSSES.get(loss))
    assert words[:2] == ["kvfold", command]
    given = kvfold.commands[command].make_context(command, words[2:]).params
    assert {name: given[name] for name in expected} == expected
