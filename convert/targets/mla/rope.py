"""The rotary keys of ``config.json`` for given frequencies; without torch."""

import math
from collections.abc import Sequence
from typing import Any


def rope_config(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """The rope keys for these frequencies, in the older and the newer spelling.

    Plain RoPE where it has these frequencies, else ``longrope``: its factors divide the standard frequencies one by
    one, here by the same for every length of text.
    """
    base = plain_base(theta)
    if base is not None:
        return {
            "rope_theta": base,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": base},
        }
    base, pairs = 10000.0, len(theta)
    factors = [base ** (-index / pairs) / angle for index, angle in enumerate(theta)]
    scaling = {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": positions,
    }
    return {
        "rope_theta": base,
        "rope_scaling": {**scaling, "type": "longrope"},
        "rope_parameters": {**scaling, "rope_theta": base},
    }


def plain_base(theta: Sequence[float]) -> float | None:
    """``base`` where ``theta_i = base^(-2i/P)`` for all ``P/2`` of them (to float32's precision), else None."""
    if not math.isclose(theta[0], 1.0, rel_tol=1e-7):
        return None
    base = 10000.0 if len(theta) == 1 else theta[-1] ** (-len(theta) / (len(theta) - 1))
    base = float(round(base)) if math.isclose(base, round(base), rel_tol=1e-6) else base
    plain = (base ** (-index / len(theta)) for index in range(len(theta)))
    return base if all(math.isclose(a, b, rel_tol=3e-7) for a, b in zip(theta, plain, strict=True)) else None
