"""``kvfold eval``: compare a source and its conversion on the same documents, with one model in
memory at a time.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import margin, stretch_bounds
from kvfold.attention.drift.report import perplexity
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.measure import eval_tasks
from kvfold.convert.measure.eval_tasks import (
    CHOICES,
    TASKS,
    Question,
    TaskScores,
    answers,
    draw_questions,
)
from kvfold.convert.measure.losses import token_losses
from kvfold.convert.measure.replies import (
    LETTERS,
    NO_LETTER,
    Prompt,
    draft_probabilities,
    draw_prompts,
    letter,
    prompt_tokens,
    reply_scores,
    score,
    write_replies,
)
from kvfold.convert.measure.ruler import draw_ruler
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import BUILT_IN_TASKS, RULER, EvalRequest
from kvfold.convert.sizes import table
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import attend_in_blocks, hide_bars, load_config
from kvfold.convert.text.corpus import check_sources, open_corpus
from kvfold.convert.text.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    prefix_tokens,
    render,
    tokenize,
)

# Tokens. Shorter texts have no room for eight hidden sentences.
_SHORTEST = 256
_SAMPLES = {"cpu": 16, "cuda": 32}
# Tokens by default: retrieval at 8192 took hours for a model of 135 M parameters on one core.
_LONGEST_CONTEXT = {"cpu": 1024}
# More than any language needs, so that enough text is read.
_BYTES_PER_TOKEN = 16
_BATCH = 8  # replies written together: 5 times as fast as one by one on a CPU
_EVAL_WIDTHS = (27, 9, 7, 7, 17)

# By task and length; None if the task has no lengths.
Questions = dict[tuple[str, int], list[Question]]
Prompts = dict[tuple[str, int | None], list[Prompt]]


@dataclass(frozen=True)
class Paired:
    """The means of ``source`` and ``student`` over ``documents``, and the mean ``difference`` in
    pairs.

    ``margin`` is half the width of the difference's 95 % interval, or None for one document.
    """

    documents: int
    source: float
    student: float
    difference: float
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class AnswerRow(Paired):
    """The share of right answers in documents of ``length`` tokens (None: a short prompt).

    A guess is right in ``chance`` of them. ``guesses``: the 95 % interval of the source's share
    reaches down to this, so that the difference says nothing about the conversion.
    """

    task: str
    length: int | None
    chance: float
    guesses: bool


@dataclass(frozen=True, kw_only=True)
class PositionRow(Paired):
    """The perplexities of tokens ``start`` to ``end``; ``difference`` is the excess loss, in nats
    per token.
    """

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class TaskRow(Paired):
    """A metric of ``replies`` or of a task of lm-evaluation-harness."""

    task: str
    metric: str


# Fields of a row that have another name in JSON.
_POSITION_KEYS = {"start": "from", "end": "to", "difference": "excess"}


@dataclass(frozen=True)
class Evaluation:
    """The results: ``retrieval`` by task and length, losses by ``positions``, and the other
    ``tasks``.

    ``answers`` are the built-in tasks with right answers, ``letters`` the counts of the letters
    that the source and the result answered in ``choice``.
    """

    model: str
    out: str
    text: str
    samples: int
    retrieval: list[AnswerRow]
    positions: list[PositionRow]
    tasks: list[TaskRow]
    answers: list[AnswerRow] = field(default_factory=list)
    letters: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        values = asdict(self)
        values["positions"] = [
            {_POSITION_KEYS.get(name, name): value for name, value in row.items()}
            for row in values["positions"]
        ]
        return values

    def table(self) -> str:
        """The results as text, with a section for each kind of measurement."""
        rows: list[Sequence[str]] = []
        if self.retrieval:
            rows.append(("retrieval, right answers", "documents", "source", "result", "difference"))
            rows += map(_answer_cells, self.retrieval)
            rows += [(f"(guessing is right in {100 / CHOICES:.1f} %; filler: {self.text})",), ("",)]
        rows.append(("perplexity by position", "windows", "source", "result", "excess, nats"))
        rows += [
            _cells(f"tokens {row.start} to {row.end}", row, ".2f", ".4f") for row in self.positions
        ]
        if self.answers:
            rows += [
                ("",),
                ("right answers, written", "documents", "source", "result", "difference"),
            ]
            rows += map(_answer_cells, self.answers)
        if self.letters:
            counted = (
                f"{name} {', '.join(map(str, counts.values()))}"
                for name, counts in self.letters.items()
            )
            rows.append((f"(letters {', '.join([*LETTERS, NO_LETTER])}: {'; '.join(counted)})",))
        if self.tasks:
            rows += [("",), ("task", "documents", "source", "result", "difference")]
            rows += [_cells(f"{row.task}, {row.metric}", row, ".3f", ".3f") for row in self.tasks]
        title = (
            f"{self.out} against {self.model}; differences paired by document, with 95 % intervals"
        )
        return "\n".join([title, "", *table(rows, _EVAL_WIDTHS)])


@dataclass(frozen=True)
class _Examined:
    """One model's right answers by task and length, losses ``[N, T - 1]`` on windows, replies and
    harness scores.

    ``drafts`` are next-token probabilities for the acceptance rate, None without the task
    ``replies``.
    """

    right: dict[tuple[str, int], Tensor]
    losses: Tensor
    replies: dict[tuple[str, int | None], list[Tensor]]
    drafts: Tensor | None
    harness: TaskScores


def _cells(name: str, row: Paired, mean: str, change: str, scale: int = 1) -> tuple[str, ...]:
    """A table row with means in format ``mean``, difference and margin in ``change``; scale 100
    means percent.
    """
    difference = f"{scale * row.difference:+{change}}"
    difference += "" if row.margin is None else f" ± {scale * row.margin:{change}}"
    means = [
        f"{scale * value:{mean}}" + (" %" if scale == 100 else "")
        for value in (row.source, row.student)
    ]
    return name, f"{row.documents}", *means, difference


def _answer_cells(row: AnswerRow) -> tuple[str, ...]:
    """A table row with shares in percent; without the difference if the source guesses."""
    cells = _cells(
        row.task + (f" at {row.length} tokens" if row.length else ""), row, ".1f", ".1f", 100
    )
    return (*cells[:-1], "the source guesses") if row.guesses else cells


def eval_checkpoints(request: EvalRequest, progress: Progress | None = None) -> Evaluation:
    """Compare ``out`` with ``model``: retrieval at ``lengths``, loss by position, and ``tasks``.

    Differences are paired by document, with 95 % intervals. The default ``lengths`` are the model's
    context (on a CPU at most 1024 tokens) and 1/2, 1/4 and 1/8 of it. ``samples`` is the number of
    documents per length and per built-in task (default 32, on a CPU 16), ``limit`` the number per
    task of lm-evaluation-harness. Words are hidden in ``text``, which the losses are also measured
    on; the default is held-out text that ships with kvfold. ``progress`` works as in
    `convert_checkpoint`, for each model with the stages ``retrieval`` (documents, for each task and
    length), ``losses`` (documents) and ``replies`` (documents, for each task and length). Raises
    InputError for an invalid request or checkpoint.

    >>> request = EvalRequest(demo_folder(), demo_folder(), lengths=[256], samples=2)
    >>> found = eval_checkpoints(request)
    >>> [(row.task, row.length, row.difference) for row in found.retrieval]
    [('needle', 256, 0.0), ('keys', 256, 0.0)]
    """
    if request.harness_tasks:
        eval_tasks.check_harness(request.harness_tasks)
    check_sources(filter(None, [request.text]), "text")
    with closing(open_checkpoint(request.model)) as source:
        place = choose_device(request.device)
        samples = request.samples or _SAMPLES[place.type]
        tokenizer = load_tokenizer(source, request.trust_remote_code, "an evaluation")
        config = load_config(source, request.trust_remote_code)
        context = getattr(config, "max_position_embeddings", None) or 2048
        longest = min(context, _LONGEST_CONTEXT.get(place.type, context))
        lengths = sorted(set(request.lengths)) or sorted(
            {max(_SHORTEST, longest // part) for part in (8, 4, 2, 1)}
        )
        if request.lengths and lengths[-1] > context:
            rule = f"must not exceed the {context} positions supported by {source.origin}"
            raise option_error("lengths", lengths[-1], rule)
        lengths = [min(length, context) for length in lengths]
        body, name = _tokens(tokenizer, request.text, lengths[-1] * samples)
        check_vocabulary(body, config.vocab_size, source.origin)
    asked = [(task, length) for task in TASKS for length in lengths] if request.retrieval else []
    questions = {key: draw_questions(tokenizer, body, *key, samples, request.seed) for key in asked}
    prompts = _prompts(tokenizer, request, lengths if request.lengths else lengths[-1:], samples)
    # A model that was trained with a BOS token in front loses much without it.
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64)
    if lengths[-1] < max(2, len(prefix) + 1):
        raise option_error(
            "lengths",
            lengths[-1],
            f"must be at least {max(2, len(prefix) + 1)} for a loss to measure",
        )
    inner = min(lengths[-1] - len(prefix), len(body))
    windows = body[: len(body) // inner * inner].view(-1, inner)[:samples]
    windows = torch.cat([prefix.expand(len(windows), -1), windows], dim=1)
    if not request.quiet:
        parts = [f"{len(windows)} windows of {windows.shape[1]} tokens", *request.tasks]
        if asked:
            spelled = ", ".join(map(str, lengths))
            parts.insert(0, f"{samples} documents each of {', '.join(TASKS)} at {spelled} tokens")
        fewer = "for each model (fewer: --lengths, --samples)"
        print(f"{'; '.join(parts)}, {fewer}", file=sys.stderr, flush=True)
    # One after the other: two models of 70B parameters fit into few machines.
    before, after = (
        _examine(
            model,
            request,
            place,
            tokenizer,
            questions,
            prompts,
            windows,
            Stages(progress, request.quiet),
        )
        for model in (request.model, request.out)
    )
    retrieval = [
        answer_row(task, length, 1 / CHOICES, before.right[task, length], right)
        for (task, length), right in after.right.items()
    ]
    both = eval_tasks.paired_scores(before.harness, after.harness)
    if before.drafts is not None and after.drafts is not None:
        key = ("replies", None)
        drafts = (before.drafts, after.drafts)
        both = [*reply_scores(before.replies[key], after.replies[key], drafts), *both]
    scored = [
        TaskRow(**vars(paired(one, other)), task=task, metric=metric)
        for task, metric, one, other in both
    ]
    positions = by_position(before.losses, after.losses)
    answered = _answered(tokenizer, prompts, before, after)
    return Evaluation(
        request.model, request.out, name, samples, retrieval, positions, scored, *answered
    )


def _prompts(tokenizer: Any, request: EvalRequest, lengths: list[int], samples: int) -> Prompts:
    """The prompts of the built-in tasks; those of RULER at each of ``lengths``."""

    def size(prompt: Prompt) -> int:
        return len(prompt_tokens(tokenizer, prompt))

    prompts: Prompts = {}
    for task in request.tasks:
        if task in RULER:
            for length in lengths:
                prompts[task, length] = draw_ruler(task, length, samples, request.seed, size)
        elif task in BUILT_IN_TASKS:
            prompts[task, None] = draw_prompts(task, samples, request.seed)
    return prompts


def _answered(
    tokenizer: Any, prompts: Prompts, before: _Examined, after: _Examined
) -> tuple[list[AnswerRow], dict[str, dict[str, int]]]:
    """The rows of the tasks with right answers, and the counts of both models' letters in
    ``choice``.
    """
    rows = []
    letters = {}
    for (task, length), asked in prompts.items():
        if task == "replies":
            continue
        texts = {
            name: [
                tokenizer.decode(reply, skip_special_tokens=True)
                for reply in model.replies[task, length]
            ]
            for name, model in (("source", before), ("result", after))
        }
        scores = [
            torch.tensor([score(task, *pair) for pair in zip(asked, each, strict=True)])
            for each in texts.values()
        ]
        rows.append(
            answer_row(task, length, sum(prompt.chance for prompt in asked) / len(asked), *scores)
        )
        if task == "choice":
            counts = {name: Counter(map(letter, each)) for name, each in texts.items()}
            letters = {
                name: {each: counted[each] for each in (*LETTERS, NO_LETTER)}
                for name, counted in counts.items()
            }
    return rows, letters


def _tokens(tokenizer: Any, text: str | None, wanted: int) -> tuple[Tensor, str]:
    """About ``wanted`` tokens of the text, or all if it is shorter, and the text's name."""
    corpus = open_corpus(text, partial(render, tokenizer), 0, "held_out", "text")
    documents, _ = corpus.documents(wanted * _BYTES_PER_TOKEN)
    pieces = list(tokenize(tokenizer, prefix_tokens(tokenizer), documents))
    if not sum(map(len, pieces)):
        raise InputError(
            f"{corpus.name} contains no text to measure on; choose another with --text"
        )
    return torch.cat(pieces), corpus.name


def _examine(
    folder: str,
    request: EvalRequest,
    device: torch.device,
    tokenizer: Any,
    questions: Questions,
    prompts: Prompts,
    windows: Tensor,
    stages: Stages,
) -> _Examined:
    """All measurements of one model."""
    with closing(open_checkpoint(folder)) as checkpoint:
        name = checkpoint.origin
        hide_bars(request.quiet)
        with stages(f"loading {name}"):
            dtype = compute_dtype(checkpoint, device, request.dtype)
            model = load_model(checkpoint, dtype, request.trust_remote_code).to(device).eval()
            attend_in_blocks(model, device)
        right = {}
        for (task, length), asked in questions.items():
            with stages("retrieval", len(asked), "document") as advance:
                right[task, length] = answers(model, asked, advance)
        with stages("losses", len(windows), "document") as advance:
            losses = token_losses(model, windows, advance)
        replies = {}
        for key, to_write in prompts.items():
            tokens = [prompt_tokens(tokenizer, prompt) for prompt in to_write]
            with stages("replies", len(tokens), "document") as advance:
                most = to_write[0].most
                replies[key] = write_replies(
                    model, tokenizer, tokens, most, request.batch or _BATCH, advance
                )
        drafts = draft_probabilities(model, windows) if "replies" in request.tasks else None
        scores: TaskScores = {}
        if request.harness_tasks:
            with stages(f"{name}: {', '.join(request.harness_tasks)}"):
                scores = eval_tasks.harness_scores(model, tokenizer, request)
        return _Examined(right, losses, replies, drafts, scores)


def answer_row(
    task: str, length: int | None, chance: float, before: Tensor, after: Tensor
) -> AnswerRow:
    """The row of both models' scores ``[n]``, 0 to 1, in one task."""
    within = margin(before.double())
    guesses = within is None or float(before.double().mean()) - within <= chance
    return AnswerRow(
        **vars(paired(before, after)), task=task, length=length, chance=chance, guesses=guesses
    )


def paired(before: Tensor, after: Tensor) -> Paired:
    """The means of both, their mean difference, and half the width of its 95 % interval (None for
    one document).
    """
    between = after.double() - before.double()
    source, student = (float(each.double().mean()) for each in (before, after))
    return Paired(len(between), source, student, float(between.mean()), margin(between))


def by_position(before: Tensor, after: Tensor) -> list[PositionRow]:
    """Perplexities and excess loss from both models' losses ``[n, T - 1]``, for ranges of positions
    that double.
    """
    rows = []
    for start, end in stretch_bounds(before.shape[1] + 1):
        both = [losses[:, start - 1 : end - 1].mean(1) for losses in (before, after)]
        pair = paired(both[0], both[1])
        pair = replace(pair, source=perplexity(pair.source), student=perplexity(pair.student))
        rows.append(PositionRow(**vars(pair), start=start, end=end))
    return rows
