"""Six tasks of RULER that need no data set: prompts of a given length, by the definitions that
RULER publishes.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024 (arXiv 2404.06654), whose prompts, settings and metric are in github.com/NVIDIA/RULER
(Apache-2.0). ``niah_single_1`` hides a number in noise, ``niah_multikey_2`` and ``niah_multikey_3``
hide a number or UUID among others; ``vt`` asks for a chain of variables that are assigned to each
other, ``cwe`` for the ten commonest words of a list, ``fwe`` for the three commonest coded words.
One difference: English words are from the shipped text; RULER takes them from a library.
"""

import bisect
import itertools
import math
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random

from kvfold.convert.data import read_text
from kvfold.convert.errors import option_error
from kvfold.convert.measure.replies import Prompt

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_FIND = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will"
    " quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key}"
    " mentioned in the provided text?"
)
_TRACK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following"
    " text.\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in the"
    " text above."
)
_TRACKED = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assigned the value {value}, they are:"
)
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others."
    " Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common"
    " words in the above list?"
)
_COMMONEST = "Answer: The top 10 words that appear most often in the list are:"
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most"
    " frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please"
    " ignore the dots '....'. What are the three most frequently appeared words in the above coded"
    " text?"
)
_DECODED = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_VARIABLES = 5  # in a chain: one value and four assignments
_COMMON_WORDS = 10
# Tokens of the length from which a list of words is RULER's; shorter ones repeat words less often.
_LONG = 4096


@cache
def english_words() -> tuple[str, ...]:
    """Some thousand words of 4 to 10 letters that the shipped text uses at least three times."""
    counts = Counter(re.findall(r"\b[a-z]{4,10}\b", read_text("train")))
    return tuple(sorted(word for word, count in counts.items() if count > 2))


def _words(draw: Random, count: int) -> list[str]:
    """``count`` different words; pairs of words where a very long list needs more than there are."""
    known = english_words()
    if count <= len(known):
        return draw.sample(known, count)
    return [
        f"{known[place // len(known)]}-{known[place % len(known)]}"
        for place in draw.sample(range(len(known) ** 2), count)
    ]


def _needle(draw: Random, kind: str) -> tuple[str, str]:
    """A key and a value: two words and a number of seven digits, or two UUIDs."""
    if kind == "number":
        return "-".join(_words(draw, 2)), str(draw.randint(10**6, 10**7 - 1))
    first, second = (str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2))
    return first, second


def _niah(draw: Random, units: int, kind: str, among_needles: bool) -> Prompt:
    """One needle between ``units`` lines of noise or other needles."""
    key, value = _needle(draw, kind)
    lines = [_NOISE] * units
    if among_needles:
        others = [_needle(draw, kind) for _ in range(units)]
        lines = [_NEEDLE.format(kind=kind, key=one, value=other) for one, other in others]
    lines.insert(draw.randrange(units), _NEEDLE.format(kind=kind, key=key, value=value))
    question = _FIND.format(kind=kind, key=key, context="\n".join(lines))
    opening = f"The special magic {kind} for {key} mentioned in the provided text is"
    return Prompt(question, opening, 128, (value,), 1 / (units + 1) if among_needles else 0.0)


def _chain(draw: Random, units: int, letters: int) -> tuple[str, str, list[str]]:
    """The question, the start of its answer, and the variables, of a chain between ``units`` lines
    of noise.
    """
    names: list[str] = []
    while len(names) < _VARIABLES:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    value = draw.randint(10000, 99999)
    chain = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)),
    ]
    lines = [_NOISE] * units
    # Each goes behind those before it.
    for shift, (place, line) in enumerate(
        zip(sorted(draw.sample(range(units), _VARIABLES)), chain, strict=True)
    ):
        lines.insert(place + shift, line)
    context = "\n".join(lines)
    return (
        _TRACK.format(context=context, value=value),
        _TRACKED.format(count=_VARIABLES, value=value),
        names,
    )


def _vt(draw: Random, units: int) -> Prompt:
    """A chain in noise, after a solved example of ten lines of noise."""
    question, opening, names = _chain(draw, 10, 3)
    example = f"{question} {opening} {' '.join(names)}\n\n"
    question, opening, names = _chain(draw, units, 5)
    return Prompt(example + question, opening, 30, tuple(names))


def _list(draw: Random, count: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """A numbered list of ``count`` different words, ten of which occur ``often``, and these ten."""
    words = _words(draw, count)
    common = words[:_COMMON_WORDS]
    listed = common * often + words[_COMMON_WORDS:] * seldom
    draw.shuffle(listed)
    return _COMMON.format(context=_numbered(listed)), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _cwe(draw: Random, units: int, long: bool) -> Prompt:
    """A list of words, after a solved example."""
    question, common = _list(draw, *((40, 10, 3) if long else (20, 3, 1)))
    example = f"{question} {_COMMONEST} {_numbered(common)}\n"
    question, common = _list(draw, units, *((30, 3) if long else (6, 1)))
    return Prompt(example + question, _COMMONEST, 120, tuple(common), _COMMON_WORDS / units)


def _fwe(draw: Random, units: int, length: int) -> Prompt:
    """About ``units`` coded words whose counts follow a zeta distribution with alpha 2; the
    commonest is dots.
    """
    coded = [
        "".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(max(4, length // 50))
    ]
    coded[0] = "..."
    counts = [int(units / rank**2 / (math.pi**2 / 6)) for rank in range(1, len(coded) + 1)]
    text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    draw.shuffle(text)
    chance = 3 / max(3, sum(map(bool, counts)) - 1)
    return Prompt(_CODED.format(context=" ".join(text)), _DECODED, 50, tuple(coded[1:4]), chance)


# A prompt of so many units (lines of noise, needles, words) at a length, and the fewest units that
# make sense.
_TASKS: dict[str, tuple[Callable[[Random, int, int], Prompt], int]] = {
    "niah_single_1": (lambda draw, units, length: _niah(draw, units, "number", False), 1),
    "niah_multikey_2": (lambda draw, units, length: _niah(draw, units, "number", True), 1),
    "niah_multikey_3": (lambda draw, units, length: _niah(draw, units, "uuid", True), 1),
    "vt": (lambda draw, units, length: _vt(draw, units), _VARIABLES),
    "cwe": (lambda draw, units, length: _cwe(draw, units, length >= _LONG), 2 * _COMMON_WORDS),
    # With 40 words the fourth commonest, which is the third expected, occurs once.
    "fwe": (lambda draw, units, length: _fwe(draw, units, length), 40),
}


def draw_ruler(
    task: str, length: int, count: int, seed: int, size: Callable[[Prompt], int]
) -> list[Prompt]:
    """``count`` prompts whose tokens, with those of the longest reply, fill but do not exceed
    ``length``.

    ``size`` is a prompt's number of tokens. Raises InputError if ``length`` is too short for the
    task.
    """
    make, fewest = _TASKS[task]

    def prompt(index: int, units: int) -> Prompt:
        return make(Random(f"{task} {length} {seed} {index}"), units, length)

    def needed(index: int, units: int) -> int:
        made = prompt(index, units)
        return size(made) + made.most

    if max(needed(index, fewest) for index in range(count)) > length:
        raise option_error("lengths", length, f": too short for task {task!r}; use greater lengths")
    prompts: list[Prompt] = []
    units = fewest
    for index in range(count):
        # The first is sought among all, the next near it: every try tokenizes a text of this
        # length.
        if not prompts:
            units = (
                fewest
                + bisect.bisect_right(
                    range(fewest, length // 2), length, key=lambda n: needed(0, n)
                )
                - 1
            )
        while units > fewest and needed(index, units) > length:
            units -= max(1, units // 64)
        prompts.append(prompt(index, max(fewest, units)))
    return prompts
