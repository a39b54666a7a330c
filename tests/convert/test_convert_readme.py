"""The package's README: every function that it names is there, and its table has every constant."""

import ast
import re
from importlib import import_module
from pathlib import Path

import kvfold.convert

PACKAGE = Path(kvfold.convert.__file__).parent
TEXT, TABLE = (PACKAGE / "README.md").read_text(encoding="utf-8").split("## Constants")
NUMERIC = (
    ast.Constant,
    ast.Tuple,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Name,
    ast.expr_context,
)


def test_named_functions_exist():
    names = set(re.findall(r"\b(?:transforms|walk|targets|training|text)(?:\.\w+)+", TEXT))
    assert len(names) > 30
    for name in names:
        module, attribute = name.rsplit(".", 1)
        assert callable(getattr(import_module(f"kvfold.convert.{module}"), attribute)), name


def numbers(file: Path) -> set[str]:
    """The names in capitals that a module gives to numbers."""
    assigned = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
    ]
    values = [(node.targets[0], list(ast.walk(node.value))) for node in assigned]
    plain = [
        target
        for target, parts in values
        if all(isinstance(part, NUMERIC) for part in parts)
        and {type(part.value) for part in parts if isinstance(part, ast.Constant)} & {int, float}
    ]
    names = {part.id for target in plain for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if name.isupper()}


def test_the_table_of_constants_is_complete():
    latest = ""
    listed = dict[str, set[str]]()
    for module, names in re.findall(r"^\| (?:`([\w.]+)`)? ?\| (`.+?`) \|", TABLE, re.MULTILINE):
        latest = module or latest
        listed.setdefault(latest, set()).update(re.findall(r"`(\w+)`", names))
    rooms = ["transforms", "walk", "training", "conversion", "text", "uptrain"]
    files = [file for room in rooms for file in (PACKAGE / room).rglob("*.py")] + [
        PACKAGE / "targets/mla/encode.py"
    ]
    found = {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts): numbers(file) for file in files
    }
    assert listed == {module: names for module, names in found.items() if names}
