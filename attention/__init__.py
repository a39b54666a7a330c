"""Exact, fast implementations of every attention variant, with caches. Does not import
kvfold.convert.

The names below are loaded on first use, so importing this package does not import torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.attention.cache import KVCache as KVCache
    from kvfold.attention.cache import LatentCache as LatentCache
    from kvfold.attention.cache import cache_bytes as cache_bytes
    from kvfold.attention.cache import cache_numbers as cache_numbers
    from kvfold.attention.checkpoints.registered import register_models as register_models
    from kvfold.attention.deepseek import absorb as absorb
    from kvfold.attention.deepseek import unabsorb as unabsorb
    from kvfold.attention.drift.profile import distance_profile as distance_profile
    from kvfold.attention.drift.profile import row_kl as row_kl
    from kvfold.attention.drift.report import DriftReport as DriftReport
    from kvfold.attention.drift.report import measure_drift as measure_drift
    from kvfold.attention.drift.streams import LayerStream as LayerStream
    from kvfold.attention.grouped import grouped_attention as grouped_attention
    from kvfold.attention.latent import latent_attention as latent_attention
    from kvfold.attention.modeling import GroupedAttention as GroupedAttention
    from kvfold.attention.modeling import LatentAttention as LatentAttention
    from kvfold.attention.rotary import apply_rotary as apply_rotary
    from kvfold.attention.rotary import rotary_frequencies as rotary_frequencies
    from kvfold.attention.rotary import rotary_tables as rotary_tables

_NAMES = {
    "cache": "KVCache LatentCache cache_bytes cache_numbers",
    "checkpoints.registered": "register_models",
    "deepseek": "absorb unabsorb",
    "drift.profile": "distance_profile row_kl",
    "drift.report": "DriftReport measure_drift",
    "drift.streams": "LayerStream",
    "grouped": "grouped_attention",
    "latent": "latent_attention",
    "modeling": "GroupedAttention LatentAttention",
    "rotary": "apply_rotary rotary_frequencies rotary_tables",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
