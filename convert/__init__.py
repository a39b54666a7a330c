"""kvfold.convert: turn a checkpoint into one that needs a smaller key/value cache.

Each ``kvfold`` command but ``chat``, ``demo`` and ``recipes`` has a function here, which takes
the command's request; paths may be strings or path objects.

The functions are loaded on first use, so that importing this package, as ``--help`` does, does not
import torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from kvfold import __version__
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.recipes import make_recipe_request
from kvfold.convert.request import (
    BenchRequest,
    ConvertRequest,
    DriftRequest,
    EvalRequest,
    SweepRequest,
)
from kvfold.convert.uptrain.uptrain_request import UptrainRequest

if TYPE_CHECKING:
    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.conversion.results import Conversion
    from kvfold.convert.measure.bench import bench_checkpoints
    from kvfold.convert.measure.drift import drift_checkpoints
    from kvfold.convert.measure.eval import eval_checkpoints
    from kvfold.convert.measure.inspect import Inspection, inspect_checkpoint
    from kvfold.convert.measure.sweep import SweepResult, sweep_checkpoint
    from kvfold.convert.measure.verify import Verification, verify_checkpoint
    from kvfold.convert.uptrain.uptraining import Uptrained, uptrain_checkpoint

__all__ = [
    "BenchRequest",
    "Conversion",
    "ConvertRequest",
    "DriftRequest",
    "EvalRequest",
    "InputError",
    "Inspection",
    "KvfoldError",
    "SweepRequest",
    "SweepResult",
    "UptrainRequest",
    "Uptrained",
    "Verification",
    "__version__",
    "bench_checkpoints",
    "convert_checkpoint",
    "demo_folder",
    "drift_checkpoints",
    "eval_checkpoints",
    "inspect_checkpoint",
    "make_recipe_request",
    "sweep_checkpoint",
    "uptrain_checkpoint",
    "verify_checkpoint",
]
# The modules of names that are imported on first use.
_MODULES = {
    "Conversion": "conversion.results",
    "Inspection": "measure.inspect",
    "SweepResult": "measure.sweep",
    "Uptrained": "uptrain.uptraining",
    "Verification": "measure.verify",
    "bench_checkpoints": "measure.bench",
    "convert_checkpoint": "conversion.convert",
    "drift_checkpoints": "measure.drift",
    "eval_checkpoints": "measure.eval",
    "inspect_checkpoint": "measure.inspect",
    "sweep_checkpoint": "measure.sweep",
    "uptrain_checkpoint": "uptrain.uptraining",
    "verify_checkpoint": "measure.verify",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
