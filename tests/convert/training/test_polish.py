"""Polishing: what decides the steps that it takes."""

import pytest
import torch
from helpers.students import TOKENS, student

from kvfold.convert.training import polish as module
from kvfold.convert.training.polish import Text, polish
from kvfold.convert.training.student import Student


def text(ours: Student) -> Text:
    """A source whose predictions are not the student's."""
    with torch.no_grad():
        states = ours.hidden(TOKENS)
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    return Text(TOKENS, states + noise * states.std())


def test_each_round_takes_the_rate_that_the_rounds_before_leave(tiny_family, monkeypatch: pytest.MonkeyPatch):
    ours = student(tiny_family("llama"))
    seen = []

    def slowdown(errors: list[float], steps: int) -> float:
        seen.append((len(errors), steps))
        return 1.0 if len(errors) == 1 else 0.0

    monkeypatch.setattr(module, "slowdown", slowdown)
    found = polish(ours, text(ours), text(ours), 60, lr=0.01)
    assert seen == [(1, 60), (2, 60), (3, 60)]
    assert found.errors[1] != found.errors[0]
    assert found.errors[1] == found.errors[2] == found.errors[3]


def test_small_rows_move_in_proportion(tiny_family):
    ours = student(tiny_family("llama"))
    weight = next(part.master for name, part in ours.trained.items() if name.endswith("0.self_attn.v_proj.weight"))
    with torch.no_grad():
        weight[0] *= 1e-3
    before = weight.detach().clone()
    polish(ours, text(ours), text(ours), 1, lr=0.01)
    moved = (weight.detach() - before).abs().mean(-1)
    assert 0 < moved[0] < 2e-3 * moved[1:].mean()
