"""The targets of a sweep: as ``--targets`` spells them, and the default ones of a model. No torch here."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import ALONE, InputError, as_option, did_you_mean, opt, worded
from kvfold.convert.families.model import Model
from kvfold.convert.request import TARGETS, Layout
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems, model_problems
from kvfold.convert.targets.same_family import cache_elements

# Share of perplexity that may be lost by default.
WITHIN = 0.01
# The options of a ConvertRequest that name its target.
TargetOptions = dict[str, Any]

_WORDS = {"kv_heads": "heads", "kv_rank": "channels", "rope_dim": "rotary dims", "budget": "elements"}
_SIZE = re.compile(r"(\d{1,9})(?:\+(\d{1,9}))?")
# The largest numbers of key/value heads are tried, and MQA.
_FOLDS = 3
_SERVED = ((512, 64), (256, 64))  # splits that MLA kernels are written for ...
_SERVED_FROM = 1024  # ... for sources that cache at least as many elements: they would save smaller ones too little
_PARTS = (4, 8)  # divisors of smaller caches


def parse_targets(words: str | Sequence[str]) -> list[TargetOptions]:
    """``"gqa:4,2 mqa mla:576,512+64"`` as the options of one request each, without repetitions.

    Commas or blanks separate; a bare number belongs to the kind before it. ``words`` may be a list too. Raises
    InputError.
    """
    targets: list[TargetOptions] = []
    kind: str | None = None
    for item in re.split(r"[\s,]+", (words if isinstance(words, str) else " ".join(words)).strip()):
        name, colon, size = item.partition(":")
        if colon or not _SIZE.fullmatch(item):
            kind = name.lower()
        else:
            size = item
        options = _options(kind, size, item)
        if options not in targets:
            targets.append(options)
    return targets


def _options(kind: str | None, size: str, item: str) -> TargetOptions:
    number = _SIZE.fullmatch(size)
    match kind:
        case "mqa" if not size:
            return {"to": "mqa"}
        case "gqa" if number and number[2] is None:
            return {"to": "gqa", "kv_heads": int(number[1])}
        case "mla" if number and number[2] is None:
            return {"to": "mla", "budget": int(number[1])}
        case "mla" if number:
            return {"to": "mla", "kv_rank": int(number[1]), "rope_dim": int(number[2])}
    meant = "" if kind in TARGETS else did_you_mean(kind, TARGETS)
    raise InputError(
        f"{opt('targets')}: expected gqa:HEADS, mqa, mla:ELEMENTS or mla:RANK+ROTARY, such as gqa:4,2 mqa "
        "mla:576,512+64, "
        f"found {item!r}{meant}"
    )


@contextmanager
def worded_as_targets() -> Iterator[None]:
    """Errors of conversions in the block say "4 heads" for ``--kv-heads 4``: a sweep has targets, not options."""

    def wording(field: str, value: Any = ALONE) -> str | None:
        if field == "allow_growth":
            # A sweep has no such option.
            return f"`kvfold convert {as_option(field)}`"
        if field not in _WORDS:
            return None
        return _WORDS[field] if value is ALONE else f"{value} {_WORDS[field]}"

    with worded(wording):
        yield


def spelled(options: TargetOptions) -> str:
    """The target of ``options`` as ``--targets`` spells it."""
    match options:
        case {"to": "gqa", "kv_heads": heads}:
            return f"gqa:{heads}"
        case {"to": "mla", "budget": budget}:
            return f"mla:{budget}"
        case {"to": "mla", "kv_rank": rank, "rope_dim": rope}:
            return f"mla:{rank}+{rope}"
    return str(options["to"])


def default_targets(model: Model, layout: Layout) -> list[TargetOptions]:
    """A few folds, and latents of the sizes that kernels take or of parts of a small cache, largest cache first.

    Raises InputError for a model that nothing can be made of.
    """
    heads = [count for count in possible_kv_heads(model.geometry) if count > 1]
    targets: list[TargetOptions] = [{"to": "gqa", "kv_heads": count} for count in heads[:_FOLDS]]
    targets += [{"to": "mqa"}] if model.geometry.kv_heads > 1 else []
    present = cache_elements(model.geometry)
    if model_problems(model):
        pass
    elif present < _SERVED_FROM:
        targets += [{"to": "mla", "budget": present // part} for part in _PARTS if present // part >= 4]
    else:
        targets += [
            {"to": "mla", "kv_rank": rank, "rope_dim": rope}
            for rank, rope in _SERVED
            if not latent_problems(model, LatentTarget(rank, rope, layout=layout))
        ]
    if not targets:
        raise InputError(
            "expected a model that GQA, MQA or MLA could be made of, found one whose cache cannot shrink: "
            "`kvfold inspect` says why"
        )
    return targets
