"""Exact, fast implementations of every attention variant, with caches. Does not import
kvfold.convert.

The names below are loaded on first use, so importing this package does not import torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.attention.cache import KVCache, LatentCache
    from kvfold.attention.checkpoints.registered import register_models
    from kvfold.attention.deepseek import absorb, unabsorb
    from kvfold.attention.drift.report import DriftReport, measure_drift
    from kvfold.attention.grouped import grouped_attention
    from kvfold.attention.latent import latent_attention
    from kvfold.attention.modeling import GroupedAttention, LatentAttention
    from kvfold.attention.rotary import (
        apply_rotary,
        rotary_frequencies,
        rotary_tables,
    )

_MODULES = {
    "DriftReport": "drift.report",
    "GroupedAttention": "modeling",
    "KVCache": "cache",
    "LatentAttention": "modeling",
    "LatentCache": "cache",
    "absorb": "deepseek",
    "apply_rotary": "rotary",
    "grouped_attention": "grouped",
    "latent_attention": "latent",
    "measure_drift": "drift.report",
    "register_models": "checkpoints.registered",
    "rotary_frequencies": "rotary",
    "rotary_tables": "rotary",
    "unabsorb": "deepseek",
}
__all__ = [
    "DriftReport",
    "GroupedAttention",
    "KVCache",
    "LatentAttention",
    "LatentCache",
    "absorb",
    "apply_rotary",
    "grouped_attention",
    "latent_attention",
    "measure_drift",
    "register_models",
    "rotary_frequencies",
    "rotary_tables",
    "unabsorb",
]


def __getattr__(name: str) -> object:
    """Import the public name ``name`` from its module on first use, without importing
    torch before.
    """
    if name in _MODULES:
        return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, so that completion shows them before they are imported."""
    return __all__
