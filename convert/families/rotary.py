"""The rotary embedding in a config: its parameters in either spelling, and the resulting
frequencies.

transformers 5 writes ``rope_parameters`` (one table, or one per layer type); earlier versions write
``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``. If a config has several of these
keys, the precedence is that of the transformers configs.

Frequencies are computed for rope types that do not depend on the length of the text. The formulas
are RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al. 2023),
LongRoPE (Ding et al. 2024) and the wavelength-based scaling of Llama 3.1; if a paper leaves a
choice, the code follows transformers. It does not import torch, because planning uses this module,
and computes in float64 (transformers uses float32), because configs in layouts MLA and kvfold store
the frequencies as decimal numbers.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from kvfold.convert.errors import InputError
from kvfold.convert.families.values import ConfigValues, evaluate_expression, is_finite_number

Table = Mapping[str, Any]
ContextRange = Literal["short", "long"]
Frequencies = tuple[list[float], float]  # of each pair in radians per position, and the amplitude


def read_rope_parameters(values: ConfigValues, layer_type: str | None = None) -> dict[str, Any]:
    """Return the rope parameters of the layers of ``layer_type`` by the keys of transformers 5,
    ``rope_type`` and ``rope_theta`` among them. The rope type is the one that the model's class
    applies, also where config.json names another. Raises InputError for parameters or a base of
    the wrong type.
    """
    rotary = values.family.rotary
    config = values.config
    # transformers reads rope_scaling first: a file of before transformers 5 that was edited by hand
    # may have both.
    new = read_config_object(config, "rope_parameters")
    old = read_config_object(config, "rope_scaling")
    of_type = rotary.by_type.get(layer_type or "")
    if of_type is None:
        table = {**(old or new or rotary.table)}
        theta = config.get(rotary.keys.get("rope_theta", "rope_theta")) or rotary.theta
        part = config.get(rotary.keys.get("partial_rotary_factor", "partial_rotary_factor"))
        if part is not None:
            table.setdefault("partial_rotary_factor", part)
    else:
        table = {**read_config_object(new, layer_type or ""), **(old if of_type.scaled else {})}
        theta = (of_type.key and config.get(of_type.key)) or of_type.theta
    table.setdefault("rope_theta", theta)
    read_positive_number(table, "rope_theta")
    kind = str(table.get("rope_type") or table.get("type") or "default")
    table["rope_type"] = rotary.renamed.get(kind, kind)
    if table["rope_type"] in ("llama3", "yarn", "longrope"):
        # The class's key wins over the table's.
        original = "original_max_position_embeddings"
        if (positions := config.get(original, rotary.original_positions)) is not None:
            table[original] = positions
        table.setdefault(original, evaluate_expression(values.family.sizes.positions, values))
    return table


def read_config_object(table: Table, key: str) -> Table:
    """The JSON object at ``key``, empty if it is missing or null. Raises InputError for anything
    else.
    """
    value = table.get(key) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {key} must be an object or null, not {value!r}")
    return value


def make_older_rope_keys(config: Table) -> dict[str, Any]:
    """The keys that earlier versions of transformers read (``rope_theta``, ``rope_scaling``), to be
    added to a config that has only ``rope_parameters``.

    Empty if the config has the older spelling, or a table for each layer type. The keys do not
    affect transformers 5.
    """
    table = config.get("rope_parameters") or {}
    older = config.get("rope_theta") is not None or config.get("rope_scaling")
    if older or "rope_theta" not in table:
        return {}
    keys: dict[str, Any] = {"rope_theta": table["rope_theta"]}
    if "partial_rotary_factor" in table and "partial_rotary_factor" not in config:
        keys["partial_rotary_factor"] = table["partial_rotary_factor"]
    kind = table.get("rope_type") or "default"
    if kind != "default":
        scaling = {name: value for name, value in table.items() if name != "rope_theta"}
        keys["rope_scaling"] = {**scaling, "type": kind}
    return keys


def read_positive_number(table: Table, key: str) -> float:
    """The value at ``key`` of a table of rope parameters, as a float. Raises InputError unless it
    is a number above 0.
    """
    value: Any = table.get(key)
    if not is_finite_number(value) or value <= 0:
        raise InputError(
            f"config.json: {key} of the rotary embedding must be a number above 0, not {value!r}"
        )
    return float(value)


def count_rotary_dims(values: ConfigValues) -> int:
    """The number of rotary dims per head, which is the same in every layer that rotates; 0 without
    rotary embedding.
    """
    rotary = values.family.rotary
    # Where some layers rotate and some do not (smollm3), the dims are those of the layers that do.
    if "layer" not in str(rotary.rotates) and not evaluate_expression(rotary.rotates, values):
        return 0
    head_dim: int = evaluate_expression(values.family.sizes.head_dim, values)
    table = read_rope_parameters(values)
    dims = head_dim
    if rotary.dims is not None:
        dims = int(evaluate_expression(rotary.dims, values))
    elif rotary.fraction is not None:
        table.setdefault("partial_rotary_factor", rotary.fraction)
        dims = int(head_dim * read_positive_number(table, "partial_rotary_factor"))
    if dims % 2 or not 0 < dims <= head_dim:
        raise InputError(
            f"config.json: a head has {dims} rotary dims, but the number must be even, above 0 and"
            f" at most its size, {head_dim}; check head_dim and partial_rotary_factor"
        )
    return dims


def compute_frequencies(
    values: ConfigValues, layer_type: str | None, context: ContextRange = "short"
) -> Frequencies:
    """The rotary frequencies of a layer type in radians per position, and the factor that scales
    queries and keys.

    longrope has different frequencies for short and for long texts, which ``context`` selects.
    Raises ``InputError`` for unknown rope types, types without fixed frequencies (dynamic) and
    invalid parameters.
    """
    table = read_rope_parameters(values, layer_type)
    dims = count_rotary_dims(values)
    positions = evaluate_expression(values.family.sizes.positions, values)
    kind = table["rope_type"]
    try:
        theta = [
            read_positive_number(table, "rope_theta") ** (-pair / dims)
            for pair in range(0, dims, 2)
        ]
        match kind:
            case "default":
                return theta, 1.0
            case "linear":
                factor = read_positive_number(table, "factor")
                return [angle / factor for angle in theta], 1.0
            case "llama3":
                return _scale_frequencies_llama3(table, theta), 1.0
            case "yarn":
                theta, amplitude = scale_frequencies_yarn(table, theta, positions)
            case "longrope":
                theta, amplitude = _scale_frequencies_longrope(table, theta, positions, context)
            case _:
                raise ValueError("only default, linear, llama3, yarn and longrope are supported")
        factor_key = values.family.rotary.keys.get("attention_factor", "attention_factor")
        if table.get(factor_key) is not None:
            amplitude = read_positive_number(table, factor_key)
        return theta, amplitude
    # A quotient by 0, a number beyond float64, the logarithm of none.
    except (ArithmeticError, ValueError) as error:
        raise InputError(
            f"config.json: rope_type {kind!r} or its parameters cannot be used ({error}); correct"
            " them"
        ) from None


def _scale_frequencies_llama3(table: Table, theta: list[float]) -> list[float]:
    """The frequencies ``theta`` of Llama 3's rope type: high ones unchanged, low ones divided by
    ``factor``, and a blend in between.
    """
    factor, low, high = (
        read_positive_number(table, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = read_positive_number(table, "original_max_position_embeddings")
    scaled = []
    for angle in theta:
        turns = original * angle / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(angle * (blend + (1 - blend) / factor))
    return scaled


def scale_frequencies_yarn(table: Table, theta: list[float], positions: int) -> Frequencies:
    """The frequencies ``theta`` of YaRN: pairs that turn often unchanged, those that turn rarely
    divided by ``factor``, and a linear blend in between.
    """
    pairs = len(theta)
    base = read_positive_number(table, "rope_theta")
    factor, original = _compute_context_growth(table, positions)
    # beta_fast turns within the original context are enough for a pair to stay, beta_slow too few.
    low, high = (
        pairs * math.log(original / ((table.get(key) or turns) * 2 * math.pi)) / math.log(base)
        for key, turns in (("beta_fast", 32), ("beta_slow", 1))
    )
    if table.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high  # as transformers does, against a division by zero
    shares = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(pairs)]
    scaled = [
        angle * (1 - share + share / factor) for angle, share in zip(theta, shares, strict=True)
    ]
    # The amplitude grows with the logarithm of the context; DeepSeek's two keys scale it, one of
    # them on top.
    growth = 0.1 * math.log(max(factor, 1.0))
    if table.get("mscale") and table.get("mscale_all_dim"):
        of_queries, of_all = (
            read_positive_number(table, key) for key in ("mscale", "mscale_all_dim")
        )
        return scaled, (of_queries * growth + 1.0) / (of_all * growth + 1.0)
    return scaled, growth + 1.0


def _scale_frequencies_longrope(
    table: Table, theta: list[float], positions: int, context: ContextRange
) -> Frequencies:
    """The frequencies ``theta`` of LongRoPE, each divided by its own factor from the config, for
    short or for long texts, and the factor for queries and keys.
    """
    divisors = {}
    for name in ("short", "long"):
        factors: Any = table.get(f"{name}_factor")
        numbers = isinstance(factors, list) and all(map(is_finite_number, factors))
        if not numbers or len(factors) != len(theta):
            raise InputError(
                f"config.json: {name}_factor must be a list of {len(theta)} numbers, one per rotary"
                f" pair, not {str(factors)[:80]}"
            )
        divisors[name] = [float(factor) for factor in factors]
    factor, original = _compute_context_growth(table, positions)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    chosen = zip(theta, divisors[context], strict=True)
    return [angle / divisor for angle, divisor in chosen], amplitude


def _compute_context_growth(table: Table, positions: int) -> tuple[float, float]:
    """The extended context length divided by the original one, and the original one in tokens."""
    original = read_positive_number(table, "original_max_position_embeddings")
    if table.get("factor") is None:
        return positions / original, original
    return read_positive_number(table, "factor"), original
