"""Checks that find out why a model cannot become an MLA checkpoint, from its config alone. Does not
import torch.

Each problem is one line: a feature of the model that the layout cannot express, and an option to
use instead. ``problems.json`` lists the features: of the attention, for every MLA layout; beyond
these, for layout ``kvfold``, for the stock classes, and for engines. ``when`` is an expression over
the facts that `_facts` collects (see ``families/values.py``).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_parameters
from kvfold.convert.families.schema import ROLES
from kvfold.convert.families.values import evaluate
from kvfold.convert.targets.mla.spec import MlaSpec, cached_divisors, context_length
from kvfold.convert.targets.same_family import cache_elements

_FEATURES = json.loads(Path(__file__).with_name("problems.json").read_text(encoding="utf-8"))
_FIXED_ROPE = {"default", "linear", "llama3", "yarn", "longrope"}
_EXPERT_ROLES = {"router", "expert_gate", "expert_up", "expert_down"}
_MLP_ROLES = {"gate", "up", "gate_up", "down"}
_NORM_ROLES = {"final_norm", "attention_norm", "mlp_norm"}
_STOCK_ROLES = {"embedding", "head", *ROLES, *_NORM_ROLES, *_MLP_ROLES, *_EXPERT_ROLES}


def latent_problems(model: Model, spec: MlaSpec, *, allow_growth: bool = False) -> list[str]:
    """All reasons why ``model`` cannot be converted to ``spec``, one line each; empty if it can."""
    problems = _own_problems(model) if spec.layout == "kvfold" else model_problems(model)
    if spec.layout == "engine":
        for feature in _list_features(model, "engine"):
            problems.append(f"--layout engine: engines misread {feature}; use --layout free")
    return [*problems, *_size_problems(model, spec, allow_growth)]


def model_problems(model: Model) -> list[str]:
    """All features of the model that the stock MLA classes cannot express at any size, one line
    each.
    """
    kind = model.family.model_type
    if model.tower is not None and not WRAPPERS[kind].any_text:
        return [
            f"--to mla: {kind} has a fixed language model class without an MLA version; use --to"
            " gqa instead"
        ]
    instead = "--to gqa" if _own_problems(model) else "--layout kvfold"
    return [
        f"--to mla: {kind} has {feature}, which the stock MLA class cannot express; use {instead}"
        " instead"
        for feature in _list_features(model, "attention", "stock")
    ]


def _own_problems(model: Model) -> list[str]:
    """Reasons why the model cannot be converted to layout ``kvfold``."""
    kind = model.family.model_type
    features = _list_features(model, "attention", "kvfold")
    if kind not in SOURCES or model.tower is not None:
        features.append("no latent modules in this layout yet")
    return [
        f"--layout kvfold: {kind} has {feature}; use --layout free or --to gqa instead"
        for feature in features
    ]


def _list_features(model: Model, *groups: str) -> list[str]:
    """The features in ``groups`` of ``problems.json`` that ``model`` has."""
    facts = _facts(model)
    return [
        row["feature"].format(**facts)
        for group in groups
        for row in _FEATURES[group]
        if evaluate(row["when"], facts)
    ]


def _facts(model: Model) -> dict[str, Any]:
    layers = model.layers
    norm = model.qk_norm
    context = context_length(model)
    tables = [rope_parameters(model.values, layer.type) for layer in layers]
    sparse = [layer.index for layer in layers if layer.sparse]
    experts = [len(model.names.get(("expert_down", layer), ())) for layer in sparse]
    return {
        **vars(model.block),
        "sinks": model.family.attention.sinks,
        "qk_norm_bias": norm is not None and norm.bias,
        "qk_norm_after_rotary": norm is not None and norm.after_rotary,
        "clip": any(layer.clip is not None for layer in layers),
        "growth": any(layer.growth for layer in layers),
        "softcap": any(layer.softcap is not None for layer in layers),
        "rope_type": rope_parameters(model.values)["rope_type"],
        "other_rope_types": ", ".join({table["rope_type"] for table in tables} - _FIXED_ROPE),
        "rope_tables": sum(table not in tables[:index] for index, table in enumerate(tables)),
        "positions": model.geometry.positions,
        "context": context,
        "layers": len(layers),
        "windows": sum(0 < (layer.window or 0) < context for layer in layers),
        # Whatever the block says: a tensor that the class has no place for would be lost.
        "other_tensors": ", ".join(sorted({role for role, _ in model.names} - _STOCK_ROLES)),
        "dense_behind": sparse != list(range(len(layers)))[-len(sparse) :],
        # The router of the stock class adds up the best two of each group, and there is one group.
        "fewest_experts": min(experts, default=0),
        "wrapper": model.tower is not None,
        "biased": ", ".join(model.biased),
    }


def _size_problems(model: Model, spec: MlaSpec, allow_growth: bool) -> Iterator[str]:
    """Yield reasons why the sizes of ``spec`` are impossible or save nothing."""
    size = model.geometry
    rank = spec.kv_rank
    rope = spec.rope_dim
    # Layout engine has one slot per frequency.
    largest = size.rotary_dims * (1 if spec.layout == "engine" else size.kv_heads)
    smallest = min(2, largest)
    if rope % 2 or not smallest <= spec.used_rope_dim(size.rotary_dims) <= largest:
        rule = f"an even number from {smallest} to {largest}" if largest else "0"
        yield f"--rope-dim {rope} must be {rule}, because heads have {size.rotary_dims} rotary dims"
    if rank < 1 + spec.constant:
        yield f"--kv-rank {rank} must be at least {1 + spec.constant}"
    divisors = cached_divisors(model, spec)
    cache = rank + rope + divisors
    present = cache_elements(size)
    if cache >= present and not allow_growth:
        norms = f" ({divisors} of them for key norms)" if divisors else ""
        yield (
            f"--kv-rank {rank} and --rope-dim {rope} need {cache} elements per token per"
            f" layer{norms}, no fewer than the source's {present}; lower either value, or add"
            " --allow-growth"
        )
