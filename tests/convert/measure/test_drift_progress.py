"""What `kvfold drift` shows while it runs."""

import re

import pytest

from kvfold.convert import InputError, console, demo_folder, drift_checkpoints, progress


def test_layers_and_then_rounding_are_counted_and_the_time_left_is_told(monkeypatch, capsys):
    monkeypatch.setattr(console, "LEAST_PRINTED", 0)
    monkeypatch.setattr(progress, "EVERY", 600)  # on a busy machine such lines come between
    shown, calls = [], []

    def note(done: int, total: int) -> None:
        calls.append((done, total))
        shown.append(progress._DISPLAY.text())

    drift_checkpoints(demo_folder(), demo_folder(), samples=1, seq_len=16, progress=note, quiet=False)
    assert calls == [(done, 8) for done in range(1, 9)]
    assert shown == [
        *(f"comparing layer {number} of 4" for number in (2, 3, 4)),
        *(f"measuring rounding, layer {number} of 4" for number in (1, 2, 3, 4, 4)),
    ]
    lines = [re.sub(r"[\d.]+ (s|min)", "_", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "comparing on 1 x 16 tokens of the built-in standard-library text, the part that no conversion reads",
        "_ per layer; about _ for the remaining 2, and rounding",
    ]
    drift_checkpoints(demo_folder(), demo_folder(), samples=1, seq_len=16)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("options", "found"), [({"samples": 0}, "1, found 0"), ({"seq_len": 1}, "2, found 1")])
def test_numbers_are_checked_before_anything_is_opened(options, found):
    with pytest.raises(InputError, match=f"^--[a-z-]+: expected a whole number of at least {found}$"):
        drift_checkpoints("nowhere", "nowhere", **options)
