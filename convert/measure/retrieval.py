"""Retrieval over long contexts without a download: words hidden in ordinary text, and asked for at its end.

``needle``: one sentence is hidden (Kamradt, 2023), and its word is the one choice that was in the text. ``keys``: eight
sentences are hidden (after the multi-key task of RULER, Hsieh et al., 2024), and all choices were in the text: only the
name beside each tells them apart. A model answers with the likeliest of eight words of one token each,
so models that follow no instructions can be tested; guessing is right once in eight times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError

TASKS = ("needle", "keys")
CHOICES = 8
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
_WORDS = (
    *("apple", "bread", "chair", "dance", "earth", "flower", "glass", "horse", "iron", "king", "lake", "music"),
    *("night", "ocean", "paper", "queen", "river", "stone", "table", "train", "voice", "water", "window", "winter"),
    *("animal", "book", "bridge", "church", "color", "doctor", "door", "eye", "field", "fire", "gold", "garden"),
    *("heart", "island", "key", "letter", "light", "market", "money", "moon", "name", "number", "object", "point"),
    *("road", "school", "ship", "silver", "snow", "star", "street", "sun", "time", "tree", "wall", "world"),
    *("list", "string", "file", "line", "code", "type", "value", "class", "method", "module", "text", "return", "set"),
)
_SENTENCE, _QUESTION = "\nThe secret word of {name} is {word}.\n", "\nThe secret word of {name} is"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """``tokens [T]`` that end in a question, ``choices`` of tokens for an answer, and the place of the right one."""

    tokens: Tensor
    choices: list[int]
    right: int


def single_words(encode: Encode) -> dict[str, int]:
    """Words that are one token behind a space, with that token. Raises InputError when there are too few."""
    words = {word: encode(f" {word}") for word in dict.fromkeys(_WORDS)}
    found = {word: tokens[0] for word, tokens in words.items() if len(tokens) == 1}
    if len(set(found.values())) < CHOICES:
        raise InputError(
            f"evaluation: expected a tokenizer with {CHOICES} common English words of one token each for the retrieval "
            f"tasks, found {len(found)}; leave them out with --no-retrieval"
        )
    return found


@dataclass(frozen=True)
class Questions:
    """What questions of ``task`` are made of: ``filler [n]``, tokens of ordinary text, behind ``prefix``."""

    task: str
    encode: Encode
    prefix: Sequence[int]
    filler: Tensor

    def draw(self, length: int, count: int, seed: int) -> list[Question]:
        """``count`` questions of ``length`` tokens; what they ask for stands at depths spread from beginning to end.

        Raises InputError for a length that has no room for the sentences.
        """
        words, generator = single_words(self.encode), torch.Generator().manual_seed(seed)
        return [self._one(length, (index + 0.5) / count, words, generator) for index in range(count)]

    def _one(self, length: int, depth: float, words: dict[str, int], generator: torch.Generator) -> Question:
        def order(size: int) -> list[int]:
            drawn: list[int] = torch.randperm(size, generator=generator).tolist()
            return drawn

        names = [_NAMES[place] for place in order(len(_NAMES))]
        known = list(words)
        chosen = [known[place] for place in order(len(known))[:CHOICES]]
        hidden = 1 if self.task == "needle" else CHOICES
        sentences = [self.encode(_SENTENCE.format(name=names[i], word=chosen[i])) for i in range(hidden)]
        ending = self.encode(_QUESTION.format(name=names[0]))
        room = length - len(self.prefix) - sum(map(len, sentences)) - len(ending)
        if room < len(sentences):
            raise InputError(
                f"--lengths {length}: too short for the sentences of the task {self.task}; give longer ones"
            )
        text = self._stretch(room, order)
        depths = [depth, *torch.rand(hidden - 1, generator=generator).tolist()]
        for at, sentence in sorted(zip(depths, sentences, strict=True), reverse=True):
            place = round(at * room)
            text[place:place] = sentence
        mixed = order(CHOICES)
        tokens = torch.tensor([*self.prefix, *text, *ending])
        return Question(tokens, [words[chosen[i]] for i in mixed], mixed.index(0))

    def _stretch(self, room: int, order: Callable[[int], list[int]]) -> list[int]:
        """``room`` tokens of the filler from a place that is drawn; a short one is repeated."""
        start = order(max(1, len(self.filler) - room))[0]
        repeated = self.filler.repeat(-(-(start + room) // len(self.filler)))
        stretch: list[int] = repeated[start : start + room].tolist()
        return stretch


@torch.no_grad()
def answers(model: Any, asked: Sequence[Question], advance: Callable[[int], None] = lambda amount: None) -> Tensor:
    """1 for every question that the model answers rightly, else 0, ``[n]``; ``advance(1)`` after each."""
    found = []
    for question in asked:
        logits = model(input_ids=question.tokens[None].to(model.device), logits_to_keep=1).logits[0, -1]
        found.append(float(int(logits[question.choices].argmax()) == question.right))
        advance(1)
    return torch.tensor(found)
