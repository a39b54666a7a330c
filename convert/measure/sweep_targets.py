"""What ``--targets`` spells, as options of conversions. Nothing heavy is imported."""

import re
from collections.abc import Sequence
from typing import Any

from kvfold.convert.errors import InputError, did_you_mean
from kvfold.convert.request import TARGETS

WITHIN = 0.01  # of the perplexity, where nobody said otherwise
Options = dict[str, Any]  # of a ConvertRequest: those that name a target

_WORDS = {"--kv-heads": "heads", "--kv-rank": "channels", "--rope-dim": "rotary dims", "--budget": "elements"}
_SIZE = re.compile(r"(\d{1,9})(?:\+(\d{1,9}))?")


def parse_targets(words: str | Sequence[str]) -> list[Options]:
    """``"gqa:4,2 mqa mla:576,512+64"`` as the options of one request each, without repetitions.

    Commas or blanks separate; a bare number belongs to the kind before it. ``words`` may be a list too. Raises
    InputError.
    """
    found: list[Options] = []
    kind: str | None = None
    for item in re.split(r"[\s,]+", (words if isinstance(words, str) else " ".join(words)).strip()):
        name, colon, size = item.partition(":")
        if colon or not _SIZE.fullmatch(item):
            kind = name.lower()
        else:
            size = item
        options = _options(kind, size, item)
        if options not in found:
            found.append(options)
    return found


def _options(kind: str | None, size: str, item: str) -> Options:
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
        f"--targets: expected gqa:HEADS, mqa, mla:ELEMENTS or mla:RANK+ROTARY, such as gqa:4,2 mqa mla:576,512+64, "
        f"found {item!r}{meant}"
    )


def in_words(message: str) -> str:
    """An error of a conversion without the options that a target stands for, and without those that a sweep lacks."""
    for option, word in _WORDS.items():
        message = re.sub(rf"{option} (\d+)", rf"\1 {word}", message).replace(option, word)
    return re.sub(r" \(--allow-growth [^)]*\)", "", message)


def spelled(options: Options) -> str:
    """The target of ``options`` as ``--targets`` spells it."""
    match options:
        case {"to": "gqa", "kv_heads": heads}:
            return f"gqa:{heads}"
        case {"to": "mla", "budget": budget}:
            return f"mla:{budget}"
        case {"to": "mla", "kv_rank": rank, "rope_dim": rope}:
            return f"mla:{rank}+{rope}"
    return str(options["to"])
