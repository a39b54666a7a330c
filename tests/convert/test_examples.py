"""Examples of docstrings, pages and the notebook, run as they stand; commands of the documents,
parsed; the page of options.
"""

import doctest
import json
import re
import shlex
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.checkpoints import hub_config

import kvfold.convert
from kvfold.convert.cli import kvfold as commands
from kvfold.convert.conversion import memory

FUNCTIONS = [
    name
    for name in kvfold.convert.__all__
    if name.endswith(("_checkpoint", "_checkpoints", "_request"))
]
QUICK = (
    "ConvertRequest",
    "UptrainRequest",
    "demo_folder",
    "inspect_checkpoint",
    "make_recipe_request",
    "verify_checkpoint",
)
SLOW = [name for name in FUNCTIONS if name not in QUICK]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_example(name, tmp_path):
    exported = {each: getattr(kvfold.convert, each) for each in kvfold.convert.__all__}
    found = doctest.DocTestFinder(recurse=False).find(
        exported[name], name, globs=exported | {"folder": tmp_path}
    )
    assert found[0].examples, f"{name} has no example"
    told = []
    assert doctest.DocTestRunner().run(found[0], out=told.append).failed == 0, "".join(told)


REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(REPOSITORY / folder / "README.md" for folder in (".", "recipes", "convert", "attention")),
    REPOSITORY / "CONTRIBUTING.md",
    *REPOSITORY.glob("docs/*.md"),
]


@pytest.mark.slow
def test_the_page_on_python(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = []
    # A blank line ends an expected output.
    text = (REPOSITORY / "docs" / "python.md").read_text().replace("```", "\n```")
    found = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/python.md", 0)
    assert doctest.DocTestRunner().run(found, out=told.append).failed == 0, "".join(told)


NOT_RUN = "# not run by a test: "
RUN = [REPOSITORY / "docs" / f"{page}.md" for page in ("start", "choosing", "serving", "safety")]


@pytest.mark.parametrize(
    "document", sorted(DOCUMENTS), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_documents_name_commands_and_files_that_exist(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / link).exists(), link
    for marker, block in re.findall(r"(-->\n)?```sh\n(.*?)```", text, re.DOTALL):
        assert marker or block.lstrip().startswith(NOT_RUN) or document in RUN, block
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kvfold"]:
                command = commands.commands[words[1]]
                # Raises for an option or a value that does not exist.
                command.make_context(words[1], words[2:])


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda path: path.stem)
def test_commands_of_a_page_run_in_order(page, shallow_demo, tmp_path, monkeypatch):
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    shutil.copytree(shallow_demo, tmp_path / "convert" / "data" / "demo")
    monkeypatch.chdir(tmp_path)
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.DOTALL):
        if language == "python":
            exec(block, {})
        elif not block.startswith(NOT_RUN):
            for line in block.splitlines():
                done = CliRunner().invoke(commands, shlex.split(line, comments=True)[1:])
                assert done.exit_code == 0, (line, done.output)


@pytest.mark.slow
def test_the_notebook_runs(shallow_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(kvfold.convert, "demo_folder", lambda: shallow_demo)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((REPOSITORY / "recipes" / "first_hour.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert (names["work"] / "drift.png").exists()


WALKS = (REPOSITORY / "docs" / "walks.md").read_text()


@pytest.mark.parametrize(
    "line", re.findall(r"^kvfold convert .*", WALKS, re.MULTILINE), ids=lambda line: line.split()[3]
)
def test_conversions_of_the_walks_are_planned(line, tmp_path, monkeypatch):
    _, _, model, _, *options = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    # A dry run fails where the machine lacks what the run would need.
    monkeypatch.setattr(memory, "get_free_memory_bytes", lambda name: 64 << 30)
    monkeypatch.setattr(memory, "get_free_disk_bytes", lambda plan: 64 << 30)
    Path("MODEL").mkdir()
    Path("MODEL/config.json").write_text(json.dumps(hub_config(model) | {"dtype": "bfloat16"}))
    for text in ("FILE", "chats.jsonl"):
        Path(text).write_text('{"text": "words"}\n')
    done = CliRunner().invoke(
        commands, ["convert", "MODEL", "OUT", *options, "--dry-run", "--json", "-"]
    )
    assert done.exit_code == 0, done.output
    cache = json.loads(done.stdout)["cache_elements"]
    assert {str(cache["from"]), str(cache["to"])} <= {*re.findall(r"\d+", WALKS)}


def test_the_page_of_options_has_those_of_each_command():
    sections = (REPOSITORY / "docs" / "options.md").read_text().split("\n## kvfold ")[1:]
    page = {
        text.split()[0]: sorted(re.findall(r"(?<=`)--[\w-]+", text.partition("\n")[2]))
        for text in sections
    }
    assert page == {
        name: sorted(option.opts[0] for option in command.params if option.opts[0][0] == "-")
        for name, command in commands.commands.items()
    }


PAGE = Path(kvfold.convert.__file__).parent / "README.md"


def test_named_functions_exist():
    text = PAGE.read_text(encoding="utf-8")
    rooms = "transforms|walk|targets|training|text|methods|conversion|device"
    names = set(re.findall(rf"\b(?:{rooms})(?:\.\w+)+", text))
    assert len(names) > 30
    for name in names:
        module, attribute = name.rsplit(".", 1)
        assert callable(getattr(import_module(f"kvfold.convert.{module}"), attribute)), name
