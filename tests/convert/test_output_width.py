"""What commands print fits the terminal, and their commands can be copied."""

import shlex

import pytest
from helpers.cases import read_cases
from helpers.processes import run_kvfold

from kvfold.convert.formatting import format_labeled_rows, format_table

TEXT = "--samples 2 --seq-len 32"


@pytest.fixture(scope="module")
def folder(tiny_reader, tmp_path_factory):
    """A folder with a model as ``MODEL`` and the result of its conversion as ``out``."""
    folder = tmp_path_factory.mktemp("width")
    (folder / "MODEL").symlink_to(tiny_reader)
    run_kvfold("convert", tiny_reader, folder / "out", "--to", "mqa", *TEXT.split(), "--quiet")
    return folder


@pytest.mark.parametrize(("line", "columns"), read_cases(__file__))
def test_every_line_fits_the_terminal(folder, monkeypatch, line, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(folder)
    lines = run_kvfold(*line.split()).splitlines()
    assert lines
    assert [line for line in lines if len(line) > columns] == []


def test_a_command_continues_on_further_lines_between_its_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["kvfold", "convert", "a model", "OUT", "--to", "gqa", "--kv-heads", "4", "--overwrite"]
    label, *lines = format_labeled_rows([], words).splitlines()
    assert label == "next"
    assert max(map(len, lines)) <= 40
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == words
    assert any("--kv-heads 4" in line for line in lines)


def test_the_widest_cells_of_a_table_wrap(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    sentence = "a reason in words that take more than one line"
    rows = [
        ("name", "size", "ratio"),
        ("one two three four five six seven eight", "1", "2.00"),
        ("x", sentence),
    ]
    lines = format_table(rows)
    assert max(map(len, lines)) <= 40
    assert lines[1].endswith("2.00")
    words = " ".join(lines).split()
    assert {*sentence.split(), "eight"} <= {*words}
