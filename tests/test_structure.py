"""The order of the packages: an import only goes down, nothing runs in a circle, and every file is
in the wheel.

A room is a folder of a package (``convert/checkpoint``) or a file at its root (``convert/cli.py``);
CONTRIBUTING.md has the floor of each. Imports count wherever they stand: at the top of a file,
inside a function, under ``TYPE_CHECKING``, or as ``import_module("kvfold...")``.
"""

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("attention", "convert")  # convert may import attention, never the other way round
ROOT_FILES = 15  # at most, in each package
TENSORS = {"torch", "numpy", *sys.stdlib_module_names}
KNOW_TRANSFORMERS = ("deepseek", "drift", "checkpoints", "interface")
SAME_NAMES = {  # files that may repeat the public names of others, and why
    "attention/reference.py": (
        "the oracle names a formula as the fast path does, and its helpers as it needs"
    ),
    "convert/uptrain/__main__.py": "main, as in every program",
}


READS = {
    "open",
    "open_source",
    "read_bytes",
    "read_text",
    "safe_open",
    "from_file",
    "from_pretrained",
    "ZipFile",
}
# the calls of READS in convert/, by file, and why none lets a file of MODEL by the checks of
# `read_member`
READERS = {
    "checkpoint/files.py": "the functions that open",
    "checkpoint/folder.py": "read_member",
    "checkpoint/opening.py": "weights: a path of resolve_member",
    "checkpoint/tensors.py": "weights: a path of resolve_member, which open_source has looked at",
    "checkpoint/writer.py": (
        "weights: a path of resolve_member; and what it writes, without following links"
    ),
    "checkpoint/hashing.py": "what was written, or a path of resolve_member",
    "checkpoint/atomic.py": "the lock, without following a link",
    "console.py": "files that options name",
    "conversion/calibration.py": "the folder of the run",
    "conversion/journal.py": "the folder of the run",
    "conversion/latent.py": "the folder of the run",
    "conversion/run.py": "the modeling file that kvfold ships",
    "training/fit.py": "the folder of the run",
    "uptrain/trainer.py": "OUT.training",
    "uptrain/work.py": "OUT.training",
    "text/corpus.py": "the user's text",
    "text/tokenizer.py": (
        "transformers reads the tokenizer's files, which were checked when the checkpoint was"
        " opened"
    ),
    "stream/stock.py": (
        "transformers reads the config, which was checked when the checkpoint was opened"
    ),
    "stream/weights.py": (
        "transformers reads weights, which were checked when the checkpoint was opened"
    ),
    "measure/losses.py": "what the demo wrote",
    "measure/ruler.py": "the text that ships",
    "measure/eval_tasks.py": "the user's tasks",
    "measure/bench.py": "the results of its worker",
    "measure/sweep_rows.py": "the rows that a sweep kept in the user's cache folder",
    "measure/bench_worker.py": "its task",
    "measure/machine.py": "/proc",
    "host.py": "/proc",
    "signals.py": "/proc",
    "recipes.py": "recipes",
    "demo.py": "what the demo wrote",
    "data/__init__.py": "what ships",
    "families/schema.py": "what ships",
}


@dataclass(frozen=True)
class Import:
    """One import: in which file and line, of which module, and the file of the packages that it
    reaches, if any.
    """

    file: str
    line: int
    module: str
    target: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def modules() -> dict[str, str]:
    """The file of every module: ``kvfold.convert.checkpoint`` is
    ``convert/checkpoint/__init__.py``.
    """
    paths = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    found = sorted(path.relative_to(REPOSITORY).as_posix() for path in paths)
    return {
        "kvfold." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
        for file in found
    }


def imported(node: ast.AST, file_of: dict[str, str]) -> list[str]:
    """The names of the modules that a statement (or a call of ``import_module``) imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # from kvfold.convert.checkpoint import shards: the file shards.py
        base = "." * node.level + (node.module or "")
        names = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in file_of else base for name in names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        return [
            each.value
            for each in node.args[:1]
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
    return []


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    file_of = modules()
    found = []
    for file in file_of.values():
        for node in ast.walk(ast.parse((REPOSITORY / file).read_text(), filename=file)):
            for module in imported(node, file_of):
                owner = module
                while owner not in file_of and "." in owner:
                    owner = owner.rpartition(".")[0]
                found.append(Import(file, node.lineno, module, file_of.get(owner)))
    return found


@pytest.fixture(scope="module")
def edges(imports: list[Import]) -> list[Import]:
    """The imports of one file of the packages by another."""
    return [each for each in imports if each.target not in (None, each.file)]


def room(file: str) -> str:
    """``convert/text`` for ``convert/text/files.py``, ``convert/cli`` for ``convert/cli.py``."""
    return "/".join(file.removesuffix(".py").split("/")[:2])


def floors() -> dict[str, tuple[int, int]]:
    """The floor of every room in CONTRIBUTING.md, as (rank of the package, floor inside it): higher
    ones compare so.
    """
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    found = {}
    for rank, package in enumerate(PACKAGES):
        table = re.search(
            rf"^\| floor \| room in `{package}/` \|.*?\n\|.*?\n((?:\|.*\n)+)", text, re.MULTILINE
        )[1]
        for floor, names, said in (line.split("|")[1:4] for line in table.splitlines()):
            assert said.strip()
            found |= {
                f"{package}/{name.strip('/')}": (rank, int(floor))
                for name in re.findall(r"`([\w/]+)`", names)
            }
    return found


def test_contributing_has_the_floor_of_every_room() -> None:
    assert floors().keys() == {room(file) for file in modules().values()}


def test_imports_only_go_down(edges: list[Import]) -> None:
    table = floors()
    rooms = {each: (room(each.file), room(each.target)) for each in edges}
    assert [
        f"{each}: {a} to {b}" for each, (a, b) in rooms.items() if a != b and table[a] <= table[b]
    ] == []


def test_no_circle_of_files_or_of_rooms(edges: list[Import]) -> None:
    files: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for each in edges:
        files.setdefault(each.file, set()).add(each.target)
        rooms.setdefault(room(each.file), set()).update({room(each.target)} - {room(each.file)})
    for graph in (files, rooms):
        TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_packages_are_imported_by_their_full_name(imports: list[Import]) -> None:
    bare = [each for each in imports if each.module.split(".")[0] in (*PACKAGES, "recipes", "")]
    assert [f"{each}; import kvfold.{each.module}" for each in bare] == []


def test_transforms_see_tensors_only(imports: list[Import]) -> None:
    seen = [each for each in imports if room(each.file) == "convert/transforms"]
    beyond = [
        each for each in seen if each.target is None or room(each.target) != "convert/transforms"
    ]
    assert [str(each) for each in beyond if each.module.split(".")[0] not in TENSORS] == []


def test_attention_needs_torch_alone_but_for_rooms_that_know_transformers(
    imports: list[Import],
) -> None:
    rooms = {*KNOW_TRANSFORMERS, "kernel"}  # the kernel needs Triton
    seen = [
        each
        for each in imports
        if each.file.startswith("attention/") and room(each.file)[10:] not in rooms
    ]
    assert [
        str(each)
        for each in seen
        if each.target is None and each.module.split(".")[0] not in TENSORS
    ] == []


def reads_a_file(node: ast.AST) -> bool:
    """True for a call of READS; a method named ``open`` counts if its argument can be a mode."""
    if not isinstance(node, ast.Call):
        return False
    function = ast.unparse(node.func)
    first = node.args[0] if node.args else None
    mode = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return (
        function.split(".")[-1] in READS
        or function in ("open", "os.open", "torch.load")
        or (function.endswith(".open") and mode)
    )


def test_files_of_models_are_read_by_one_function() -> None:
    trees = {
        file: ast.parse((REPOSITORY / file).read_text())
        for file in modules().values()
        if file[0] == "c"
    }
    reading = {
        file.removeprefix("convert/")
        for file, tree in trees.items()
        if any(map(reads_a_file, ast.walk(tree)))
    }
    assert reading == READERS.keys(), (
        "read files of MODEL with read_member, others with a reason in READERS"
    )


def defined(tree: ast.Module) -> set[str]:
    """The functions, classes, constants and types that a file defines at its top level, but for
    private ones.
    """
    names = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    targets = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    targets += [[node.target] for node in tree.body if isinstance(node, ast.AnnAssign)]
    names |= {
        each.id
        for target in targets
        for node in target
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}


def test_a_public_name_is_defined_in_one_file() -> None:
    files: dict[str, list[str]] = {}
    for file in {*modules().values()} - SAME_NAMES.keys():
        for name in defined(ast.parse((REPOSITORY / file).read_text())):
            files.setdefault(name, []).append(file)
    assert {name: sorted(where) for name, where in files.items() if len(where) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_few_files_at_the_root_and_none_named_like_the_standard_library(package: str) -> None:
    files = {path.stem for path in (REPOSITORY / package).glob("*.py")}
    assert len(files) <= ROOT_FILES, files
    assert sorted((files - {"__init__", "__main__"}) & sys.stdlib_module_names) == []


def test_every_file_is_in_a_package_of_pyproject() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {file.rpartition("/")[0] for file in modules().values()} - {"convert/package"}
    assert {"kvfold." + folder.replace("/", ".") for folder in folders} | {
        "kvfold",
        "kvfold.recipes",
    } == {*listed}
