"""The names that users import: listed, documented, lazy."""

from importlib.metadata import version

import pytest

import kvfold.attention
import kvfold.convert
from kvfold.convert import ConvertRequest, InputError, KvfoldError, errors


@pytest.mark.parametrize(
    "package", [kvfold.convert, kvfold.attention], ids=lambda package: package.__name__
)
def test_public_names_are_listed_and_documented(package):
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert name == "__version__" or getattr(package, name).__doc__, name
    with pytest.raises(
        AttributeError, match=f"module '{package.__name__}' has no attribute 'melt'"
    ):
        _ = package.melt


def test_version():
    assert kvfold.convert.__version__ == version("kvfold")


def test_errors_name_keywords_where_no_command_runs():
    with (
        errors.worded(errors.as_keyword),
        pytest.raises(KvfoldError, match=r"^to='gqa' needs kv_heads, ") as caught,
    ):
        ConvertRequest(model="m", out="o", to="gqa")
    assert type(caught.value) is InputError
