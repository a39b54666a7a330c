"""The structure of the packages, read from their imports: rooms, floors, arrows, circles and sizes.

A room is a folder of a package (``convert/checkpoint``) or a file at its root (``convert/cli.py``). Every room stands
on a floor (``FLOORS``), and an import may only go down. Imports are read with ``ast``, wherever they stand: at the top
of a file, inside a function, under ``TYPE_CHECKING``, or as ``import_module("kvfold...")``.

``python tests/helpers/structure.py [REPOSITORY]`` prints the figures of a repository (default: this one).
"""

import ast
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("convert", "attention")

# Floors of convert lie above those of attention: convert may import attention, never the other way round.
FLOORS = {
    "attention": [
        ["checks", "products", "kernel", "checkpoints"],
        ["mask", "rotary"],
        ["cache", "reference"],
        ["blocked"],
        ["grouped", "interface"],
        ["latent"],
        ["modeling"],
        ["deepseek", "drift"],
        ["__init__"],
    ],
    "convert": [
        ["errors", "data", "signals", "sizes", "host", "transforms"],
        ["options", "methods"],
        ["request", "console", "progress", "processes", "checkpoint", "families"],
        ["device", "recipes", "stream", "targets"],
        ["text", "walk"],
        ["training"],
        ["conversion"],
        ["measure"],
        ["uptrain"],
        ["__init__", "demo"],
        ["cli"],
        ["__main__"],
    ],
}


@dataclass(frozen=True)
class Import:
    """One import of a repository's file: what stands in which line, and the repository's file it reaches, if any."""

    file: str  # the importing file, relative to the repository: "convert/checkpoint/shards.py"
    line: int
    module: str  # absolute name: "kvfold.convert.checkpoint.atomic", "torch.nn"
    target: str | None  # the imported file, like ``file``; None for a module of another project

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@dataclass(frozen=True)
class Repository:
    """The Python files of ``convert/`` and ``attention/`` under ``root``."""

    root: Path

    @cached_property
    def files(self) -> list[str]:
        """Every ``.py`` file of the packages, relative to the root, sorted."""
        found = (path for package in PACKAGES for path in (self.root / package).rglob("*.py"))
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of every file, in order."""
        return [each for file in self.files for each in _imports(file, self.tree(file), self._file_of)]

    @cached_property
    def arrows(self) -> list[Import]:
        """The imports from one file of the packages to another."""
        return [each for each in self.imports if each.target not in (None, each.file)]

    def tree(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text(), filename=file)

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """The file of every module: ``kvfold.convert.checkpoint`` is ``convert/checkpoint/__init__.py``."""
        return {
            "kvfold." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
            for file in self.files
        }


def room(file: str) -> str:
    """The room of a file: ``convert/text`` for ``convert/text/files.py``, ``convert/cli`` for ``convert/cli.py``."""
    return "/".join(file.removesuffix(".py").split("/")[:2])


def floors() -> dict[str, tuple[int, int]]:
    """The floor of every room, as (rank of the package, floor inside it): comparable over both packages."""
    ranks = enumerate(("attention", "convert"))
    return {
        f"{package}/{name}": (rank, floor)
        for rank, package in ranks
        for floor, names in enumerate(FLOORS[package], 1)
        for name in names
    }


def root_files(repository: Repository, package: str) -> list[str]:
    """The ``.py`` files at a package's root."""
    return [file for file in repository.files if file.startswith(f"{package}/") and file.count("/") == 1]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The strongly connected sets of more than one node, each sorted (Tarjan's algorithm)."""
    graph: dict[str, set[str]] = {}
    for start, end in edges:
        graph.setdefault(start, set()).add(end)
        graph.setdefault(end, set())
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            cut = stack.index(node)
            found.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(each for each in found if len(each) > 1)


def file_circles(repository: Repository) -> list[list[str]]:
    """Circles between files."""
    return circles((arrow.file, arrow.target) for arrow in repository.arrows)


def room_arrows(repository: Repository) -> set[tuple[str, str]]:
    """The arrows between different rooms."""
    pairs = {(room(arrow.file), room(arrow.target)) for arrow in repository.arrows}
    return {pair for pair in pairs if pair[0] != pair[1]}


def stacked(edges: set[tuple[str, str]], rooms: set[str]) -> dict[str, int]:
    """The floors that the imports themselves draw: 1 + the highest room imported, circles counted as one room."""
    together = {node: tuple(each) for each in circles(edges) for node in each}
    merged = {(together.get(a, (a,)), together.get(b, (b,))) for a, b in edges}
    below: dict[tuple[str, ...], set[tuple[str, ...]]] = {together.get(each, (each,)): set() for each in rooms}
    for start, end in merged:
        if start != end:
            below[start].add(end)
    height: dict[tuple[str, ...], int] = {}

    def measure(node: tuple[str, ...]) -> int:
        if node not in height:
            height[node] = 1 + max((measure(each) for each in below[node]), default=0)
        return height[node]

    return {name: measure(node) for node in below for name in node}


def functions(repository: Repository) -> list[tuple[int, str, str]]:
    """Every function: (lines from ``def`` to its end, file, name)."""
    return [
        (node.end_lineno - node.lineno + 1, file, node.name)
        for file in repository.files
        for node in ast.walk(repository.tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _imports(file: str, tree: ast.Module, file_of: dict[str, str]) -> Iterator[Import]:
    package = ["kvfold", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        for module in _modules(node, package, file_of):
            yield Import(file, node.lineno, module, _target(module, file_of))


def _modules(node: ast.AST, package: list[str], file_of: dict[str, str]) -> list[str]:
    """The absolute names of the modules that a statement (or a call of ``import_module``) imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
        modules = [
            name for name in names if name in file_of
        ]  # from kvfold.convert.checkpoint import shards: the file shards.py
        return modules + ([base] if len(modules) < len(names) else [])
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _target(module: str, file_of: dict[str, str]) -> str | None:
    """The file of the packages that holds ``module``, or a name in it; None for any other module."""
    while module.startswith("kvfold."):
        if module in file_of:
            return file_of[module]
        module = module.rpartition(".")[0]
    return None


def main() -> None:
    repository = Repository(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else REPOSITORY)
    texts = {file: (repository.root / file).read_text().splitlines() for file in repository.files}
    rooms = {room(file) for file in repository.files}
    arrows = room_arrows(repository)
    drawn = stacked(arrows, rooms)
    table = floors()
    known = {pair for pair in arrows if pair[0] in table and pair[1] in table}
    sizes = functions(repository)
    print(f"files {len(texts)}, lines {sum(map(len, texts.values()))}")
    for package in PACKAGES:
        lines = sum(len(text) for file, text in texts.items() if file.startswith(f"{package}/"))
        print(f"  {package}: {lines} lines, {len(root_files(repository, package))} .py files at the root")
    print(f"rooms {len(rooms)}, floors drawn by the imports {max(drawn.values())}, arrows between rooms {len(arrows)}")
    if rooms <= table.keys():
        print(f"arrows that do not go down {sum(table[a] <= table[b] for a, b in known)}")
    else:
        print(f"arrows that do not go down: {len(rooms - table.keys())} rooms have no floor in the table")
    print(f"circles between rooms {len(circles(arrows))}: {circles(arrows)}")
    print(f"circles between files {len(file_circles(repository))}: {file_circles(repository)}")
    print(f"functions {len(sizes)}, median {statistics.median(size for size, *_ in sizes):g} lines")
    print("files over 300 lines:")
    print("".join(f"  {len(text)} {file}\n" for file, text in texts.items() if len(text) > 300), end="")
    print("functions over 40 lines:")
    print("".join(f"  {size} {file} {name}\n" for size, file, name in sorted(sizes, reverse=True) if size > 40), end="")
    if "--rooms" in sys.argv:
        for name in sorted(rooms, key=lambda each: (-drawn[each], each)):
            print(f"{drawn[name]:3} {name}: {', '.join(sorted(b for a, b in arrows if a == name))}")


if __name__ == "__main__":
    main()
