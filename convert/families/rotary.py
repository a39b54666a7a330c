"""The rotary frequencies of a layer, for rope types whose frequencies do not depend on the length of the text.

Formulas: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al. 2023), LongRoPE (Ding et
al. 2024) and Llama 3.1's by wavelength, with the rules of transformers where a paper leaves a choice. They are
computed here because conversions that read no text do without transformers, and in float64: its own functions work in
float32, and the config of an MLA checkpoint stores the frequencies as decimal numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model
from kvfold.convert.families.rope import checked_number, rotary_fraction
from kvfold.convert.transforms.weights import Rotary

Context = Literal["short", "long"]


def layer_rotary(model: Model, layer: int, context: Context | None = None) -> Rotary:
    """The rotary embedding of ``layer``; empty where the layer does not rotate.

    longrope has one set of frequencies for short texts and another for long ones; unless they are equal, ``context``
    must choose one. Raises ``InputError`` for types without fixed frequencies (dynamic) and unknown ones.
    """
    how, geometry = model.layers[layer], model.geometry
    if not how.rotates:
        return Rotary(torch.empty(0, dtype=torch.float64))
    table = model.rope_table(how.type)
    stated = model.family.rotary.dims is not None
    dims = geometry.rotary_dims if stated else int(geometry.head_dim * rotary_fraction(model.values, table))
    pairs = torch.arange(0, dims, 2, dtype=torch.float64)
    theta = checked_number(table, "rope_theta") ** (-pairs / dims)
    kind = table["rope_type"]
    if kind == "default":
        return Rotary(theta)
    if kind == "longrope":
        return _longrope(table, theta, geometry.positions, context)
    if kind not in _SCALED:
        known = ", ".join(["default", *_SCALED, "longrope"])
        raise InputError(f"config.json: rope_type {kind!r} has no fixed frequencies; expected one of {known}")
    return _SCALED[kind](table, theta, geometry.positions)


def _linear(table: Mapping[str, Any], theta: Tensor, positions: int) -> Rotary:
    return Rotary(theta / checked_number(table, "factor"))


def _llama3(table: Mapping[str, Any], theta: Tensor, positions: int) -> Rotary:
    """High frequencies stay, low ones are divided by ``factor``, those between blend by how often they turn."""
    factor, low, high = (checked_number(table, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = checked_number(table, "original_max_position_embeddings") * theta / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return Rotary(theta * (blend + (1 - blend) / factor))


def _yarn(table: Mapping[str, Any], theta: Tensor, positions: int) -> Rotary:
    original, pairs = checked_number(table, "original_max_position_embeddings"), theta.numel()
    factor = positions / original if table.get("factor") is None else checked_number(table, "factor")
    base = checked_number(table, "rope_theta")

    def pair_turning(turns: float) -> float:
        return 2 * pairs * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(table.get("beta_fast") or 32), pair_turning(table.get("beta_slow") or 1)
    if table.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high  # as transformers does, against a division by zero
    interpolated = ((torch.arange(pairs, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return Rotary(theta * (1 - interpolated + interpolated / factor), _yarn_amplitude(table, factor))


def _yarn_amplitude(table: Mapping[str, Any], factor: float) -> float:
    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if table.get("attention_factor") is not None:
        return checked_number(table, "attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return amplitude(checked_number(table, "mscale")) / amplitude(checked_number(table, "mscale_all_dim"))
    return amplitude(1.0)


def _longrope(table: Mapping[str, Any], theta: Tensor, positions: int, context: Context | None) -> Rotary:
    factors = {name: _factors(table, f"{name}_factor", theta.numel()) for name in ("short", "long")}
    if context is None and not torch.equal(factors["short"], factors["long"]):
        raise InputError(
            "config.json: rope_type 'longrope' has different frequencies for texts up to "
            f"{table['original_max_position_embeddings']} tokens and for longer ones; expected equal short_factor and "
            "long_factor, or a choice of one of them"
        )
    original = checked_number(table, "original_max_position_embeddings")
    factor = positions / original if table.get("factor") is None else checked_number(table, "factor")
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if table.get("attention_factor") is not None:
        amplitude = checked_number(table, "attention_factor")
    return Rotary(theta / factors[context or "short"], amplitude)


def _factors(table: Mapping[str, Any], key: str, pairs: int) -> Tensor:
    factors = table.get(key)
    if (
        not isinstance(factors, list)
        or len(factors) != pairs
        or not all(isinstance(item, int | float) for item in factors)
    ):
        shown = len(factors) if isinstance(factors, list) else factors
        raise InputError(f"config.json: {key} must be a list of {pairs} numbers, one per rotary pair, found {shown!r}")
    return torch.tensor(factors, dtype=torch.float64)


_SCALED: dict[str, Callable[[Mapping[str, Any], Tensor, int], Rotary]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
