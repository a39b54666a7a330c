"""The sizes of latent attention (MLA) in a converted model, and the reasons why a model cannot be
converted to MLA. Does not import torch.

``shapes.json`` has the attention tensors of the stock classes and of layout ``kvfold``: their
shapes and conditions are expressions (see ``families/values.py``) over the sizes of the source and
the spec. Norms that are kept in layout ``kvfold`` act on whole queries, so the rotary part of a
query is there a map of the normalized query. The file also has the sizes that vLLM's MLA kernels
take: cached elements R + P, and dims of a head (unrotated, rotary, value).

``problems.json`` lists the features that layouts cannot express: of the attention, for every MLA
layout; beyond these, for layout ``kvfold``, for the stock classes, and for engines. ``when`` is an
expression over the facts that `_collect_condition_values` collects. Each problem of a model is one
line: such a feature, and an option to use instead.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.errors import list_some
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import read_rope_parameters
from kvfold.convert.families.values import evaluate_expression
from kvfold.convert.request import Layout
from kvfold.convert.targets.same_family import count_cache_elements

ATTENTION = "model.layers.{layer}.self_attn"  # of all three classes
EXPERT_TYPE = "mistral4"
_FOLDER = Path(__file__).parent
SHAPES = json.loads((_FOLDER / "shapes.json").read_text(encoding="utf-8"))
KERNEL_CACHES: list[int] = SHAPES["kernels"]["caches"]
KERNEL_HEADS = [tuple(heads) for heads in SHAPES["kernels"]["heads"]]
_FEATURES = json.loads((_FOLDER / "problems.json").read_text(encoding="utf-8"))


def is_mla_config(config: Mapping[str, Any]) -> bool:
    """True if ``config`` (config.json) is that of a model with latent attention (MLA)."""
    return (
        config.get("model_type") in ("deepseek_v2", "deepseek_v3", "youtu", EXPERT_TYPE)
        and config.get("use_mla") is not False
    )


@dataclass(frozen=True)
class MlaSpec:
    """The sizes of latent attention (MLA) and the layout in which it is stored.

    kv_rank: cached latent channels R per token and layer, as in ``--kv-rank``; the constant channel
        of layout ``free`` is included here, but not in the R of ``transforms/``
    rope_dim: dims P of the cached rotary key
    layout: where the model is stored (`layout`, `custom_code`)
    """

    kv_rank: int
    rope_dim: int
    layout: Layout = "free"

    @property
    def has_constant_channel(self) -> bool:
        """True if the last latent channel holds a constant instead of data, as in layout
        ``free``.
        """
        return self.layout == "free"

    @property
    def has_kernels(self) -> bool:
        """True if the MLA kernels of inference engines support this size of the cache and of the
        rotary key.
        """
        return (
            self.rope_dim in {rope for _, rope, _ in KERNEL_HEADS}
            and self.kv_rank + self.rope_dim in KERNEL_CACHES
        )

    def choose_head_dims(self, dim: int) -> tuple[int, int]:
        """Return the unrotated dims and the value dims of a stored head for a source with head size
        ``dim``; both are at least ``dim``.

        Both are ``dim``, except that layout ``engine`` pads heads with zeros to the smallest sizes
        that MLA kernels support. The zeros do not change the result: the scale of the scores is
        part of the queries, and the cache contains no heads.
        """
        sizes = [
            (nope, value)
            for nope, rope, value in KERNEL_HEADS
            if rope == self.rope_dim and min(nope, value) >= dim
        ]
        if self.layout != "engine" or not self.has_kernels:
            return dim, dim
        return min(sizes, key=sum, default=(dim, dim))

    def count_used_rope_dims(self, rotary_dims: int) -> int:
        """Return how many of the stored rotary dims hold keys; layout ``engine`` may fill the
        others with zeros. ``rotary_dims`` are those of a source head.
        """
        padded = self.layout == "engine" and self.has_kernels and rotary_dims > 0
        return rotary_dims if padded and self.rope_dim % rotary_dims == 0 else self.rope_dim


def count_cached_divisors(model: Model, spec: MlaSpec) -> int:
    """Return how many KV-cache elements per token per layer store divisors of key norms, in
    addition to latent and rotary key; 0 unless layout ``kvfold`` keeps these norms.
    """
    if model.qk_norm is None or spec.layout != "kvfold":
        return 0  # stock classes have linear maps in place of the norms
    # One per key/value head, or one for a norm over all heads.
    return 1 if model.qk_norm.extent == "flat" else model.geometry.kv_heads


def compute_query_rank(model: Model, spec: MlaSpec) -> int | None:
    """Return ``q_lora_rank`` of the output, the constant channel included, or None if its queries
    have no latent.

    Stock classes can store a query bias only in a query latent, so a bias forces one of full rank.
    """
    if spec.layout == "kvfold" or "q" not in model.biased:
        return None
    size = model.geometry
    return (
        min(size.model_dim, size.heads * (size.head_dim + spec.rope_dim))
        + spec.has_constant_channel
    )


def collect_mla_sizes(model: Model, spec: MlaSpec) -> dict[str, Any]:
    """Return the sizes of ``model`` converted to MLA with ``spec``, by the names that the
    expressions in ``shapes.json`` and ``classes.json`` use.
    """
    nope, value = spec.choose_head_dims(model.geometry.head_dim)
    return {
        **vars(model.geometry),
        **vars(spec),
        "constant": spec.has_constant_channel,
        "nope_dim": nope,
        "value_dim": value,
        "q_rank": compute_query_rank(model, spec),
        "biased": "q" in model.biased,
        "normed": model.qk_norm is not None,
    }


def list_mla_problems(model: Model, spec: MlaSpec, *, allow_growth: bool = False) -> list[str]:
    """Return one message for each reason why ``model`` cannot be converted to MLA with ``spec``; an
    empty list if it can.
    """
    problems = (
        _list_custom_problems(model) if spec.layout == "kvfold" else list_stock_problems(model)
    )
    if spec.layout == "engine":
        for feature in _list_unsupported_features(model, "engine"):
            problems.append(
                f"--layout engine: engines misread {feature}; use --layout free (transformers,"
                " vLLM's Transformers backend) or --to gqa (all engines of the source)"
            )
    return [*problems, *_list_size_problems(model, spec, allow_growth)]


def choose_mla_layout(model: Model) -> Layout:
    """Return the layout of an MLA result if the user names none: ``kvfold`` where it can hold
    ``model`` and no stock class can, otherwise ``free``.
    """
    return "kvfold" if list_stock_problems(model) and not _list_custom_problems(model) else "free"


def list_stock_problems(model: Model) -> list[str]:
    """Return one message with the features of ``model`` that the stock MLA classes cannot express,
    whatever the sizes; an empty list if there are none.
    """
    kind = model.family.model_type
    if model.tower is not None and not WRAPPERS[kind].any_text:
        return [
            f"--to mla: {kind} has a fixed language model class without an MLA version; use --to"
            " gqa instead"
        ]
    features = list_stock_limits(model)
    if not features:
        return []
    instead = "--to gqa" if _list_custom_problems(model) else "--layout kvfold"
    return [
        f"no stock MLA class can express what {kind} has: {list_some(features)}; use {instead}"
        " instead"
    ]


def list_stock_limits(model: Model) -> list[str]:
    """Return the features of ``model`` that the stock MLA classes cannot express. Where a shorter
    context alone removes all of them, the last one names it.
    """
    features = _list_unsupported_features(model, "attention", "stock")
    facts = _collect_condition_values(model)
    contexts = [facts[row["context"]] for row in _FEATURES["stock"] if "context" in row]
    contexts = [length for length in contexts if length]
    if features and len(contexts) == len(features):
        features[-1] += f" (--context {min(contexts)} removes the reason)"
    return features


def _list_custom_problems(model: Model) -> list[str]:
    """Return one message for each feature of ``model`` that prevents a conversion to MLA in layout
    ``kvfold``.
    """
    kind = model.family.model_type
    features = _list_unsupported_features(model, "attention")
    if kind not in SOURCES or model.tower is not None:
        features.append("no latent modules in this layout yet")
    return [
        f"--layout kvfold: {kind} has {feature}; use --layout free or --to gqa instead"
        for feature in features
    ]


def _list_unsupported_features(model: Model, *groups: str) -> list[str]:
    """Return the features of ``model`` that an MLA layout cannot express, from the given ``groups``
    of ``problems.json``.
    """
    facts = _collect_condition_values(model)
    return [
        row["feature"].format(**facts)
        for group in groups
        for row in _FEATURES[group]
        if evaluate_expression(row["when"], facts)
    ]


def _collect_condition_values(model: Model) -> dict[str, Any]:
    """Return the properties of ``model`` by the names that the conditions in ``problems.json`` use,
    such as clipping, soft caps and attention windows.
    """
    layers = model.layers
    norm = model.qk_norm
    positions = model.geometry.positions
    windows = [layer.window for layer in layers if layer.window and layer.window < positions]
    tables = [read_rope_parameters(model.values, layer.type) for layer in layers]
    rope_types = {table["rope_type"] for table in tables}
    roles = {role for role, _ in model.names_by_role}
    sparse = [layer.index for layer in layers if layer.sparse]
    experts = [len(model.list_names("expert_down", layer)) for layer in sparse]
    return {
        **vars(model.block),
        "sinks": model.family.attention.sinks,
        "qk_norm_bias": norm is not None and norm.bias,
        "qk_norm_after_rotary": norm is not None and norm.after_rotary,
        "clip": any(layer.clip is not None for layer in layers),
        "growth": any(layer.growth for layer in layers),
        "softcap": any(layer.softcap is not None for layer in layers),
        "rope_type": read_rope_parameters(model.values)["rope_type"],
        "other_rope_types": ", ".join(rope_types.difference(_FEATURES["rope_types"])),
        "rope_tables": sum(table not in tables[:index] for index, table in enumerate(tables)),
        "positions": positions,
        "short_context": model.short_context,
        "layers": len(layers),
        "windows": len(windows),
        "shortest_window": min(windows, default=0),
        # Whatever the block says: a tensor that the class has no place for would be lost.
        "other_tensors": ", ".join(sorted(roles.difference(_FEATURES["stock_roles"]))),
        "dense_behind": sparse != list(range(len(layers)))[-len(sparse) :],
        # The router of the stock class adds up the best two of each group, and there is one group.
        "fewest_experts": min(experts, default=0),
        "wrapper": model.tower is not None,
        "biased": ", ".join(model.biased),
    }


def _list_size_problems(model: Model, spec: MlaSpec, allow_growth: bool) -> Iterator[str]:
    """Yield one message for each size of ``spec`` that is impossible for ``model``, or that makes
    the cache no smaller.
    """
    size = model.geometry
    rank = spec.kv_rank
    rope = spec.rope_dim
    # Layout engine has one slot per frequency.
    largest = size.rotary_dims * (1 if spec.layout == "engine" else size.kv_heads)
    smallest = min(2, largest)
    if rope % 2 or not smallest <= spec.count_used_rope_dims(size.rotary_dims) <= largest:
        rule = f"an even number from {smallest} to {largest}" if largest else "0"
        yield f"--rope-dim {rope} must be {rule}, because heads have {size.rotary_dims} rotary dims"
    if rank < 1 + spec.has_constant_channel:
        yield f"--kv-rank {rank} must be at least {1 + spec.has_constant_channel}"
    cache = rank + rope + count_cached_divisors(model, spec)
    present = count_cache_elements(size)
    if cache >= present and not allow_growth:
        yield (
            f"--kv-rank {rank} and --rope-dim {rope} need {cache} elements per token per"
            f" layer, no fewer than the source's {present}; lower either value, or add"
            " --allow-growth"
        )
