"""Examples of docstrings and ``docs/``, run as they stand; commands of the documents, parsed; the
page of options.
"""

import doctest
import re
import shlex
import tempfile
from pathlib import Path

import pytest

import kvfold.convert
from kvfold.convert.cli import kvfold as commands

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
    "recipe_request",
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
    told: list[str] = []
    assert doctest.DocTestRunner().run(found[0], out=told.append).failed == 0, "".join(told)


REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(REPOSITORY / folder / "README.md" for folder in (".", "recipes", "convert")),
    *REPOSITORY.glob("docs/*.md"),
]


@pytest.mark.slow
def test_the_page_on_python(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told: list[str] = []
    # A blank line ends an expected output.
    text = (REPOSITORY / "docs" / "python.md").read_text().replace("```", "\n```")
    found = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/python.md", 0)
    assert doctest.DocTestRunner().run(found, out=told.append).failed == 0, "".join(told)


@pytest.mark.parametrize(
    "document", sorted(DOCUMENTS), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_documents_name_commands_and_files_that_exist(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / link).exists(), link
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kvfold"]:
                command = commands.commands[words[1]]
                command.make_context(
                    words[1], words[2:]
                )  # raises for an option or a value that does not exist


def test_the_page_of_options_has_those_of_each_command_in_order():
    sections = (REPOSITORY / "docs" / "options.md").read_text().split("\n## kvfold ")[1:]
    page = {
        text.split()[0]: re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE) for text in sections
    }
    assert page == {
        name: [option.opts[0] for option in command.params if option.opts[0].startswith("-")]
        for name, command in commands.commands.items()
    }
