"""The order of the packages: an import only goes down, nothing runs in a circle, and every file is in the wheel."""

import re
import sys
import tomllib
from collections.abc import Callable

import pytest
from helpers.structure import (
    FLOORS,
    PACKAGES,
    REPOSITORY,
    Import,
    Repository,
    circles,
    file_circles,
    floors,
    room,
    room_arrows,
    root_files,
)

ROOT_FILES = 15  # at most, in each package
TENSORS = {"torch", "numpy", *sys.stdlib_module_names}


@pytest.fixture(scope="module")
def repository() -> Repository:
    return Repository(REPOSITORY)


def upward(repository: Repository) -> list[str]:
    table = floors()

    def stands(name: str) -> str:
        return f"{name} (floor {table[name][1]} of {name.split('/')[0]})"

    def goes_up(arrow: Import) -> bool:
        start, end = room(arrow.file), room(arrow.target)
        return start != end and start in table and end in table and table[start] <= table[end]

    return [
        f"{arrow}: from {stands(room(arrow.file))} to {stands(room(arrow.target))}; an import may only go down"
        for arrow in repository.arrows
        if goes_up(arrow)
    ]


def in_circles(repository: Repository) -> list[str]:
    def sentence(kind: str, circle: list[str], of: Callable[[str], str]) -> str:
        ends = {each: (of(each.file), of(each.target)) for each in repository.arrows}
        inside = [str(each) for each, (start, end) in ends.items() if start != end and {start, end} <= {*circle}]
        return f"a circle of {kind}, {', '.join(circle)}: {'; '.join(inside)}"

    files = [sentence("files", each, str) for each in file_circles(repository)]
    return files + [sentence("rooms", each, room) for each in circles(room_arrows(repository))]


@pytest.mark.parametrize("package", PACKAGES)
def test_contributing_maps_every_room(package: str) -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    table = re.search(rf"^\| floor \| room in `{package}/` \|.*?\n\|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    rows = [line.split("|")[1:4] for line in table.splitlines()]
    told = {(int(floor), name.strip("/")) for floor, names, _ in rows for name in re.findall(r"`([\w/]+)`", names)}
    assert told == {(floor, name) for floor, names in enumerate(FLOORS[package], 1) for name in names}
    assert all(said.strip() for *_, said in rows)


def test_every_room_has_a_floor(repository: Repository) -> None:
    homeless = {room(file) for file in repository.files} - floors().keys()
    assert sorted(homeless) == [], "rooms without a floor in FLOORS of tests/helpers/structure.py"


def test_no_floor_without_a_room(repository: Repository) -> None:
    assert sorted(floors().keys() - {room(file) for file in repository.files}) == []


def test_imports_only_go_down(repository: Repository) -> None:
    assert upward(repository) == []


def test_no_circle_of_files_or_of_rooms(repository: Repository) -> None:
    assert in_circles(repository) == []


def test_attention_never_imports_convert(repository: Repository) -> None:
    assert [
        str(each)
        for each in repository.imports
        if each.file.startswith("attention/") and each.module.startswith("kvfold.convert")
    ] == []


def test_packages_are_imported_by_their_full_name(repository: Repository) -> None:
    bare = [each for each in repository.imports if each.module.split(".")[0] in (*PACKAGES, "recipes")]
    assert [f"{each}; expected kvfold.{each.module}" for each in bare] == []


def test_transforms_see_tensors_only(repository: Repository) -> None:
    assert [
        str(each)
        for each in repository.imports
        if room(each.file) == "convert/transforms"
        and (each.target is None or room(each.target) != "convert/transforms")
        and each.module.split(".")[0] not in TENSORS
    ] == []


KNOW_TRANSFORMERS = ("deepseek", "drift", "checkpoints", "interface")


def test_attention_needs_torch_alone_but_for_rooms_that_know_transformers(
    repository: Repository,
) -> None:
    assert [
        str(each)
        for each in repository.imports
        if each.file.startswith("attention/")
        and room(each.file).removeprefix("attention/") not in KNOW_TRANSFORMERS
        and each.file != "attention/kernel.py"  # Triton
        and each.target is None
        and each.module.split(".")[0] not in TENSORS
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_few_files_at_the_root_and_none_named_like_the_standard_library(repository: Repository, package: str) -> None:
    files = root_files(repository, package)
    assert len(files) <= ROOT_FILES, files
    names = {file.split("/")[-1].removesuffix(".py") for file in files} - {"__init__", "__main__"}
    assert sorted(names & sys.stdlib_module_names) == []


def test_every_file_is_in_a_package_of_pyproject(repository: Repository) -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"kvfold." + file.rpartition("/")[0].replace("/", ".") for file in repository.files}
    assert sorted(found - {*listed}) == [], "folders that are missing from pyproject.toml's list of packages"
    assert sorted({*listed} - found - {"kvfold.recipes"}) == [], "packages of pyproject.toml without a file"


def test_every_import_is_seen(tmp_path) -> None:
    """Imports inside functions, under TYPE_CHECKING, relative ones and import_module count."""
    sources = {
        "convert/__init__.py": "",
        "convert/errors.py": "def late():\n    from kvfold.convert.checkpoint import shards\n    return shards\n",
        "convert/checkpoint/__init__.py": "",
        "convert/checkpoint/shards.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..errors import late\n",
        "attention/__init__.py": "import importlib as i\ni.import_module('kvfold.convert.checkpoint')\nimport convert",
    }
    for file, text in sources.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    repository = Repository(tmp_path)
    assert [(each.file, each.line, each.target) for each in repository.arrows] == [
        ("attention/__init__.py", 2, "convert/checkpoint/__init__.py"),
        ("convert/checkpoint/shards.py", 3, "convert/errors.py"),
        ("convert/errors.py", 2, "convert/checkpoint/shards.py"),
    ]
    assert [str(each) for each in repository.imports if each.module == "convert"] == [
        "attention/__init__.py:3 imports convert"
    ]
    assert file_circles(repository) == [["convert/checkpoint/shards.py", "convert/errors.py"]]
    assert circles(room_arrows(repository)) == [["convert/checkpoint", "convert/errors"]]
    assert upward(repository) == [
        "attention/__init__.py:2 imports kvfold.convert.checkpoint: from attention/__init__ (floor 9 of attention) to "
        "convert/checkpoint (floor 3 of convert); an import may only go down",
        "convert/errors.py:2 imports kvfold.convert.checkpoint.shards: from convert/errors (floor 1 of convert) to "
        "convert/checkpoint (floor 3 of convert); an import may only go down",
    ]
