"""The contracts of import-linter in pyproject.toml, and what they cannot state."""

import ast
import sys
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("attention", "convert")


def test_imports_follow_the_contracts(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS


def test_packages_are_imported_by_their_full_name():
    """The bare name ``convert`` would make a second copy of every class."""
    bare = []
    for folder in (*PACKAGES, "tests", "recipes"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    modules = [str(node.module)]
                bare += [path for module in modules if module.split(".")[0] in PACKAGES]
    assert bare == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_at_the_root_is_named_like_the_standard_library(package):
    files = {path.stem for path in (REPOSITORY / package).glob("*.py")} - {"__init__", "__main__"}
    assert files.isdisjoint(sys.stdlib_module_names)


def test_a_module_name_stands_once_in_a_package():
    for package in PACKAGES:
        names = [path.name for path in (REPOSITORY / package).rglob("*.py")]
        twice = {name for name in names if names.count(name) > 1}
        assert twice <= {"__init__.py", "__main__.py"}
