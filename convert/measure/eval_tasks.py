"""The tasks of ``kvfold eval``: a word hidden in a long text, replies to open questions, and the
tasks of lm-evaluation-harness.

``needle`` hides a sentence such as "The secret word of Anna is apple." in ordinary text, which ends
with a question for the word (Kamradt, 2023). The answer is the likeliest of eight words of one
token each, so models need not follow instructions; a guess is right one time in eight.

``replies`` compares greedy replies to open questions: the number of tokens before the first
difference, the length, the share of 4-grams that repeat an earlier one (Welleck et al., 2020, arXiv
1908.04319), and the rate at which the source would accept the result's tokens as a draft, one minus
the total variation of the next-token distributions (Leviathan et al., 2023, arXiv 2211.17192).

Neither needs a download. All other names are tasks of lm-evaluation-harness (Gao et al., 2024),
which is in the extra ``eval``.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.convert.errors import InputError, option_error, summarize_error
from kvfold.convert.request import BUILT_IN_TASKS, EvalRequest
from kvfold.convert.text.corpus import render
from kvfold.convert.text.tokenizer import prefix_tokens

CHOICES = 8
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
# Common words and words of programs: tokenizers of code models have one token for the latter.
_WORDS = (
    "apple bread chair dance earth flower glass horse iron king lake music night ocean paper queen"
    " river stone table train voice water window winter animal book bridge church color doctor door"
    " eye field fire gold garden heart island key letter light market money moon name number object"
    " point road school ship silver snow star street sun time tree wall world list string file line"
    " code type value class method module text return set"
)
_NEEDLE = "\nThe secret word of {name} is {word}.\n"
_QUESTION = "\nThe secret word of {name} is"

_REPLY_TOKENS = 128
# Positions per window whose next-token distributions are compared; all would take gigabytes for a
# large vocabulary.
_DRAFT_POSITIONS = 32
_OPEN_QUESTIONS = (
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

# The harness names these by their mean over all texts; here the name and unit of one text's share.
_LOSSES = {
    "bits_per_byte": ("bits_per_byte", -1 / math.log(2)),
    "byte_perplexity": ("nats_per_byte", -1.0),
    "word_perplexity": ("nats_per_word", -1.0),
}

# Scores by task and metric, then by document.
HarnessScores = dict[tuple[str, str], dict[str, float]]


# A word hidden in a long text


@dataclass(frozen=True)
class Question:
    """A text that ends in a question for the word hidden in it.

    tokens: the text, ``[T]``.
    choices: the token of each possible answer.
    answer: the index of the right choice.
    """

    tokens: Tensor
    choices: list[int]
    answer: int


def draw_questions(
    tokenizer: Any, filler: Tensor, length: int, count: int, seed: int
) -> list[Question]:
    """``count`` questions of ``length`` tokens, whose needles lie at depths spread evenly over the
    text, which is a piece of ``filler [n]``.

    Raises InputError if ``length`` is too short for the needle, or if the tokenizer splits common
    words.
    """

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    words = {word: encode(f" {word}") for word in _WORDS.split()}
    words = {word: tokens for word, tokens in words.items() if len(tokens) == 1}
    if len(words) < CHOICES:
        raise InputError(
            f"retrieval needs {CHOICES} common English words of one token each, but the tokenizer"
            f" has only {len(words)}; skip retrieval with --no-retrieval"
        )
    prefix = prefix_tokens(tokenizer)
    random = Random(seed)
    questions = []
    for index in range(count):
        name = random.choice(_NAMES)
        choices = random.sample(list(words), CHOICES)
        answer = random.randrange(CHOICES)
        needle = encode(_NEEDLE.format(name=name, word=choices[answer]))
        ending = encode(_QUESTION.format(name=name))
        room = length - len(prefix) - len(needle) - len(ending)
        if room < 1:
            raise option_error(
                "lengths", length, "is too short to hide a sentence; use more tokens"
            )
        start = random.randrange(max(1, len(filler) - room))
        repeats = -(-(start + room) // len(filler))
        text = filler.repeat(repeats)[start : start + room].tolist()
        depth = round((index + 0.5) / count * room)
        tokens = [*prefix, *text[:depth], *needle, *text[depth:], *ending]
        questions.append(
            Question(torch.tensor(tokens), [words[word][0] for word in choices], answer)
        )
    return questions


@torch.no_grad()
def answer_questions(
    model: Any, questions: Sequence[Question], advance: Callable[[int], None]
) -> Tensor:
    """1 for each question that the model answers correctly, else 0, ``[n]``; calls ``advance(1)``
    after each.
    """
    correct = []
    for question in questions:
        tokens = question.tokens[None].to(model.device)
        logits = model(input_ids=tokens, logits_to_keep=1).logits[0, -1]
        correct.append(float(int(logits[question.choices].argmax()) == question.answer))
        advance(1)
    return torch.tensor(correct)


# Replies to open questions


def draw_prompts(tokenizer: Any, count: int, seed: int) -> list[Tensor]:
    """The tokens ``[T]`` of ``count`` open questions, in the chat template if there is one; from 55
    on they repeat.
    """
    prompts = [question.format(subject) for subject in _SUBJECTS for question in _OPEN_QUESTIONS]
    Random(seed).shuffle(prompts)
    tokens = []
    for prompt in (prompts * count)[:count]:
        prefix = prefix_tokens(tokenizer)
        text = f"{prompt}\n"
        if getattr(tokenizer, "chat_template", None) is not None:
            prefix = []
            text = render(tokenizer, [{"role": "user", "content": prompt}], reply=True)
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens.append(torch.tensor([*prefix, *encoded]))
    return tokens


@torch.no_grad()
def write_replies(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Tensor],
    batch: int,
    advance: Callable[[int], None],
    max_new_tokens: int = _REPLY_TOKENS,
) -> list[Tensor]:
    """The model's greedy reply to each prompt ``[T]``, to its end token or ``max_new_tokens``."""
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    # Not the model's own settings, which may sample or penalize repetition.
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
    )
    replies = []
    for start in range(0, len(prompts), batch):
        rows = list(prompts[start : start + batch])
        tokens = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side="left")
        written = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=greedy,
        )
        for reply in written[:, tokens.shape[1] :].cpu():
            ended = [i for i, token in enumerate(reply.tolist(), start=1) if token in stops]
            replies.append(reply[: ended[0]] if ended else reply)
        advance(len(rows))
    return replies


@torch.no_grad()
def next_token_probabilities(model: Any, windows: Tensor) -> Tensor:
    """Next-token probabilities at evenly spaced positions of ``windows [N, T]``, ``[N, positions,
    V]`` in float16.
    """
    length = windows.shape[1]
    positions = torch.linspace(0, length - 1, min(_DRAFT_POSITIONS, length)).long()
    rows = (model(input_ids=row[None].to(model.device)).logits[0, positions] for row in windows)
    return torch.stack([row.float().softmax(-1).half().cpu() for row in rows])


def compare_replies(
    source: Sequence[Tensor],
    student: Sequence[Tensor],
    probabilities: tuple[Tensor, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Both models' values ``[n]`` of each metric, from their replies and
    `next_token_probabilities`.

    The source's ``first_difference`` is the length of its reply.
    """
    equal = []
    for reply, other in zip(source, student, strict=True):
        shorter = min(len(reply), len(other))
        equal.append(int((reply[:shorter] == other[:shorter]).long().cumprod(0).sum()))
    lengths = [torch.tensor([len(reply) for reply in replies]) for replies in (source, student)]
    repeated = [
        torch.tensor([_repetition(reply.tolist()) for reply in replies])
        for replies in (source, student)
    ]
    acceptance = []
    for p, q in zip(*probabilities, strict=True):
        acceptance.append(1 - float((p.float() - q.float()).abs().sum(-1).mean()) / 2)
    return {
        "first_difference": (lengths[0], torch.tensor(equal)),
        "draft_acceptance": (torch.ones(len(acceptance)), torch.tensor(acceptance)),
        "repetition": (repeated[0], repeated[1]),
        "length": (lengths[0], lengths[1]),
    }


def _repetition(reply: Sequence[int], size: int = 4) -> float:
    grams = [tuple(reply[start : start + size]) for start in range(len(reply) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# Tasks of lm-evaluation-harness


def check_harness(tasks: Sequence[str]) -> None:
    """Raise InputError if lm-evaluation-harness, which runs ``tasks``, is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError(
            f"--tasks {','.join(tasks)} needs lm-evaluation-harness, which is not installed;"
            " run pip install 'kvfold[eval]', or use only built-in tasks:"
            f" {', '.join(BUILT_IN_TASKS)}"
        )


def run_harness(model: Any, tokenizer: Any, request: EvalRequest) -> HarnessScores:
    """The scores of every document in the request's harness tasks. Raises InputError for an unknown
    task.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    tasks = list(map(_load_task, request.harness_tasks))
    try:
        results = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request.batch or 1),
            tasks=tasks,
            limit=request.limit,
            log_samples=True,
            bootstrap_iters=0,
            random_seed=request.seed,
            numpy_random_seed=request.seed,
            torch_random_seed=request.seed,
            fewshot_random_seed=request.seed,
        )
    except (KeyError, ValueError) as error:
        names = f"--tasks {','.join(request.harness_tasks)}"
        raise InputError(
            f"{names}: lm-evaluation-harness rejected them: {summarize_error(error)[:300]}"
        ) from error
    return score_documents(results["samples"])


def _load_task(name: str) -> str | dict[str, Any]:
    """The name of a harness task unchanged, or the contents of a .yaml file with a task."""
    if Path(name).suffix != ".yaml":
        return name
    import yaml

    try:
        task = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise option_error(
            "tasks", name, f"is not a valid task file: {summarize_error(error)[:200]}"
        ) from error
    if not isinstance(task, dict):
        raise option_error("tasks", name, "is not a valid task file: it must contain a mapping")
    return task


def score_documents(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> HarnessScores:
    """The scores of every document; the harness's pairs of log-likelihood and length become losses
    per word or byte.
    """
    scores: HarnessScores = {}
    for task, documents in samples.items():
        for document in documents:
            key = f"{document['doc_id']}/{document.get('filter', '')}"
            for metric in document.get("metrics", ()):
                value = document.get(metric)
                name = metric
                if isinstance(value, (tuple, list)) and len(value) == 2 and value[1]:
                    name, unit = _LOSSES.get(metric, (metric, 1.0))
                    value = value[0] / value[1] * unit
                if isinstance(value, (bool, int, float)):
                    scores.setdefault((task, name), {})[key] = float(value)
    return scores
