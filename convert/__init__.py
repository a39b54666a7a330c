"""kvfold.convert: turn a checkpoint into one that needs a smaller key/value cache.

The names below are loaded on first use, so that importing this package (and every ``--help``) stays free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.convert.conversion.run import convert_checkpoint
    from kvfold.convert.inspection import inspect_checkpoint
    from kvfold.convert.recipes import recipe_request
    from kvfold.convert.request import ConvertRequest

__all__ = ["ConvertRequest", "convert_checkpoint", "inspect_checkpoint", "recipe_request"]

_HOME = {
    "ConvertRequest": "kvfold.convert.request",
    "convert_checkpoint": "kvfold.convert.conversion.run",
    "inspect_checkpoint": "kvfold.convert.inspection",
    "recipe_request": "kvfold.convert.recipes",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
