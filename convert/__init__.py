"""kvfold.convert: turn a checkpoint into one that needs a smaller key/value cache.

Each command of ``kvfold`` has its function here; paths may be strings or path objects.

The names below are loaded on first use, so that importing this package (and every ``--help``) stays free of torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.convert.conversion.run import Conversion, convert_checkpoint
    from kvfold.convert.data import demo_folder
    from kvfold.convert.errors import InputError, KvfoldError
    from kvfold.convert.measure.bench import bench_checkpoints
    from kvfold.convert.measure.drift import drift_checkpoints
    from kvfold.convert.measure.eval import eval_checkpoints
    from kvfold.convert.measure.inspect import Inspection, inspect_checkpoint
    from kvfold.convert.measure.sweep import sweep_checkpoint
    from kvfold.convert.measure.sweep_result import Sweep
    from kvfold.convert.measure.verify import Verification, verify_checkpoint
    from kvfold.convert.recipes import recipe_request
    from kvfold.convert.request import ConvertRequest
    from kvfold.convert.uptrain.request import UptrainRequest
    from kvfold.convert.uptrain.run import Uptrained, uptrain_checkpoint

    __version__: str

__all__ = [
    "Conversion",
    "ConvertRequest",
    "InputError",
    "Inspection",
    "KvfoldError",
    "Sweep",
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
    "recipe_request",
    "sweep_checkpoint",
    "uptrain_checkpoint",
    "verify_checkpoint",
]

_MODULES = {
    "Conversion": "conversion.run",
    "ConvertRequest": "request",
    "InputError": "errors",
    "Inspection": "measure.inspect",
    "KvfoldError": "errors",
    "Sweep": "measure.sweep_result",
    "UptrainRequest": "uptrain.request",
    "Uptrained": "uptrain.run",
    "Verification": "measure.verify",
    "bench_checkpoints": "measure.bench",
    "convert_checkpoint": "conversion.run",
    "demo_folder": "data",
    "drift_checkpoints": "measure.drift",
    "eval_checkpoints": "measure.eval",
    "inspect_checkpoint": "measure.inspect",
    "recipe_request": "recipes",
    "sweep_checkpoint": "measure.sweep",
    "uptrain_checkpoint": "uptrain.run",
    "verify_checkpoint": "measure.verify",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvfold")
    if name in _MODULES:
        return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
