"""Built-in tasks of ``kvfold eval`` for which the models write: what likelihoods alone do not show.

``replies`` compares greedy replies to open questions with the source's: the tokens before the first
difference, the share of equal tokens after it, the share of 4-grams that repeat an earlier one
(Welleck et al., 2020, arXiv 1908.04319) and the length; and the rate at which the source would
accept the result's tokens as a draft: one minus the total variation of the next-token distributions
(Leviathan et al., 2023, arXiv 2211.17192). The others have right answers: ``choice`` (four letters,
in an order that is drawn), ``arithmetic`` (sums and differences of two-digit numbers), ``copying``
(a list of words), and the tasks of `ruler`. Nothing is downloaded.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.measure.eval_tasks import WORDS
from kvfold.convert.text.tokenizer import prefix_tokens, render

LETTERS = "ABCD"
NO_LETTER = "none"
_REPLY = 128  # tokens of a reply to an open question
_COPIED = 12  # words
_DRAFTED = 32  # positions per window of text; all would take gigabytes for a large vocabulary
_QUESTIONS = (
    "Explain in a few sentences what {} is.",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "How would you describe {} to a child?",
    "Why is {} important?",
    "Write a friendly letter about {} to a neighbor.",
)
_SUBJECTS = (
    "the sea",
    "bread",
    "a library",
    "winter",
    "music",
    "a bicycle",
    "the moon",
    "friendship",
    "a garden",
)
_KINDS = {
    "an animal": ("horse", "dog", "tiger", "sheep", "rabbit", "cow"),
    "a fruit": ("apple", "banana", "pear", "cherry", "lemon", "grape"),
    "a color": ("red", "blue", "green", "yellow", "purple", "brown"),
    "a vehicle": ("car", "bus", "truck", "train", "bicycle", "airplane"),
    "a piece of furniture": ("table", "chair", "bed", "sofa", "desk", "shelf"),
    "a musical instrument": ("piano", "violin", "guitar", "drum", "flute", "trumpet"),
    "a part of the body": ("hand", "nose", "ear", "knee", "finger", "shoulder"),
    "a month": ("January", "March", "April", "July", "October", "December"),
}


@dataclass(frozen=True)
class Prompt:
    """A user's ``text``, the ``opening`` of the reply, at most how many tokens follow, and what
    they should contain.

    ``chance`` is the score of a guess.
    """

    text: str
    opening: str
    most: int
    expected: tuple[str, ...] = ()
    chance: float = 0.0


def draw_prompts(task: str, count: int, seed: int) -> list[Prompt]:
    """``count`` prompts of ``replies``, ``choice``, ``arithmetic`` or ``copying``, the same for
    both models.
    """
    draw = Random(f"{task} {seed}")
    if task == "replies":
        # Neighbors differ in question and subject; from 55 on they repeat.
        pairs = [(question, subject) for subject in _SUBJECTS for question in _QUESTIONS]
        draw.shuffle(pairs)
        return [
            Prompt(question.format(subject), "", _REPLY)
            for question, subject in (pairs * count)[:count]
        ]
    if task == "choice":
        letters = [LETTERS[index % len(LETTERS)] for index in range(count)]
        draw.shuffle(letters)
        return [_choice(draw, letter) for letter in letters]
    return [{"arithmetic": _arithmetic, "copying": _copying}[task](draw) for _ in range(count)]


def _choice(draw: Random, right: str) -> Prompt:
    """Which of four words is of a kind; two solved examples show the form."""
    kinds = draw.sample(sorted(_KINDS), 3)
    asked = []
    for kind, letter in zip(kinds, [*draw.sample(LETTERS, 2), right], strict=True):
        words = [
            draw.choice(_KINDS[other])
            for other in draw.sample(sorted(_KINDS.keys() - {kind}), len(LETTERS))
        ]
        words[LETTERS.index(letter)] = draw.choice(_KINDS[kind])
        options = "\n".join(f"{name}. {word}" for name, word in zip(LETTERS, words, strict=True))
        asked.append(f"Question: Which of these is {kind}?\n{options}\nAnswer: {letter}")
    text = "\n\n".join(["Answer each question with a letter.", *asked])
    return Prompt(text.removesuffix(f"\nAnswer: {right}"), "Answer:", 4, (right,), 1 / len(LETTERS))


def _arithmetic(draw: Random) -> Prompt:
    """A sum or a difference, after two solved ones."""
    lines = []
    for _ in range(3):
        larger, smaller = sorted((draw.randint(10, 99), draw.randint(10, 99)), reverse=True)
        sign, value = draw.choice((("+", larger + smaller), ("-", larger - smaller)))
        lines.append((f"{larger} {sign} {smaller} =", str(value)))
    asked, answer = lines.pop()
    text = "\n".join(["Calculate.", *map(" ".join, lines), asked.removesuffix(" =")])
    return Prompt(text, asked, 8, (answer,))


def _copying(draw: Random) -> Prompt:
    words = draw.sample(WORDS, _COPIED)
    text = f"Repeat these words in the same order: {' '.join(words)}"
    return Prompt(text, "The same words in the same order:", 4 * _COPIED, tuple(words))


def score(task: str, prompt: Prompt, reply: str) -> float:
    """How right a reply is, 0 to 1: its first letter or number, its words in order, or RULER's
    strings anywhere.
    """
    if task == "choice":
        return float(letter(reply) == prompt.expected[0])
    if task == "arithmetic":
        return float(re.findall(r"-?\d+", reply)[:1] == list(prompt.expected))
    if task == "copying":
        words = re.findall(r"\w+", reply.lower())
        return sum(map(str.__eq__, words, prompt.expected)) / len(prompt.expected)
    return sum(each.lower() in reply.lower() for each in prompt.expected) / len(prompt.expected)


def letter(reply: str) -> str:
    """The first of the letters that stands alone in a reply, or ``NO_LETTER``."""
    found = re.search(rf"\b[{LETTERS}]\b", reply)
    return found[0] if found else NO_LETTER


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> Tensor:
    """The prompt in the model's chat template, or as plain text if it has none, ``[T]``."""
    prefix = prefix_tokens(tokenizer)
    text = f"{prompt.text}\n{prompt.opening}"
    if getattr(tokenizer, "chat_template", None) is not None:
        prefix = []
        text = (
            render(tokenizer, [{"role": "user", "content": prompt.text}], reply=True)
            + prompt.opening
        )
    return torch.tensor(
        [*prefix, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    )


@torch.no_grad()
def write_replies(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Tensor],
    most: int,
    batch: int,
    advance: Callable[[int], None],
) -> list[Tensor]:
    """The model's greedy replies to prompts ``[T]``, each up to its end token or ``most`` tokens."""
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=most, eos_token_id=sorted(stops) or None, pad_token_id=0
    )
    replies = []
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        width = max(map(len, some))
        # Padding stands on the left, where the mask hides it and positions start behind it.
        tokens = torch.stack(
            [torch.nn.functional.pad(each, (width - len(each), 0)) for each in some]
        )
        mask = torch.stack([(torch.arange(width) >= width - len(each)).long() for each in some])
        both = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        for row in model.generate(**both, generation_config=greedy)[:, width:].cpu():
            ended = next(
                (place for place, token in enumerate(row.tolist(), start=1) if token in stops),
                len(row),
            )
            replies.append(row[:ended])
        advance(len(some))
    return replies


@torch.no_grad()
def draft_probabilities(model: Any, windows: Tensor) -> Tensor:
    """Next-token probabilities at evenly spaced positions of ``windows [N, T]``, ``[N, positions,
    V]`` in float16.
    """
    places = torch.linspace(0, windows.shape[1] - 1, min(_DRAFTED, windows.shape[1])).long()
    rows = (model(input_ids=row[None].to(model.device)).logits[0, places] for row in windows)
    return torch.stack([row.float().softmax(-1).half().cpu() for row in rows])


def reply_scores(
    before: Sequence[Tensor], after: Sequence[Tensor], drafts: tuple[Tensor, Tensor]
) -> list[tuple[str, str, Tensor, Tensor]]:
    """Tuples of task, metric, and both models' values ``[n]``, from their replies and
    `draft_probabilities`.

    The source's ``first_difference`` is the length of its reply. ``equal_after_it`` counts tokens
    at equal places of the replies that differ before their last token, and is left out if there are
    none.
    """
    equal = []
    shares = []
    for one, other in zip(before, after, strict=True):
        shorter = min(len(one), len(other))
        same = (one[:shorter] == other[:shorter]).long()
        equal.append(int(same.cumprod(0).sum()))
        following = max(len(one), len(other)) - equal[-1] - 1
        if following > 0:
            shares.append(int(same[equal[-1] :].sum()) / following)
    lengths = [torch.tensor([len(each) for each in replies]) for replies in (before, after)]
    accepted = torch.stack(
        [1 - (p.float() - q.float()).abs().sum(-1).mean() / 2 for p, q in zip(*drafts, strict=True)]
    )
    rows: list[tuple[str, Tensor, Tensor]] = [("first_difference", lengths[0], torch.tensor(equal))]
    rows += [("equal_after_it", torch.ones(len(shares)), torch.tensor(shares))] if shares else []
    rows += [("draft_acceptance", torch.ones(len(accepted)), accepted)]
    repeated = [
        torch.tensor([_repetition(each) for each in replies]) for replies in (before, after)
    ]
    rows += [("repetition", repeated[0], repeated[1]), ("length", lengths[0], lengths[1])]
    return [("replies", *row) for row in rows]


def _repetition(tokens: Tensor, size: int = 4) -> float:
    """The share of the 4-grams of a reply that occurred before in it."""
    grams = (
        [tuple(gram) for gram in tokens.unfold(0, size, 1).tolist()] if len(tokens) >= size else []
    )
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
