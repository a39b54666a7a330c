"""Targets of a sweep: parse ``--targets``, or choose some for a model. Does not import torch."""

import re
from collections.abc import Sequence
from typing import Any

from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import InputError, option_error, suggest_name
from kvfold.convert.families.model import Model
from kvfold.convert.request import DEFAULT_LAYOUT, TARGETS, Layout
from kvfold.convert.targets.engines import propose_budgets, propose_kernel_splits
from kvfold.convert.targets.same_family import cache_elements

# Share of perplexity that may be lost by default.
WITHIN = 0.01
# The options of a ConvertRequest that name its target.
TargetOptions = dict[str, Any]

# Spellings of targets, and the options that their numbers are.
_FORMS: dict[str, tuple[str, ...]] = {
    "mqa": (),
    r"gqa:(\d{1,9})": ("kv_heads",),
    r"mla:(\d{1,9})": ("budget",),
    r"mla:(\d{1,9})\+(\d{1,9})": ("kv_rank", "rope_dim"),
}
# The largest numbers of key/value heads are tried, and MQA.
_FOLDS = 3
# Elements in the cache of sources from which on kernels' splits are tried: they would save smaller
# ones too little.
_SERVED_FROM = 1024


def parse_targets(words: str | Sequence[str]) -> list[TargetOptions]:
    """Parse text such as ``"gqa:4,2 mqa mla:576,512+64"`` into the options for each target, without
    duplicates.

    Targets are separated by commas or spaces; a bare number belongs to the kind before it.
    ``words`` may also be a list. Raises InputError for an invalid target.
    """
    targets: list[TargetOptions] = []
    kind = ""
    for item in re.split(r"[\s,]+", (words if isinstance(words, str) else " ".join(words)).strip()):
        bare = item[:1].isdigit()
        kind = kind if bare else item.lower().partition(":")[0]
        spelling = f"{kind}:{item}" if bare else item.lower()
        for form, names in _FORMS.items():
            if match := re.fullmatch(form, spelling, re.ASCII):
                options = {"to": kind, **dict(zip(names, map(int, match.groups()), strict=True))}
                targets += [] if options in targets else [options]
                break
        else:
            meant = "" if kind in TARGETS else suggest_name(kind, TARGETS)
            forms = (
                "gqa:HEADS, mqa, mla:ELEMENTS or mla:RANK+ROTARY, such as gqa:4,2 mqa"
                " mla:576,512+64"
            )
            raise option_error("targets", item, f"must be {forms}{meant}")
    return targets


def format_target(options: TargetOptions) -> str:
    """The target with ``options`` in the notation of ``--targets``, such as ``gqa:4``."""
    sizes = "+".join(str(value) for name, value in options.items() if name != "to")
    return f"{options['to']}:{sizes}".rstrip(":")


def default_targets(model: Model, layout: Layout | None) -> list[TargetOptions]:
    """A few GQA targets, MQA, and the MLA targets of `kvfold inspect`: splits for kernels, or parts
    of a small cache.

    MLA is in ``layout``, by default that of a conversion; what it cannot express is left out.
    Raises InputError if the model has no smaller target.
    """
    heads = [count for count in possible_kv_heads(model.geometry) if count > 1]
    targets: list[TargetOptions] = [{"to": "gqa", "kv_heads": count} for count in heads[:_FOLDS]]
    targets += [{"to": "mqa"}] if model.geometry.kv_heads > 1 else []
    kernels = (
        propose_kernel_splits(model, (layout or DEFAULT_LAYOUT,))
        if cache_elements(model.geometry) >= _SERVED_FROM
        else []
    )
    for split in kernels:
        targets.append({"to": "mla", "kv_rank": split.kv_rank, "rope_dim": split.rope_dim})
    if not kernels:
        for split in propose_budgets(model, layout):
            targets.append({"to": "mla", "budget": split.kv_rank + split.rope_dim})
    if not targets:
        raise InputError(
            "GQA, MQA and MLA cannot make this model's cache smaller; `kvfold inspect` lists the"
            " reasons"
        )
    return targets
