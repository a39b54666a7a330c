"""No command imports Python files of the current folder, which may be a stranger's checkpoint."""

import os
import shutil
import sys

import pytest
from helpers.cases import read_cases
from helpers.processes import run_python

from kvfold.convert import demo_folder

CASES = read_cases(__file__)
QUICK = ("bench", "inspect")


@pytest.fixture
def planted(tmp_path):
    """The shipped model with Python files that leave a mark beside it when they are imported."""
    model = tmp_path / "model"
    shutil.copytree(demo_folder(), model)
    for name in CASES["planted"]:
        mark = f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r})\n"
        (model / f"{name}.py").write_text(mark)
    return model


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in CASES["commands"]
    ],
)
def test_a_command_in_a_strangers_folder(planted, command):
    entry = planted.parent / "bin" / "kvfold"  # as pip writes it
    entry.parent.mkdir()
    entry.write_text("from kvfold.convert.cli import main\nmain()\n")
    done = run_python(entry, *CASES["commands"][command].split(), cwd=planted, check=False)
    assert not (planted.parent / "mark").exists(), (planted.parent / "mark").read_text()
    assert done.returncode == (2 if command == "push" else 0), done.stderr


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
        "run_command(command, 'command', [])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    assert run_python("-c", script, environment=environment).stdout == "1\n", sys.version
