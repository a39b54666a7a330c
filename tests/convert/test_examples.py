"""The examples in the docstrings of what ``kvfold.convert`` exports, run as they stand."""

import doctest

import pytest

import kvfold.convert

FUNCTIONS = [name for name in kvfold.convert.__all__ if name.endswith(("_checkpoint", "_checkpoints", "_request"))]
QUICK = ("ConvertRequest", "UptrainRequest", "demo_folder", "inspect_checkpoint", "recipe_request", "verify_checkpoint")
SLOW = [name for name in FUNCTIONS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_example(name, tmp_path):
    exported = {each: getattr(kvfold.convert, each) for each in kvfold.convert.__all__}
    found = doctest.DocTestFinder(recurse=False).find(exported[name], name, globs=exported | {"folder": tmp_path})
    assert found[0].examples, f"{name} has no example"
    told: list[str] = []
    result = doctest.DocTestRunner().run(found[0], out=told.append)
    assert result.failed == 0, "".join(told)
