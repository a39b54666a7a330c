"""No command imports Python files of the current folder, which may be a stranger's checkpoint."""

import os
import shutil
import sys

import pytest
from helpers.cases import mostly_slow, read_cases
from helpers.processes import run_python

CASES = read_cases(__file__)
ENTRY = """
from kvfold.convert.cli import main
import contextlib, io, os, sys
for line in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(line.split())
    except SystemExit as end:
        print(line.split()[0], end.code or 0)
    assert not {"", ".", os.getcwd()} & set(sys.path), line
"""


@pytest.fixture
def planted(tiny_reader, tmp_path):
    """A model with Python files that leave a mark beside it when they are imported."""
    model = tmp_path / "model"
    shutil.copytree(tiny_reader, model)
    for name in CASES["planted"]:
        mark = f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r})\n"
        (model / f"{name}.py").write_text(mark)
    return model


@pytest.fixture
def entry(planted):
    """A script beside Python, as pip writes it, that runs command lines one after the other; each
    must leave the current folder out of the path.
    """
    entry = planted.parent / "bin" / "kvfold"
    entry.parent.mkdir()
    entry.write_text(ENTRY)
    return entry


@pytest.mark.parametrize(
    "names",
    mostly_slow([(["inspect"],), ([name for name in CASES["commands"] if name != "inspect"],)], 2),
)
def test_commands_in_a_strangers_folder(entry, planted, names):
    lines = [CASES["commands"][name] for name in names]
    done = run_python(entry, *lines, cwd=planted)
    assert not (planted.parent / "mark").exists(), (planted.parent / "mark").read_text()
    expected = [f"{line.split()[0]} 0" for line in lines]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("module", ["kvfold", "kvfold.convert"])
def test_python_m_leaves_the_current_folder_out(planted, module):
    (planted / "kvfold.py").unlink()  # Python itself runs this one, unless PYTHONSAFEPATH is set
    done = run_python("-m", module, "--help", cwd=planted)
    assert "Usage:" in done.stdout
    assert not (planted.parent / "mark").exists()


def test_children_of_a_command_leave_it_out_too():
    script = (
        "import click, os\nfrom kvfold.convert.console import run_command\n"
        "command = click.command()(lambda: print(os.environ['PYTHONSAFEPATH']))\n"
        "run_command(command, [])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    assert run_python("-c", script, environment=environment).stdout == "1\n", sys.version
