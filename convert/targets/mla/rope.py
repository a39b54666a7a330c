"""The rotary keys of ``config.json`` for given frequencies; without torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_BASE = 10000.0  # of longrope's tables


def rope_config(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """``rope_parameters`` for these frequencies: plain RoPE where it has them, else ``longrope``."""
    base = plain_base(theta)
    return {"rope_parameters": _longrope(theta, positions) if base is None else _plain(base)}


def part_of_head(theta: Sequence[float], positions: int, head_dim: int) -> dict[str, Any]:
    """The same for a reader that rotates the fraction ``partial_rotary_factor`` of ``head_dim`` dims, rounded down."""
    part = _part(2 * len(theta), head_dim)
    return {"rope_parameters": {**_longrope(theta, positions), "partial_rotary_factor": part}}


def engine_rope(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """Plain RoPE as DeepSeek's YaRN of factor 1, which changes no frequency and no scale.

    In the newer spelling and in that of transformers before 5, which engines have read longer. YaRN is the way of
    DeepSeek-V3 itself; for plain interleaved RoPE vLLM 0.32 has a kernel on CPUs that rotates several heads wrongly.
    """
    table = _scaled(theta, positions)
    scaling = {name: value for name, value in table.items() if name != "rope_theta"}
    return {
        "rope_theta": table["rope_theta"],
        "rope_scaling": {**scaling, "type": table["rope_type"]},
        "rope_parameters": table,
    }


def expert_rope(theta: Sequence[float], positions: int, rope_dim: int, head_dim: int) -> dict[str, Any]:
    """For Mistral4, which rotates ``rope_dim`` of ``head_dim`` dims, but not by plain RoPE; it scales no queries."""
    table = _scaled(theta, positions)
    return {
        "rope_parameters": {**table, "partial_rotary_factor": _part(rope_dim, head_dim), "llama_4_scaling_beta": 0.0}
    }


def changes_no_frequency(table: Mapping[str, Any]) -> bool:
    """Whether ``table`` is plain RoPE, under its own name or as ``engine_rope`` writes it."""
    kind = table.get("rope_type", "default")
    return kind == "default" or (kind == "yarn" and table.get("factor") == 1.0)


def _part(rope_dim: int, head_dim: int) -> float:
    """The fraction of ``head_dim`` that readers round down to ``rope_dim``."""
    return (rope_dim + 0.5) / head_dim


def _plain(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def _scaled(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """YaRN of factor 1 where ``theta`` is plain RoPE, else longrope."""
    base = plain_base(theta)
    return _longrope(theta, positions) if base is None else _yarn(base, positions)


def _yarn(base: float, positions: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": 1.0,
        "original_max_position_embeddings": positions,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _longrope(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """Its factors divide the standard frequencies one by one, here by the same for every length of text."""
    factors = [_BASE ** (-index / len(theta)) / angle for index, angle in enumerate(theta)]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": positions,
        "rope_theta": _BASE,
    }


def plain_base(theta: Sequence[float]) -> float | None:
    """``base`` where ``theta_i = base^(-2i/P)`` for all ``P/2`` of them (to float32's precision), else None."""
    if not math.isclose(theta[0], 1.0, rel_tol=1e-7):
        return None
    base = 10000.0 if len(theta) == 1 else theta[-1] ** (-len(theta) / (len(theta) - 1))
    base = float(round(base)) if math.isclose(base, round(base), rel_tol=1e-6) else base
    plain = (base ** (-index / len(theta)) for index in range(len(theta)))
    return base if all(math.isclose(a, b, rel_tol=3e-7) for a, b in zip(theta, plain, strict=True)) else None
