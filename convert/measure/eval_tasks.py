"""The tests in ``kvfold eval``: words hidden in long texts, and tasks of lm-evaluation-harness.

Retrieval needs no download: sentences such as "The secret word of Anna is apple." are hidden in
ordinary text, and the text ends with a question for one of these words. ``needle`` hides one
sentence (Kamradt, 2023), so only the right answer occurs in the text. ``keys`` hides eight (after
the multi-key task of RULER, Hsieh et al., 2024), so all choices occur and only the names
distinguish them. The answer is the most likely of eight single-token words, so models need not
follow instructions; guessing is right one time in eight.

Scores of lm-evaluation-harness (Gao et al., 2024) are paired by document. They need the extra
``eval``.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, one_line, option_error
from kvfold.convert.request import BUILT_IN_TASKS, EvalRequest
from kvfold.convert.text.tokenizer import prefix_tokens

TASKS = ("needle", "keys")
CHOICES = 8
_PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
# Common words and words of programs: tokenizers of code models have one token for the latter.
WORDS = (
    *(
        "apple",
        "bread",
        "chair",
        "dance",
        "earth",
        "flower",
        "glass",
        "horse",
        "iron",
        "king",
        "lake",
        "music",
    ),
    *(
        "night",
        "ocean",
        "paper",
        "queen",
        "river",
        "stone",
        "table",
        "train",
        "voice",
        "water",
        "window",
        "winter",
    ),
    *(
        "animal",
        "book",
        "bridge",
        "church",
        "color",
        "doctor",
        "door",
        "eye",
        "field",
        "fire",
        "gold",
        "garden",
    ),
    *(
        "heart",
        "island",
        "key",
        "letter",
        "light",
        "market",
        "money",
        "moon",
        "name",
        "number",
        "object",
        "point",
    ),
    *(
        "road",
        "school",
        "ship",
        "silver",
        "snow",
        "star",
        "street",
        "sun",
        "time",
        "tree",
        "wall",
        "world",
    ),
    *(
        "list",
        "string",
        "file",
        "line",
        "code",
        "type",
        "value",
        "class",
        "method",
        "module",
        "text",
        "return",
        "set",
    ),
)
_SENTENCE = "\nThe secret word of {name} is {word}.\n"
_QUESTION = "\nThe secret word of {name} is"

# The harness names these by their mean over all texts; here the name and unit of one text's share.
_LOSSES = {
    "bits_per_byte": ("bits_per_byte", -1 / math.log(2)),
    "byte_perplexity": ("nats_per_byte", -1.0),
    "word_perplexity": ("nats_per_word", -1.0),
}

# By task and metric, then by document.
TaskScores = dict[tuple[str, str], dict[str, float]]


@dataclass(frozen=True)
class Question:
    """``tokens [T]`` that end in a question, answer tokens ``choices``, and the index of the
    ``right`` choice.
    """

    tokens: Tensor
    choices: list[int]
    right: int


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def single_words(tokenizer: Any) -> dict[str, int]:
    """Words that are a single token after a space, with their tokens. Raises InputError if there
    are too few.
    """
    words = {word: _encode(tokenizer, f" {word}") for word in dict.fromkeys(WORDS)}
    found = {word: tokens[0] for word, tokens in words.items() if len(tokens) == 1}
    if len(set(found.values())) < CHOICES:
        raise InputError(
            f"retrieval needs {CHOICES} common English words of one token each, but the tokenizer"
            f" has only {len(found)}; skip retrieval with --no-retrieval"
        )
    return found


def draw_questions(
    tokenizer: Any, filler: Tensor, task: str, length: int, count: int, seed: int
) -> list[Question]:
    """Create ``count`` questions of ``length`` tokens, their answers spread evenly over the
    ``filler [n]`` of tokens.

    Raises InputError if ``length`` is too short for the sentences.
    """
    words = single_words(tokenizer)
    prefix = prefix_tokens(tokenizer)
    # Everything is drawn from one generator, so that a seed gives the same questions to both
    # models.
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> list[int]:
        drawn: list[int] = torch.randperm(size, generator=generator).tolist()
        return drawn

    questions = []
    for index in range(count):
        names = [_PEOPLE[place] for place in order(len(_PEOPLE))]
        known = list(words)
        chosen = [known[place] for place in order(len(known))[:CHOICES]]
        hidden = 1 if task == "needle" else CHOICES
        sentences = [
            _encode(tokenizer, _SENTENCE.format(name=names[i], word=chosen[i]))
            for i in range(hidden)
        ]
        ending = _encode(tokenizer, _QUESTION.format(name=names[0]))
        room = length - len(prefix) - sum(map(len, sentences)) - len(ending)
        if room < len(sentences):
            rule = f": too short for the hidden sentences of task {task!r}; use greater lengths"
            raise option_error("lengths", length, rule)
        # A stretch of the filler from a place that is drawn; a short filler is repeated.
        start = order(max(1, len(filler) - room))[0]
        text: list[int] = filler.repeat(-(-(start + room) // len(filler)))[
            start : start + room
        ].tolist()
        depths = [(index + 0.5) / count, *torch.rand(hidden - 1, generator=generator).tolist()]
        # From the end, so that an insertion does not move the places of the others.
        for at, sentence in sorted(zip(depths, sentences, strict=True), reverse=True):
            place = round(at * room)
            text[place:place] = sentence
        # The right word must not always be the first choice.
        mixed = order(CHOICES)
        tokens = torch.tensor([*prefix, *text, *ending])
        questions.append(Question(tokens, [words[chosen[i]] for i in mixed], mixed.index(0)))
    return questions


@torch.no_grad()
def answers(
    model: Any, asked: Sequence[Question], advance: Callable[[int], None] = lambda amount: None
) -> Tensor:
    """1 for each question that the model answers correctly, else 0, ``[n]``; calls ``advance(1)``
    after each.
    """
    found = []
    for question in asked:
        logits = model(input_ids=question.tokens[None].to(model.device), logits_to_keep=1).logits[
            0, -1
        ]
        found.append(float(int(logits[question.choices].argmax()) == question.right))
        advance(1)
    return torch.tensor(found)


def check_harness(tasks: Sequence[str]) -> None:
    """Raise InputError if lm-evaluation-harness, which runs ``tasks``, is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError(
            f"--tasks {','.join(tasks)} needs lm-evaluation-harness, which is not installed;"
            " run pip install 'kvfold[eval]', or use only built-in tasks:"
            f" {', '.join(BUILT_IN_TASKS)}"
        )


def harness_scores(model: Any, tokenizer: Any, request: EvalRequest) -> TaskScores:
    """All scores per document from lm-evaluation-harness. Raises InputError for an unknown task."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    seeds = {
        f"{name}_seed": request.seed
        for name in ("random", "numpy_random", "torch_random", "fewshot_random")
    }
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request.batch or 1)
    tasks = [_task(name) for name in request.harness_tasks]
    try:
        done = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=tasks,
            limit=request.limit,
            log_samples=True,
            bootstrap_iters=0,
            **seeds,
        )
    except (KeyError, ValueError) as error:
        shown = f"--tasks {','.join(request.harness_tasks)}"
        raise InputError(
            f"{shown}: lm-evaluation-harness rejected them: {one_line(error)[:300]}"
        ) from error
    return document_scores(done["samples"])


def _task(name: str) -> str | dict[str, Any]:
    """The name of a harness task unchanged, or the contents of a .yaml file that describes a task."""
    if Path(name).suffix != ".yaml":
        return name
    import yaml

    try:
        described = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise option_error(
            "tasks", name, f"is not a valid task file: {one_line(error)[:200]}"
        ) from error
    if not isinstance(described, dict):
        raise option_error("tasks", name, "is not a valid task file: it must contain a mapping")
    return described


def document_scores(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> TaskScores:
    """The scores of every document; the harness's pairs of log-likelihood and length become losses
    per word or byte.
    """
    found: TaskScores = {}
    for task, documents in samples.items():
        for document in documents:
            for metric in document.get("metrics", ()):
                value = document.get(metric)
                name = metric
                if isinstance(value, (tuple, list)) and len(value) == 2 and value[1]:
                    name, unit = _LOSSES.get(metric, (metric, 1.0))
                    value = value[0] / value[1] * unit
                if isinstance(value, (bool, int, float)):
                    key = f"{document['doc_id']}/{document.get('filter', '')}"
                    found.setdefault((task, name), {})[key] = float(value)
    return found


def paired_scores(source: TaskScores, student: TaskScores) -> list[tuple[str, str, Tensor, Tensor]]:
    """Tuples of task, metric, and both models' scores ``[n]`` on the documents with scores from
    both.
    """
    rows = []
    for (task, metric), values in source.items():
        others = student.get((task, metric), {})
        shared = sorted(values.keys() & others.keys())
        if shared:
            before, after = ([each[document] for document in shared] for each in (values, others))
            rows.append((task, metric, torch.tensor(before).double(), torch.tensor(after).double()))
    return rows
