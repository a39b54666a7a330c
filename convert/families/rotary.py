"""The rotary frequencies of a layer, for rope types whose frequencies do not depend on the length of the text.

Formulas: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al. 2023), LongRoPE (Ding et
al. 2024) and Llama 3.1's by wavelength, with the rules of transformers where a paper leaves a choice. They are
computed here because conversions that read no text do without transformers, and a plan without torch; and in float64:
transformers' own functions work in float32, and configs of layouts MLA and kvfold store the frequencies as decimal
numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model
from kvfold.convert.families.rope import checked_number, rotary_fraction

if TYPE_CHECKING:
    from kvfold.convert.transforms.weights import Rotary

Context = Literal["short", "long"]
Frequencies = tuple[list[float], float]  # of each pair, and the amplitude


def layer_rotary(model: Model, layer: int, context: Context | None = None) -> "Rotary":
    """The rotary embedding of ``layer``; empty where the layer does not rotate. As ``layer_frequencies``."""
    import torch

    from kvfold.convert.transforms.weights import Rotary

    theta, amplitude = layer_frequencies(model, layer, context)
    return Rotary(torch.tensor(theta, dtype=torch.float64), amplitude)


def layer_frequencies(model: Model, layer: int, context: Context | None = None) -> Frequencies:
    """The angle of each pair of ``layer`` per position, none where it does not rotate, and what multiplies both sides.

    longrope has one set of frequencies for short texts and another for long ones; unless they are equal, ``context``
    must choose one. Raises ``InputError`` for types without fixed frequencies (dynamic), unknown ones, and numbers that
    give none.
    """
    how, geometry, positions = model.layers[layer], model.geometry, model.geometry.positions
    if not how.rotates:
        return [], 1.0
    table = model.rope_table(how.type)
    stated = model.family.rotary.dims is not None
    dims = geometry.rotary_dims if stated else int(geometry.head_dim * rotary_fraction(model.values, table))
    kind = table["rope_type"]
    try:
        theta = [checked_number(table, "rope_theta") ** (-pair / dims) for pair in range(0, dims, 2)]
        if kind == "default":
            return theta, 1.0
        if kind == "longrope":
            return _longrope(table, theta, positions, context)
        if kind in _SCALED:
            return _SCALED[kind](table, theta, positions)
    except (ArithmeticError, ValueError) as error:  # a quotient by 0, a number beyond float64, the logarithm of none
        raise InputError(f"config.json: the numbers of rope_type {kind!r} give no frequencies: {error}") from None
    known = ", ".join(["default", *_SCALED, "longrope"])
    raise InputError(f"config.json: rope_type {kind!r} has no fixed frequencies; expected one of {known}")


def _linear(table: Mapping[str, Any], theta: list[float], positions: int) -> Frequencies:
    factor = checked_number(table, "factor")
    return [angle / factor for angle in theta], 1.0


def _llama3(table: Mapping[str, Any], theta: list[float], positions: int) -> Frequencies:
    """High frequencies stay, low ones are divided by ``factor``, those between blend by how often they turn."""
    factor, low, high = (checked_number(table, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = checked_number(table, "original_max_position_embeddings")
    blends = [_clamped((original * angle / (2 * math.pi) - low) / (high - low)) for angle in theta]
    return [angle * (blend + (1 - blend) / factor) for angle, blend in zip(theta, blends, strict=True)], 1.0


def _clamped(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _yarn(table: Mapping[str, Any], theta: list[float], positions: int) -> Frequencies:
    original, pairs = checked_number(table, "original_max_position_embeddings"), len(theta)
    factor = positions / original if table.get("factor") is None else checked_number(table, "factor")
    base = checked_number(table, "rope_theta")

    def pair_turning(turns: float) -> float:
        return 2 * pairs * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(table.get("beta_fast") or 32), pair_turning(table.get("beta_slow") or 1)
    if table.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high  # as transformers does, against a division by zero
    shares = [_clamped((pair - low) / (high - low)) for pair in range(pairs)]
    scaled = [angle * (1 - share + share / factor) for angle, share in zip(theta, shares, strict=True)]
    return scaled, _yarn_amplitude(table, factor)


def _yarn_amplitude(table: Mapping[str, Any], factor: float) -> float:
    def amplitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if table.get("attention_factor") is not None:
        return checked_number(table, "attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return amplitude(checked_number(table, "mscale")) / amplitude(checked_number(table, "mscale_all_dim"))
    return amplitude(1.0)


def _longrope(table: Mapping[str, Any], theta: list[float], positions: int, context: Context | None) -> Frequencies:
    factors = {name: _factors(table, f"{name}_factor", len(theta)) for name in ("short", "long")}
    if context is None and factors["short"] != factors["long"]:
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
    return [angle / by for angle, by in zip(theta, factors[context or "short"], strict=True)], amplitude


def _factors(table: Mapping[str, Any], key: str, pairs: int) -> list[float]:
    factors = table.get(key)
    if (
        not isinstance(factors, list)
        or len(factors) != pairs
        or not all(isinstance(item, int | float) for item in factors)
    ):
        shown = len(factors) if isinstance(factors, list) else factors
        raise InputError(f"config.json: {key} must be a list of {pairs} numbers, one per rotary pair, found {shown!r}")
    return [float(factor) for factor in factors]


_SCALED: dict[str, Callable[[Mapping[str, Any], list[float], int], Frequencies]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
