"""kvfold.convert: turn a checkpoint into one that needs a smaller key/value cache.

Each ``kvfold`` command but ``chat``, ``demo``, ``push`` and ``recipes`` has a function here; paths
may be strings or path objects.

The names below are loaded on first use, so that importing this package, as ``--help`` does, does
not import torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from kvfold import __version__ as __version__

if TYPE_CHECKING:
    from kvfold.convert.conversion.convert import convert_checkpoint as convert_checkpoint
    from kvfold.convert.conversion.results import Conversion as Conversion
    from kvfold.convert.data import demo_folder as demo_folder
    from kvfold.convert.errors import InputError as InputError
    from kvfold.convert.errors import KvfoldError as KvfoldError
    from kvfold.convert.measure.bench import bench_checkpoints as bench_checkpoints
    from kvfold.convert.measure.drift import drift_checkpoints as drift_checkpoints
    from kvfold.convert.measure.eval import eval_checkpoints as eval_checkpoints
    from kvfold.convert.measure.inspect import Inspection as Inspection
    from kvfold.convert.measure.inspect import inspect_checkpoint as inspect_checkpoint
    from kvfold.convert.measure.sweep import Sweep as Sweep
    from kvfold.convert.measure.sweep import sweep_checkpoint as sweep_checkpoint
    from kvfold.convert.measure.verify import Verification as Verification
    from kvfold.convert.measure.verify import verify_checkpoint as verify_checkpoint
    from kvfold.convert.recipes import recipe_request as recipe_request
    from kvfold.convert.request import BenchRequest as BenchRequest
    from kvfold.convert.request import ConvertRequest as ConvertRequest
    from kvfold.convert.request import DriftRequest as DriftRequest
    from kvfold.convert.request import EvalRequest as EvalRequest
    from kvfold.convert.request import SweepRequest as SweepRequest
    from kvfold.convert.uptrain.uptrain_request import UptrainRequest as UptrainRequest
    from kvfold.convert.uptrain.uptraining import Uptrained as Uptrained
    from kvfold.convert.uptrain.uptraining import uptrain_checkpoint as uptrain_checkpoint

# The imports above are only for type checkers; at run time names are looked up in this table.
_NAMES = {
    "conversion.convert": ("convert_checkpoint",),
    "conversion.results": ("Conversion",),
    "data": ("demo_folder",),
    "errors": ("InputError", "KvfoldError"),
    "measure.bench": ("bench_checkpoints",),
    "measure.drift": ("drift_checkpoints",),
    "measure.eval": ("eval_checkpoints",),
    "measure.inspect": ("Inspection", "inspect_checkpoint"),
    "measure.sweep": ("Sweep", "sweep_checkpoint"),
    "measure.verify": ("Verification", "verify_checkpoint"),
    "recipes": ("recipe_request",),
    "request": ("BenchRequest", "ConvertRequest", "DriftRequest", "EvalRequest", "SweepRequest"),
    "uptrain.uptrain_request": ("UptrainRequest",),
    "uptrain.uptraining": ("Uptrained", "uptrain_checkpoint"),
}
__all__ = sorted(["__version__", *(name for names in _NAMES.values() for name in names)])


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(_import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
