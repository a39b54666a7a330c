"""The files that charts are saved in."""

import pytest

from kvfold.convert.console import check_files
from kvfold.convert.measure.figures import by_place


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_equal_values_give_equal_files(tmp_path, name, start):
    files = []
    for loss in (1.0, 1.0, 2.0):
        by_place("a chart", {"loss": [loss, 0.5]}).save(str(tmp_path / name), "a model")
        files.append((tmp_path / name).read_bytes())
    assert files[0].startswith(start)
    assert files[0] == files[1] != files[2]


def test_other_kinds_of_files_are_refused(refused):
    with refused():
        check_files(None, plot="x.gif")
