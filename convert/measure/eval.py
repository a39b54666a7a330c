"""``kvfold eval``: compare a source and its conversion on the same documents, with one model in
memory at a time.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import margin, stretch_bounds
from kvfold.attention.drift.report import perplexity
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.measure.eval_tasks import (
    CHOICES,
    HarnessScores,
    Question,
    answer_questions,
    check_harness,
    compare_replies,
    draw_prompts,
    draw_questions,
    next_token_probabilities,
    run_harness,
    write_replies,
)
from kvfold.convert.measure.losses import token_losses
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import EvalRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import attend_in_blocks, hide_bars, load_config
from kvfold.convert.text.corpus import check_sources, open_corpus
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
_BATCH = 8  # replies written together: 5 times as fast as one by one on a CPU


@dataclass(frozen=True)
class Paired:
    """Both models' means over the same documents.

    documents: the number of documents.
    source: the source's mean.
    student: the result's mean.
    difference: the mean difference, student minus source.
    margin: half the width of the difference's 95 % interval; None for one document.
    """

    documents: int
    source: float
    student: float
    difference: float
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class RetrievalRow(Paired):
    """The share of right answers in texts of one length.

    task: always ``needle``.
    length: the tokens of a text.
    chance: the share of right guesses.
    guesses: the 95 % interval of the source's share reaches down to chance, so that the difference
        says nothing about the conversion.
    """

    task: str
    length: int
    chance: float
    guesses: bool


@dataclass(frozen=True, kw_only=True)
class PositionRow(Paired):
    """Perplexities in a range of positions; ``difference`` is the excess loss in nats per token.

    start: the first position.
    end: the position after the last one.
    """

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class TaskRow(Paired):
    """A metric of ``replies`` or of a task of lm-evaluation-harness."""

    task: str
    metric: str


@dataclass(frozen=True)
class Evaluation:
    """The result of `eval_checkpoints`.

    model, out: the compared checkpoints.
    text: the name of the text for losses and retrieval.
    samples: the number of documents per length.
    retrieval: right answers by length.
    positions: perplexities and excess loss by position.
    tasks: the metrics of the other tasks.
    """

    model: str
    out: str
    text: str
    samples: int
    retrieval: list[RetrievalRow]
    positions: list[PositionRow]
    tasks: list[TaskRow]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        values = asdict(self)
        for row in values["positions"]:
            row["from"] = row.pop("start")
            row["to"] = row.pop("end")
            row["excess"] = row.pop("difference")
        return values


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

    right: 1 for each right answer, else 0, by length.
    losses: the losses on the windows, ``[N, T - 1]``.
    replies: the tokens of each reply.
    probabilities: next-token probabilities on the windows; None without the task ``replies``.
    harness: the scores of lm-evaluation-harness.
    """

    right: dict[int, Tensor]
    losses: Tensor
    replies: list[Tensor]
    probabilities: Tensor | None
    harness: HarnessScores


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
    >>> result = eval_checkpoints(request)
    >>> [(row.task, row.length, row.difference) for row in result.retrieval]
    [('needle', 256, 0.0)]
    """
    if request.harness_tasks:
        check_harness(request.harness_tasks)
    check_sources(filter(None, [request.text]), "text")
    with closing(open_checkpoint(request.model)) as source:
        tokenizer = load_tokenizer(source, request.trust_remote_code, "an evaluation")
        documents = draw_documents(request, source, tokenizer)
    if not request.quiet:
        _announce(request, documents)
    # One after the other: two models of 70B parameters fit into few machines.
    before = run_model(
        request.model, request, tokenizer, documents, Stages(progress, request.quiet)
    )
    after = run_model(request.out, request, tokenizer, documents, Stages(progress, request.quiet))
    retrieval = [
        pair_answers(length, before.right[length], after.right[length])
        for length in documents.questions
    ]
    tasks = []
    if before.probabilities is not None and after.probabilities is not None:
        probabilities = (before.probabilities, after.probabilities)
        metrics = compare_replies(before.replies, after.replies, probabilities)
        for metric, values in metrics.items():
            tasks.append(TaskRow(**vars(pair(*values)), task="replies", metric=metric))
    return Evaluation(
        model=request.model,
        out=request.out,
        text=documents.text,
        samples=documents.samples,
        retrieval=retrieval,
        positions=pair_by_position(before.losses, after.losses),
        tasks=[*tasks, *pair_by_task(before.harness, after.harness)],
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
        rule = f"must be at least {shortest} for a loss to measure"
        raise option_error("lengths", lengths[-1], rule)
    text, name = _read_text(tokenizer, request.text, lengths[-1] * samples)
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
    return Documents(name, samples, windows, questions, prompts)


def _read_text(tokenizer: Any, source: str | None, count: int) -> tuple[Tensor, str]:
    """About ``count`` tokens of the text, or all if it is shorter, and the text's name."""
    corpus = open_corpus(source, tokenizer, 0, "held_out", "text")
    documents, _ = corpus.documents(count * _BYTES_PER_TOKEN)
    pieces = list(tokenize(tokenizer, prefix_tokens(tokenizer), documents))
    if not sum(map(len, pieces)):
        raise InputError(
            f"{corpus.name} contains no text to measure on; choose another with --text"
        )
    return torch.cat(pieces), corpus.name


def _announce(request: EvalRequest, documents: Documents) -> None:
    windows = documents.windows
    work = [f"{len(windows)} windows of {windows.shape[1]} tokens", *request.tasks]
    if documents.questions:
        lengths = ", ".join(map(str, documents.questions))
        work.insert(0, f"{documents.samples} needles at each of {lengths} tokens")
    fewer = "for each model (fewer: --lengths, --samples)"
    print(f"{'; '.join(work)}, {fewer}", file=sys.stderr, flush=True)


def run_model(
    folder: str, request: EvalRequest, tokenizer: Any, documents: Documents, stages: Stages
) -> ModelResults:
    """All results of one model, which is loaded for this alone."""
    hide_bars(request.quiet)
    device = choose_device(request.device)
    with closing(open_checkpoint(folder)) as checkpoint:
        name = checkpoint.origin
        with stages(f"loading {name}"):
            dtype = compute_dtype(checkpoint, device, request.dtype)
            model = load_model(checkpoint, dtype, request.trust_remote_code).to(device).eval()
            attend_in_blocks(model, device)
        right = {}
        for length, questions in documents.questions.items():
            with stages("retrieval", len(questions), "document") as advance:
                right[length] = answer_questions(model, questions, advance)
        with stages("losses", len(documents.windows), "document") as advance:
            losses = token_losses(model, documents.windows, advance)
        replies = []
        probabilities = None
        if documents.prompts:
            prompts = documents.prompts
            with stages("replies", len(prompts), "document") as advance:
                batch = request.batch or _BATCH
                replies = write_replies(model, tokenizer, prompts, batch, advance)
            probabilities = next_token_probabilities(model, documents.windows)
        harness: HarnessScores = {}
        if request.harness_tasks:
            with stages(f"{name}: {', '.join(request.harness_tasks)}"):
                harness = run_harness(model, tokenizer, request)
    return ModelResults(right, losses, replies, probabilities, harness)


def pair(source: Tensor, student: Tensor) -> Paired:
    """The means of both models' values ``[n]`` and their mean difference with its interval."""
    difference = student.double() - source.double()
    return Paired(
        documents=len(difference),
        source=float(source.double().mean()),
        student=float(student.double().mean()),
        difference=float(difference.mean()),
        margin=margin(difference),
    )


def pair_answers(length: int, source: Tensor, student: Tensor) -> RetrievalRow:
    """The row of both models' right answers ``[n]``, each 0 or 1, at one length."""
    chance = 1 / CHOICES
    source_margin = margin(source.double())
    guesses = source_margin is None or float(source.double().mean()) - source_margin <= chance
    return RetrievalRow(
        **vars(pair(source, student)), task="needle", length=length, chance=chance, guesses=guesses
    )


def pair_by_position(source: Tensor, student: Tensor) -> list[PositionRow]:
    """Perplexities and excess loss from both models' losses ``[n, T - 1]``, for ranges of positions
    that double.
    """
    rows = []
    for start, end in stretch_bounds(source.shape[1] + 1):
        losses = pair(
            source[:, start - 1 : end - 1].mean(1), student[:, start - 1 : end - 1].mean(1)
        )
        rows.append(
            PositionRow(
                documents=losses.documents,
                source=perplexity(losses.source),
                student=perplexity(losses.student),
                difference=losses.difference,
                margin=losses.margin,
                start=start,
                end=end,
            )
        )
    return rows


def pair_by_task(source: HarnessScores, student: HarnessScores) -> Sequence[TaskRow]:
    """A row for every metric of the harness, over the documents that both models have scores of."""
    rows = []
    for (task, metric), scores in source.items():
        others = student.get((task, metric), {})
        shared = sorted(scores.keys() & others.keys())
        if shared:
            means = pair(
                torch.tensor([scores[document] for document in shared]),
                torch.tensor([others[document] for document in shared]),
            )
            rows.append(TaskRow(**vars(means), task=task, metric=metric))
    return rows
