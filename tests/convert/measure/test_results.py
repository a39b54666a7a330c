"""Files of measured rows that several sittings fill."""

import json

import pytest

from kvfold.convert.measure.results import continue_rows


def test_a_second_sitting_measures_what_is_missing(tmp_path):
    path, measured, shown = tmp_path / "rows.json", [], []

    def rows(names):
        def missing(done):
            for name in names:
                if name not in [row["name"] for row in done]:
                    measured.append(name)
                    yield {"name": name}

        return missing

    continue_rows(path, {"model": "m"}, rows(["a", "b"]), lambda row: shown.append(row["name"]))
    continue_rows(path, {"model": "m"}, rows(["a", "b", "c"]), lambda row: shown.append(row["name"]))
    assert measured == ["a", "b", "c"]
    assert shown == ["a", "b", "a", "b", "c"]
    assert json.loads(path.read_text()) == {"model": "m", "rows": [{"name": name} for name in "abc"]}


def test_what_was_measured_before_an_error_is_kept(tmp_path):
    def rows(done):
        yield {"name": "a"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continue_rows(tmp_path / "rows.json", {}, rows, lambda row: None)
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [{"name": "a"}]}
