"""kvfold: ``kvfold.convert`` converts checkpoints, ``kvfold.attention`` has the attention that they
compute with.

This folder is the package ``kvfold`` itself: with it, ``python -m kvfold`` does the same as the
command ``kvfold``.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvfold")
except PackageNotFoundError:  # a clone that is on the path, but not installed
    __version__ = "unknown"
