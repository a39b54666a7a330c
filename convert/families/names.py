"""Names and shapes of a layer's attention tensors in the files, from a family and a config alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.errors import InputError
from kvfold.convert.families.expressions import evaluate

if TYPE_CHECKING:
    from kvfold.convert.families.model import Family, Geometry
    from kvfold.convert.families.schema import Attention, Norm

Role = Literal["q", "k", "v", "o"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


def attention_shapes(family: "Family", config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """File name and shape of every attention tensor of ``layer``."""
    attention, geometry = family.spec.attention, family.geometry(config)
    module = attention.module.replace("{layer}", str(layer))
    shapes: dict[str, tuple[int, ...]] = {}
    for role, name in projections(attention).items():
        outer, inner = _sides(role, geometry)
        shapes[f"{module}.{name}.weight"] = (outer, inner) if attention.storage == "out_in" else (inner, outer)
        if has_bias(family, config, "o" if role == "o" else "q"):
            shapes[f"{module}.{name}.bias"] = (outer,)
    if (norm := active_norm(family, config)) is not None:
        for role, heads in (("q", geometry.heads), ("k", geometry.kv_heads)):
            for name in norm_names(norm, role, heads):
                shapes[f"{module}.{name}.weight"] = _norm_shape(norm, heads, geometry.head_dim)
                if norm.bias:
                    shapes[f"{module}.{name}.bias"] = _norm_shape(norm, heads, geometry.head_dim)
    return shapes


def attention_names(family: "Family", config: Mapping[str, Any], layer: int) -> dict[Role, tuple[str, ...]]:
    """The tensors of the file that hold each role of ``layer``: weight, bias, norm. A fused one appears thrice."""
    attention, geometry = family.spec.attention, family.geometry(config)
    present = attention_shapes(family, config, layer)
    module = attention.module.replace("{layer}", str(layer))
    norm = active_norm(family, config)
    names: dict[Role, tuple[str, ...]] = {}
    for role in ROLES:
        parts = [projections(attention).get(role) or projections(attention)["qkv"]]
        if norm is not None and role in ("q", "k"):
            parts += norm_names(norm, role, geometry.heads if role == "q" else geometry.kv_heads)
        full = [f"{module}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
        names[role] = tuple(name for name in full if name in present)
    return names


def kv_config(family: "Family", config: Mapping[str, Any], kv_heads: int) -> dict[str, int]:
    """The config keys that change for ``kv_heads`` key/value heads, in the spelling that the config uses.

    Raises ``InputError`` when the stock class takes no fewer heads or the number does not divide the query heads.
    """
    geometry = family.geometry(config)
    if not family.accepts_fewer_kv_heads:
        raise InputError(
            f"{family.architecture} has as many key/value heads as query heads; model_type {family.model_type!r} "
            f"cannot have {kv_heads}"
        )
    if kv_heads < 1 or geometry.heads % kv_heads:
        raise InputError(f"kv-heads is {kv_heads}; a divisor of the {geometry.heads} query heads was expected")
    return {family.values(config).spelling(family.spec.sizes.kv_heads): kv_heads}


def projections(attention: "Attention") -> dict[str, str]:
    """Projection names by role; ``qkv`` where the three are one tensor."""
    named = {"q": attention.q, "k": attention.k, "v": attention.v, "qkv": attention.qkv, "o": attention.o}
    return {role: name for role, name in named.items() if name is not None}


def has_bias(family: "Family", config: Mapping[str, Any], role: Role) -> bool:
    attention = family.spec.attention
    return bool(evaluate(attention.o_bias if role == "o" else attention.qkv_bias, family.values(config)))


def active_norm(family: "Family", config: Mapping[str, Any]) -> "Norm | None":
    """The norm on queries and keys, when this config has it."""
    norm = family.spec.attention.norm
    return norm if norm is not None and evaluate(norm.when, family.values(config)) else None


def norm_names(norm: "Norm", role: str, heads: int) -> list[str]:
    name = norm.q if role == "q" else norm.k
    return [name.replace("{head}", str(head)) for head in range(heads)] if norm.extent == "per_head" else [name]


def _norm_shape(norm: "Norm", heads: int, head_dim: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {"head": (heads, head_dim), "flat": (heads * head_dim,)}
    return shapes.get(norm.extent, (head_dim,))


def _sides(role: str, geometry: "Geometry") -> tuple[int, int]:
    queries, keys = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    outer = {"q": queries, "k": keys, "v": keys, "qkv": queries + 2 * keys}
    return (geometry.model_dim, queries) if role == "o" else (outer[role], geometry.model_dim)
