"""The names that users import: listed, documented, lazy."""

from importlib.metadata import version

import pytest
from helpers.processes import run_python

import kvfold.attention
import kvfold.convert
from kvfold.convert import ConvertRequest, InputError, KvfoldError, errors

PACKAGES = (kvfold.convert, kvfold.attention)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_lists_the_public_names_alone(package):
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert name == "__version__" or getattr(package, name).__doc__, name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_name_that_is_none_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'melt'"):
        _ = package.melt


def test_version():
    assert kvfold.convert.__version__ == version("kvfold")


def test_errors_name_keywords_where_no_command_runs():
    with errors.worded(errors.as_keyword), pytest.raises(KvfoldError, match=r"^to='gqa' needs kv_heads, ") as caught:
        ConvertRequest(model="m", out="o", to="gqa")
    assert type(caught.value) is InputError


def test_importing_the_packages_imports_nothing_heavy():
    script = (
        "import sys, kvfold.convert, kvfold.attention; dir(kvfold.convert); dir(kvfold.attention);"
        "kvfold.convert.ConvertRequest; kvfold.convert.InputError; kvfold.convert.inspect_checkpoint;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'click') if name in sys.modules])"
    )
    done = run_python("-c", script)
    assert done.stdout == "[]\n"
