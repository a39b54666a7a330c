"""The order of the packages: an import only goes down, nothing runs in a circle, and every file is in the wheel.

A room is a folder of a package (``convert/checkpoint``) or a file at its root (``convert/cli.py``); CONTRIBUTING.md has
the floor of each. Imports count wherever they stand: at the top of a file, inside a function, under ``TYPE_CHECKING``,
or as ``import_module("kvfold...")``.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("attention", "convert")  # convert may import attention, never the other way round
ROOT_FILES = 15  # at most, in each package
TENSORS = {"torch", "numpy", *sys.stdlib_module_names}
KNOW_TRANSFORMERS = ("deepseek", "drift", "checkpoints", "interface")


@dataclass(frozen=True)
class Import:
    """One import: in which file and line, of which module, and the file of the packages that it reaches, if any."""

    file: str
    line: int
    module: str
    target: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def modules_of(root: Path) -> dict[str, str]:
    """The file of every module: ``kvfold.convert.checkpoint`` is ``convert/checkpoint/__init__.py``."""
    found = sorted(path.relative_to(root).as_posix() for each in PACKAGES for path in (root / each).rglob("*.py"))
    return {"kvfold." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in found}


def imports_of(root: Path) -> list[Import]:
    file_of, found = modules_of(root), []
    for file in file_of.values():
        for node in ast.walk(ast.parse((root / file).read_text(), filename=file)):
            for module in imported(node, ["kvfold", *file.split("/")[:-1]], file_of):
                owner = module
                while owner not in file_of and "." in owner:
                    owner = owner.rpartition(".")[0]
                found.append(Import(file, node.lineno, module, file_of.get(owner)))
    return found


def imported(node: ast.AST, package: list[str], file_of: dict[str, str]) -> list[str]:
    """The absolute names of the modules that a statement (or a call of ``import_module``) imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        # from kvfold.convert.checkpoint import shards: the file shards.py
        files = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in file_of]
        return files + ([base] if len(files) < len(node.names) else [])
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [each.value for each in node.args[:1] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return []


def room(file: str) -> str:
    """``convert/text`` for ``convert/text/files.py``, ``convert/cli`` for ``convert/cli.py``."""
    return "/".join(file.removesuffix(".py").split("/")[:2])


def floors() -> dict[str, tuple[int, int]]:
    """The floor of every room in CONTRIBUTING.md, as (rank of the package, floor inside it): higher ones compare so."""
    text, found = (REPOSITORY / "CONTRIBUTING.md").read_text(), {}
    for rank, package in enumerate(PACKAGES):
        table = re.search(rf"^\| floor \| room in `{package}/` \|.*?\n\|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
        for floor, names, said in (line.split("|")[1:4] for line in table.splitlines()):
            assert said.strip()
            found |= {f"{package}/{name.strip('/')}": (rank, int(floor)) for name in re.findall(r"`([\w/]+)`", names)}
    return found


def between_files(imports: Iterable[Import]) -> list[Import]:
    return [each for each in imports if each.target not in (None, each.file)]


def upward(imports: Iterable[Import]) -> Iterator[str]:
    table = floors()
    for each in between_files(imports):
        start, end = room(each.file), room(each.target)
        if start != end and table[start] <= table[end]:
            yield f"{each}: from {start} (floor {table[start][1]}) to {end} (floor {table[end][1]})"


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for start, end in edges:
        graph.setdefault(start, set()).update({end} - {start})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of(REPOSITORY)


def test_contributing_has_the_floor_of_every_room() -> None:
    assert floors().keys() == {room(file) for file in modules_of(REPOSITORY).values()}


def test_imports_only_go_down(imports: list[Import]) -> None:
    assert list(upward(imports)) == []


def test_no_circle_of_files_or_of_rooms(imports: list[Import]) -> None:
    assert circle((each.file, each.target) for each in between_files(imports)) == []
    assert circle((room(each.file), room(each.target)) for each in between_files(imports)) == []


def test_packages_are_imported_by_their_full_name(imports: list[Import]) -> None:
    bare = [each for each in imports if each.module.split(".")[0] in (*PACKAGES, "recipes")]
    assert [f"{each}; import kvfold.{each.module}" for each in bare] == []


def test_transforms_see_tensors_only(imports: list[Import]) -> None:
    seen = [each for each in imports if room(each.file) == "convert/transforms"]
    beyond = [each for each in seen if each.target is None or room(each.target) != "convert/transforms"]
    assert [str(each) for each in beyond if each.module.split(".")[0] not in TENSORS] == []


def test_attention_needs_torch_alone_but_for_rooms_that_know_transformers(imports: list[Import]) -> None:
    rooms = {*KNOW_TRANSFORMERS, "kernel"}  # the kernel needs Triton
    seen = [each for each in imports if each.file.startswith("attention/") and room(each.file)[10:] not in rooms]
    assert [str(each) for each in seen if each.target is None and each.module.split(".")[0] not in TENSORS] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_few_files_at_the_root_and_none_named_like_the_standard_library(package: str) -> None:
    files = {path.stem for path in (REPOSITORY / package).glob("*.py")}
    assert len(files) <= ROOT_FILES, files
    assert sorted((files - {"__init__", "__main__"}) & sys.stdlib_module_names) == []


def test_every_file_is_in_a_package_of_pyproject() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.rpartition("/")[0] for file in modules_of(REPOSITORY).values()}
    assert {"kvfold." + folder.replace("/", ".") for folder in folders} | {"kvfold.recipes"} == {*listed}


def test_every_import_is_seen(tmp_path: Path) -> None:
    """Imports inside functions, under TYPE_CHECKING, relative ones and import_module count."""
    sources = {
        "convert/errors.py": "def late():\n    from kvfold.convert.checkpoint import shards\n    return shards\n",
        "convert/checkpoint/__init__.py": "",
        "convert/checkpoint/shards.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..errors import late\n",
        "attention/__init__.py": "import importlib as i\ni.import_module('kvfold.convert.checkpoint')\nimport convert",
    }
    for file, text in sources.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    found = imports_of(tmp_path)
    assert [f"{each} from {each.target}" for each in found if "kvfold" in each.module or each.module == "convert"] == [
        "attention/__init__.py:3 imports convert from None",
        "attention/__init__.py:2 imports kvfold.convert.checkpoint from convert/checkpoint/__init__.py",
        "convert/checkpoint/shards.py:3 imports kvfold.convert.errors from convert/errors.py",
        "convert/errors.py:2 imports kvfold.convert.checkpoint.shards from convert/checkpoint/shards.py",
    ]
    assert {"convert/checkpoint/shards.py", "convert/errors.py"} == {
        *circle((each.file, each.target) for each in between_files(found))
    }
    assert [each.split(" imports")[0] for each in upward(found)] == ["attention/__init__.py:2", "convert/errors.py:2"]
