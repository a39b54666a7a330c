"""The curve of an uptraining run, and the files that charts are saved in."""

from dataclasses import replace

import pytest

from kvfold.convert.measure.figures import uptraining_curve
from kvfold.convert.training.log import LogRow

TRAINED = [LogRow(n, 512 * n, loss=1 / (n + 1), learning_rate=0.1) for n in range(1, 9)]
LOSSES = [LogRow(n, 512 * n, eval_loss=3.0 - n / 8) for n in (0, 4, 8)]
EXCESS = [replace(row, eval_excess=0.4 - 0.02 * row.step, eval_kl=0.5) for row in LOSSES]

HALVED = {
    "excess loss over the teacher's": [0.4, 0.32, 0.24],
    "KL from the teacher": [0.5] * 3,
    "half the excess at the start": [0.2, 0.2],
}


@pytest.mark.parametrize(
    ("measured", "lines", "numbers"),
    [
        ([], {}, []),
        (LOSSES, {"loss": [3.0, 2.5, 2.0]}, ["3.0000", "2.0000"]),
        (EXCESS, HALVED, ["0.4000", "0.2400"]),
    ],
)
def test_the_curve_has_held_out_losses_above_training_losses(measured, lines, numbers):
    upper, lower = uptraining_curve(TRAINED + measured).figure.axes
    assert lower.lines[0].get_xydata().tolist() == [[512 * n, 1 / (n + 1)] for n in range(1, 9)]
    drawn = {line.get_label(): list(line.get_ydata()) for line in upper.lines}
    assert drawn == {name: pytest.approx(values) for name, values in lines.items()}
    assert [text.get_text() for text in upper.texts] == numbers
    assert ("not measured (--eval-every 0)" in upper.get_title(loc="left")) == (not measured)


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_equal_values_give_equal_files(tmp_path, name, start):
    files = []
    for loss in (1.0, 1.0, 2.0):
        uptraining_curve([replace(TRAINED[0], loss=loss)]).save(str(tmp_path / name), "a model")
        files.append((tmp_path / name).read_bytes())
    assert files[0].startswith(start)
    assert files[0] == files[1] != files[2]
