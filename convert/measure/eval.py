"""``kvfold eval``: compare a source and its conversion on the same documents, with one model in
memory at a time.

Loss by position needs no task. ``needle`` hides a sentence such as "The secret word of Anna is
apple." in ordinary text, which ends with a question for the word (Kamradt, 2023). The answer is the
likeliest of eight words of one token each, so models need not follow instructions; a guess is right
one time in eight. ``replies`` compares greedy replies to open questions: the number of tokens
before the first difference, the length, the share of 4-grams that repeat an earlier one (Welleck et
al., 2020, arXiv 1908.04319), and the rate at which the source would accept the result's tokens as a
draft, one minus the total variation of the next-token distributions (Leviathan et al., 2023, arXiv
2211.17192). All other tasks are of lm-evaluation-harness (Gao et al., 2024), in the extra ``eval``.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from kvfold.attention.drift.compare import margin, stretch_bounds
from kvfold.attention.drift.report import perplexity
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError, option_error, summarize_error
from kvfold.convert.measure.losses import token_losses
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import BUILT_IN_TASKS, EvalRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import attend_in_blocks, hide_bars, load_config
from kvfold.convert.text.corpus import check_sources, open_corpus, render
from kvfold.convert.text.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    prefix_tokens,
    tokenize,
)

# Tokens: the shortest default length.
_SHORTEST = 256
_SAMPLES = {"cpu": 16, "cuda": 32}
# Tokens by default: retrieval at 8192 took hours for a model of 135 M parameters on one core.
_LONGEST_CONTEXT = {"cpu": 1024}
# More than any language needs, so that enough text is read.
_BYTES_PER_TOKEN = 16

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

_BATCH = 8  # replies written together: 5 times as fast as one by one on a CPU
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
    "a garden",
)

# The harness names these by their mean over all texts; here the name of one text's share.
_LOSSES = {"byte_perplexity": "nats_per_byte", "word_perplexity": "nats_per_word"}

# Values ``[n]`` of a metric, one for each document, by task and metric.
Scores = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The result of `eval_checkpoints`, whose rows are JSON objects.

    Each row compares both models on the same ``documents``: the means of ``source`` and
    ``student``, their ``difference``, student minus source, and ``margin``, half the width of its
    95 % interval; None for one document.

    model, out: the compared checkpoints.
    text: the name of the text for losses and retrieval.
    samples: the number of documents per length.
    retrieval: the share of right answers in texts of ``length`` tokens, and ``chance``, that of
        guesses. ``guesses``: the 95 % interval of the source's share reaches down to chance, so
        that the difference says nothing about the conversion.
    positions: perplexities of the positions ``from`` to ``to``, the latter excluded; ``excess``
        replaces ``difference``: loss in nats per token.
    tasks: each ``metric`` of each other ``task``.
    """

    model: str
    out: str
    text: str
    samples: int
    retrieval: list[dict[str, Any]]
    positions: list[dict[str, Any]]
    tasks: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return vars(self)


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


@dataclass(frozen=True)
class Documents:
    """What both models read.

    text: the name of the text.
    samples: the number of documents per length.
    windows: the text for losses, ``[N, T]``.
    questions: the questions for each length.
    prompts: the tokens of open questions; empty without the task ``replies``.
    """

    text: str
    samples: int
    windows: Tensor
    questions: dict[int, list[Question]]
    prompts: list[Tensor]


@dataclass(frozen=True)
class ModelResults:
    """What one model gave.

    correct: 1 for each right answer, else 0, by length.
    losses: the losses on the windows, ``[N, T - 1]``.
    replies: the tokens of each reply.
    probabilities: next-token probabilities on the windows; empty without the task ``replies``.
    harness: the scores of lm-evaluation-harness.
    """

    correct: dict[int, Tensor]
    losses: Tensor
    replies: list[Tensor]
    probabilities: Tensor
    harness: Scores


def eval_checkpoints(request: EvalRequest, progress: Progress | None = None) -> Evaluation:
    """Compare ``out`` with ``model``: retrieval at ``lengths``, loss by position, and ``tasks``.

    Differences are paired by document, with 95 % intervals. The default ``lengths`` are the model's
    context (on a CPU at most 1024 tokens) and 1/2, 1/4 and 1/8 of it. ``samples`` is the number of
    documents per length and of prompts (default 32, on a CPU 16), ``limit`` the number per task of
    lm-evaluation-harness. Words are hidden in ``text``, which the losses are also measured on; the
    default is held-out text that ships with kvfold. ``progress`` works as in `convert_checkpoint`,
    for each model with the stages ``retrieval`` (documents, for each length), ``losses`` and
    ``replies`` (documents). Raises InputError for an invalid request or checkpoint.

    >>> request = EvalRequest(demo_folder(), demo_folder(), lengths=[256], samples=2)
    >>> (row,) = eval_checkpoints(request).retrieval
    >>> row["task"], row["length"], row["difference"]
    ('needle', 256, 0.0)
    """
    if request.harness_tasks and find_spec("lm_eval") is None:
        raise InputError(
            f"--tasks {','.join(request.harness_tasks)} needs lm-evaluation-harness, which is not"
            " installed; run pip install 'kvfold[eval]', or use only built-in tasks:"
            f" {', '.join(BUILT_IN_TASKS)}"
        )
    check_sources(filter(None, [request.text]), "text")
    with closing(open_checkpoint(request.model)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint, request.trust_remote_code, "an evaluation")
        documents = draw_documents(request, checkpoint, tokenizer)
    stages = Stages(progress, request.quiet)
    # One after the other: two models of 70B parameters fit into few machines.
    source = run_model(request.model, request, tokenizer, documents, stages)
    student = run_model(request.out, request, tokenizer, documents, stages)
    tasks = pair_replies(source, student) if documents.prompts else []
    for (task, metric), scores in source.harness.items():
        tasks.append({"task": task, "metric": metric} | pair(scores, student.harness[task, metric]))
    return Evaluation(
        model=request.model,
        out=request.out,
        text=documents.text,
        samples=documents.samples,
        retrieval=[
            pair_answers(length, source.correct[length], student.correct[length])
            for length in documents.questions
        ],
        positions=pair_by_position(source.losses, student.losses),
        tasks=tasks,
    )


def draw_documents(request: EvalRequest, source: Checkpoint, tokenizer: Any) -> Documents:
    """The texts, questions and prompts of an evaluation, drawn from the request's seed.

    Raises InputError if a length exceeds the model's context, or if the text is empty.
    """
    device = choose_device(request.device).type
    samples = request.samples or _SAMPLES[device]
    config = load_config(source, request.trust_remote_code)
    context = getattr(config, "max_position_embeddings", None) or 2048
    lengths = sorted(set(request.lengths))
    if lengths and lengths[-1] > context:
        rule = f"must not exceed the {context} positions supported by {source.origin}"
        raise option_error("lengths", lengths[-1], rule)
    if not lengths:
        longest = min(context, _LONGEST_CONTEXT.get(device, context))
        shares = {max(_SHORTEST, longest // divisor) for divisor in (8, 4, 2, 1)}
        lengths = sorted(min(length, context) for length in shares)
    # A model that was trained with a BOS token in front loses much without it.
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64)
    shortest = max(2, len(prefix) + 1)
    if lengths[-1] < shortest:
        rule = f"must be at least {shortest} tokens, so that there is one to predict"
        raise option_error("lengths", lengths[-1], rule)
    corpus = open_corpus(request.text, tokenizer, 0, "held_out", "text")
    bodies, _ = corpus.documents(lengths[-1] * samples * _BYTES_PER_TOKEN)
    text = torch.cat([prefix[:0], *tokenize(tokenizer, prefix_tokens(tokenizer), bodies)])
    if not len(text):
        raise InputError(
            f"{corpus.name} contains no text to measure on; choose another with --text"
        )
    check_vocabulary(text, config.vocab_size, source.origin)
    length = min(lengths[-1] - len(prefix), len(text))
    windows = text[: len(text) // length * length].view(-1, length)[:samples]
    windows = torch.cat([prefix.expand(len(windows), -1), windows], dim=1)
    questions = {}
    if request.retrieval:
        for length in lengths:
            questions[length] = draw_questions(tokenizer, text, length, samples, request.seed)
    prompts = []
    if "replies" in request.tasks:
        prompts = draw_prompts(tokenizer, samples, request.seed)
    return Documents(corpus.name, samples, windows, questions, prompts)


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
                "lengths",
                length,
                "is too short for the sentence to find and its question; use more tokens",
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


def draw_prompts(tokenizer: Any, count: int, seed: int) -> list[Tensor]:
    """The tokens ``[T]`` of ``count`` open questions, in the chat template if there is one; from 49
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


def run_model(
    folder: str, request: EvalRequest, tokenizer: Any, documents: Documents, stages: Stages
) -> ModelResults:
    """All results of one model, which is loaded for this alone."""
    hide_bars(request.quiet)
    device = choose_device(request.device)
    with closing(open_checkpoint(folder)) as checkpoint, stages(f"loading {folder}"):
        dtype = compute_dtype(checkpoint, device, request.dtype)
        model = load_model(checkpoint, dtype, request.trust_remote_code).to(device).eval()
        attend_in_blocks(model, device)
    correct = {}
    for length, questions in documents.questions.items():
        counted = stages.over("retrieval", questions, len(questions), "document")
        correct[length] = answer_questions(model, counted)
    windows = stages.over("losses", documents.windows, len(documents.windows), "document")
    losses = token_losses(model, windows)
    replies = []
    probabilities = torch.empty(0)
    if prompts := documents.prompts:
        size = request.batch or _BATCH
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for batch in stages.over("replies", batches, len(batches), "batch"):
            replies += write_replies(model, tokenizer, batch)
        probabilities = next_token_probabilities(model, documents.windows)
    harness: Scores = {}
    if request.harness_tasks:
        with stages(f"{folder}: {', '.join(request.harness_tasks)}"):
            harness = run_harness(model, tokenizer, request)
    return ModelResults(correct, losses, replies, probabilities, harness)


@torch.no_grad()
def answer_questions(model: Any, questions: Iterable[Question]) -> Tensor:
    """1 for each question that the model answers correctly, else 0, ``[n]``."""
    correct = []
    for question in questions:
        tokens = question.tokens[None].to(model.device)
        logits = model(input_ids=tokens, logits_to_keep=1).logits[0, -1]
        correct.append(float(int(logits[question.choices].argmax()) == question.answer))
    return torch.tensor(correct)


@torch.no_grad()
def write_replies(
    model: Any, tokenizer: Any, prompts: Sequence[Tensor], max_new_tokens: int = _REPLY_TOKENS
) -> list[Tensor]:
    """The model's greedy reply to each prompt ``[T]`` of a batch, to its end token or
    ``max_new_tokens``.
    """
    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    # Not the model's own settings, which may sample or penalize repetition.
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
    )
    tokens = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    real = [torch.ones_like(prompt) for prompt in prompts]
    written = model.generate(
        input_ids=tokens.to(model.device),
        attention_mask=pad_sequence(real, batch_first=True, padding_side="left").to(model.device),
        generation_config=greedy,
    )
    replies = []
    for reply in written[:, tokens.shape[1] :].cpu():
        ended = [i for i, token in enumerate(reply.tolist(), start=1) if token in stops]
        replies.append(reply[: ended[0]] if ended else reply)
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


def run_harness(model: Any, tokenizer: Any, request: EvalRequest) -> Scores:
    """The scores of the documents of the request's harness tasks. Raises InputError for an unknown
    task.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval  # pyright: ignore[reportMissingImports]
    import yaml
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    try:
        # The harness's own loader would run functions that a file names.
        tasks = [
            yaml.safe_load(Path(task).read_text()) if task.endswith(".yaml") else task
            for task in request.harness_tasks
        ]
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
    except (KeyError, ValueError, AttributeError, OSError, yaml.YAMLError) as error:
        names = f"--tasks {','.join(request.harness_tasks)}"
        raise InputError(
            f"{names}: lm-evaluation-harness rejected them: {summarize_error(error)[:300]}"
        ) from error
    return score_documents(results["samples"])


def score_documents(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Scores:
    """One value per document for every metric; log-likelihoods of lm-evaluation-harness become
    losses per word or byte.
    """
    scores: dict[tuple[str, str], list[float]] = {}
    for task, documents in samples.items():
        for document in documents:
            for metric in document["metrics"]:
                value = document[metric]
                if metric in _LOSSES:
                    value = -value[0] / value[1]
                if isinstance(value, (bool, int, float)):
                    scores.setdefault((task, _LOSSES.get(metric, metric)), []).append(value)
    return {name: torch.tensor(values).double() for name, values in scores.items()}


def pair(source: Tensor, student: Tensor) -> dict[str, Any]:
    """The means of both models' values ``[n]`` and their mean difference with its interval."""
    difference = student.double() - source.double()
    return {
        "documents": len(difference),
        "source": float(source.double().mean()),
        "student": float(student.double().mean()),
        "difference": float(difference.mean()),
        "margin": margin(difference),
    }


def pair_answers(length: int, source: Tensor, student: Tensor) -> dict[str, Any]:
    """The row of both models' right answers ``[n]``, each 0 or 1, at one length."""
    means = pair(source, student)
    lowest = means["source"] - (margin(source.double()) or 1)
    chance = {"chance": 1 / CHOICES, "guesses": lowest <= 1 / CHOICES}
    return {"task": "needle", "length": length} | chance | means


def pair_by_position(source: Tensor, student: Tensor) -> list[dict[str, Any]]:
    """Perplexities and excess loss from both models' losses ``[n, T - 1]``, for ranges of positions
    that double.
    """
    rows = []
    for start, end in stretch_bounds(source.shape[1] + 1):
        positions = slice(start - 1, end - 1)
        row = pair(source[:, positions].mean(1), student[:, positions].mean(1))
        row["source"] = perplexity(row["source"])
        row["student"] = perplexity(row["student"])
        row["excess"] = row.pop("difference")
        rows.append({"from": start, "to": end} | row)
    return rows


def pair_replies(source: ModelResults, student: ModelResults) -> list[dict[str, Any]]:
    """The rows of the task ``replies``; ``first_difference`` of the source is the length of its
    reply.
    """
    equal = []
    for reply, other in zip(source.replies, student.replies, strict=True):
        shorter = min(len(reply), len(other))
        equal.append(int((reply[:shorter] == other[:shorter]).long().cumprod(0).sum()))
    lengths, other_lengths = (
        torch.tensor([len(reply) for reply in model.replies]) for model in (source, student)
    )
    repeated, other_repeated = (
        torch.tensor([_repetition(reply.tolist()) for reply in model.replies])
        for model in (source, student)
    )
    difference = (source.probabilities.float() - student.probabilities.float()).abs()
    acceptance = 1 - difference.sum(-1).mean(-1) / 2
    metrics = {
        "first_difference": pair(lengths, torch.tensor(equal)),
        "draft_acceptance": pair(torch.ones_like(acceptance), acceptance),
        "repetition": pair(repeated, other_repeated),
        "length": pair(lengths, other_lengths),
    }
    return [{"task": "replies", "metric": metric} | row for metric, row in metrics.items()]


def _repetition(reply: Sequence[int], size: int = 4) -> float:
    grams = [tuple(reply[start : start + size]) for start in range(len(reply) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
