"""The names that users import: listed, documented, lazy."""

from importlib.metadata import version

import pytest

import kvfold
import kvfold.attention
import kvfold.convert


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


def test_the_version_is_that_of_the_package():
    assert kvfold.__version__ == kvfold.convert.__version__ == version("kvfold")
