"""The page on the method: every function that it names is there."""

import re
from importlib import import_module
from pathlib import Path

import kvfold.convert

PAGE = Path(kvfold.convert.__file__).parent / "README.md"


def test_named_functions_exist():
    text = PAGE.read_text(encoding="utf-8")
    rooms = "transforms|walk|targets|training|text|methods|conversion|device"
    names = set(re.findall(rf"\b(?:{rooms})(?:\.\w+)+", text))
    assert len(names) > 30
    for name in names:
        module, attribute = name.rsplit(".", 1)
        assert callable(getattr(import_module(f"kvfold.convert.{module}"), attribute)), name
