"""``kvfold.json`` as text: short enough to read, and no value other than it was."""

import json

import pytest

from kvfold.convert.io.config import dump_record


@pytest.mark.parametrize(
    "value",
    [
        {"text": "[ x ]", "more": "{  y,   z }", "lines": "[\n  a\n ]", "quoted": '"[ b ]"'},
        {"list": ["[ x ]", "{ y }"], "nested": [[1, 2], [], {}, [{"a": None}]], "empty": {}},
        {"[ key ]": {"é": 1.5, "deep": {"er": [True, False]}}},
        {},
    ],
)
def test_values_stay_what_they_were(value):
    assert json.loads(dump_record(value)) == value


def test_innermost_lists_and_objects_take_one_line():
    long = ["x" * 40, "y" * 40, "z" * 40]
    text = dump_record({"a": {"b": [1, 2], "c": {"d": "[ e ]", "f": 2}}, "long": long, "none": []})
    assert text.splitlines() == [
        "{",
        ' "a": {',
        '  "b": [1, 2],',
        '  "c": {"d": "[ e ]", "f": 2}',
        " },",
        ' "long": [',
        *(f'  "{item}"{comma}' for item, comma in zip(long, (",", ",", ""), strict=True)),
        " ],",
        ' "none": []',
        "}",
    ]
