"""Targets of a sweep: parse ``--targets``, or choose some for a model. Does not import torch."""

import re
from collections.abc import Sequence
from typing import Any

from kvfold.convert.conversion.plan import list_possible_kv_heads
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.families.model import Model
from kvfold.convert.request import DEFAULT_LAYOUT, Layout
from kvfold.convert.targets.engines import (
    describe_mla_model,
    propose_mla_sizes_by_saving,
    propose_mla_sizes_with_kernels,
)
from kvfold.convert.targets.same_family import count_cache_elements

# The options of a ConvertRequest that name its target.
TargetOptions = dict[str, Any]

# The groups are the numbers of the options with these names.
_TARGET = re.compile(
    r"mqa|gqa:(?P<kv_heads>\d{1,9})|mla:(?P<budget>\d{1,9})"
    r"|mla:(?P<kv_rank>\d{1,9})\+(?P<rope_dim>\d{1,9})",
    re.ASCII,
)
# The largest numbers of key/value heads are tried, and MQA.
_FOLDS = 3
# Elements in the cache of sources from which on kernels' splits are tried: they would save smaller
# ones too little.
_SERVED_FROM = 1024


def parse_targets(words: str | Sequence[str]) -> list[TargetOptions]:
    """The conversion options of each target in a text such as ``"gqa:4,2 mqa mla:576,512+64"``,
    without duplicates.

    Targets are separated by commas or spaces; a bare number belongs to the kind before it.
    ``words`` may also be a list. Raises InputError for an invalid target.
    """
    targets: list[TargetOptions] = []
    kind = ""
    text = words if isinstance(words, str) else " ".join(words)
    for item in text.lower().replace(",", " ").split():
        spelling = f"{kind}:{item}" if item[0].isdigit() else item
        kind = spelling.partition(":")[0]
        match = _TARGET.fullmatch(spelling)
        if match is None:
            raise option_error(
                "targets",
                item,
                "must be gqa:HEADS, mqa, mla:ELEMENTS or mla:RANK+ROTARY, such as"
                " gqa:4,2 mqa mla:576,512+64",
            )
        sizes = {name: int(size) for name, size in match.groupdict().items() if size}
        options = {"to": kind, **sizes}
        if options not in targets:
            targets.append(options)
    return targets


def format_target(options: TargetOptions) -> str:
    """The target of these conversion options as ``--targets`` names it, such as ``gqa:4``."""
    kind, *sizes = options.values()
    return f"{kind}:{'+'.join(map(str, sizes))}".rstrip(":")


def propose_default_targets(model: Model, layout: Layout | None) -> list[TargetOptions]:
    """The targets that a sweep tries by default: a few GQA sizes, MQA, and the MLA sizes that
    ``kvfold inspect`` proposes.

    MLA is in ``layout``, by default that of a conversion; what it cannot express is left out.
    Raises InputError if the model has no smaller target.
    """
    heads = [count for count in list_possible_kv_heads(model.geometry) if count > 1]
    targets: list[TargetOptions] = [{"to": "gqa", "kv_heads": count} for count in heads[:_FOLDS]]
    if model.geometry.kv_heads > 1:
        targets.append({"to": "mqa"})
    kernels = []
    if count_cache_elements(model.geometry) >= _SERVED_FROM:
        kernels = propose_mla_sizes_with_kernels(model, (layout or DEFAULT_LAYOUT,))
    targets += [{"to": "mla", "kv_rank": mla.kv_rank, "rope_dim": mla.rope_dim} for mla in kernels]
    if not kernels:
        specs = propose_mla_sizes_by_saving(model, layout)
        budgets = [describe_mla_model(model, mla).count_cache_elements() for mla in specs]
        targets += [{"to": "mla", "budget": budget} for budget in budgets]
    if not targets:
        raise InputError(
            "GQA, MQA and MLA cannot make this model's cache smaller; `kvfold inspect` lists the"
            " reasons"
        )
    return targets
