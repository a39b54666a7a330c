"""What commands print fits the terminal, and their commands can be copied."""

import pytest
from helpers.cases import read_cases
from helpers.processes import run_kvfold

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
