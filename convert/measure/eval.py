"""``kvfold eval``: a source and its conversion on the same documents, one model in memory at a time."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import margin
from kvfold.attention.drift.report import perplexity
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError, opt
from kvfold.convert.measure import eval_tasks
from kvfold.convert.measure.eval_tasks import CHOICES, TASKS, Question, QuestionMaker, Scores, answers
from kvfold.convert.measure.losses import stretches, token_losses
from kvfold.convert.options import takes
from kvfold.convert.progress import Stages
from kvfold.convert.request import EvalRequest
from kvfold.convert.stream.stock import hide_bars, load_model
from kvfold.convert.text.corpus import check_sources, open_corpus
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer, prefix_tokens, render, tokenize

# Tokens. Shorter texts have no room for eight hidden sentences.
_SHORTEST = 256
_SAMPLES = {"cpu": 16, "cuda": 32}
# Tokens by default: retrieval at 8192 took hours for a model of 135 M parameters on one core.
_LONGEST = {"cpu": 1024}
# More than any language needs, so that enough text is read.
_BYTES_PER_TOKEN = 16
# Times the share of right answers by guessing: below it 32 documents cannot tell a model from a guess.
_LEARNED = 3


@dataclass(frozen=True)
class Evaluation:
    """Rows of ``retrieval`` by task and length, of losses by ``positions``, and of the harness's ``tasks``.

    Every row has the number of ``documents``, the means of ``source`` and ``student``, the mean of their ``difference``
    (``excess`` nats per token by position, where the means are perplexities), and half the width of its 95 % interval,
    ``margin``, which is None for one document.
    """

    model: str
    out: str
    text: str
    samples: int
    retrieval: list[dict[str, Any]]
    positions: list[dict[str, Any]]
    tasks: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))

    def table(self) -> str:
        """The result as text: a part for each kind of measurement."""
        lines = [f"{self.out} against {self.model}; differences paired by document, with 95 % intervals", ""]
        if self.retrieval:
            lines.append(_heading("retrieval, right answers", "documents", "difference"))
            for row in self.retrieval:
                both = [f"{100 * row[name]:.1f} %" for name in ("source", "student")]
                lines.append(_line(f"{row['task']} at {row['length']} tokens", row, both, "difference", 100, ".1f"))
            lines.append(f"(guessing is right in {100 / CHOICES:.1f} %; filler: {self.text})")
            if max(row["source"] for row in self.retrieval) <= _LEARNED / CHOICES:
                lines.append("(the source hardly does more than guess: these rows say nothing about the conversion)")
            lines.append("")
        lines.append(_heading("perplexity by position", "windows", "excess, nats"))
        for row in self.positions:
            both = [f"{row[name]:.2f}" for name in ("source", "student")]
            lines.append(_line(f"tokens {row['from']} to {row['to']}", row, both, "excess", 1, ".4f"))
        if self.tasks:
            lines += ["", _heading("task", "documents", "difference")]
            for row in self.tasks:
                both = [f"{row[name]:.3f}" for name in ("source", "student")]
                lines.append(_line(f"{row['task']}, {row['metric']}", row, both, "difference", 1, ".3f"))
        return "\n".join(lines)


def _heading(name: str, counted: str, difference: str) -> str:
    return f"{name:28} {counted:>9} {'source':>8} {'result':>8} {difference:>18}"


def _line(name: str, row: dict[str, Any], both: Sequence[str], key: str, scale: float, form: str) -> str:
    change = f"{scale * row[key]:+{form}}"
    change += "" if row["margin"] is None else f" ± {scale * row['margin']:{form}}"
    return f"{name:28} {row['documents']:9} {both[0]:>8} {both[1]:>8} {change:>18}"


@dataclass(frozen=True)
class _Exam:
    """The questions by task and length, ``windows [N, T]`` of tokens and tasks of the harness, and how to run a model.

    Both models get the same.
    """

    tokenizer: Any
    questions: dict[tuple[str, int], list[Question]]
    windows: Tensor
    tasks: Sequence[str]
    limit: int | None
    batch: int
    seed: int
    device: torch.device
    dtype: str
    trust_remote_code: bool
    quiet: bool

    def description(self) -> str:
        """For stderr: the documents, and how to have fewer."""
        parts = [f"{len(self.windows)} windows of {self.windows.shape[1]} tokens", *self.tasks]
        if self.questions:
            lengths = ", ".join(str(length) for length in sorted({length for _, length in self.questions}))
            count = len(next(iter(self.questions.values())))
            parts.insert(0, f"{count} documents each of {', '.join(TASKS)} at {lengths} tokens")
        return f"{'; '.join(parts)}, for each model (fewer: {opt('lengths')}, {opt('samples')})"


@dataclass(frozen=True)
class _Answers:
    """One model's right answers by task and length, losses ``[n, T - 1]``, and scores of the harness."""

    right: dict[tuple[str, int], Tensor]
    losses: Tensor
    scores: Scores


@takes(EvalRequest)
def eval_checkpoints(request: EvalRequest) -> Evaluation:
    """Compare ``out`` with ``model``: retrieval at ``lengths``, loss by position, and ``tasks`` of the harness.

    Differences are paired by document, with 95 % intervals. ``lengths`` are by default the context (on a CPU at most
    1024 tokens) and its half, quarter and eighth. ``samples``: documents of each length, by default 32, on a CPU 16;
    ``limit``: of each task. Filler and losses are of ``text``, or of held-out text that ships with kvfold. Raises
    InputError.

    >>> found = eval_checkpoints(demo_folder(), demo_folder(), lengths=[256], samples=2)
    >>> [(row["task"], row["length"], row["difference"]) for row in found.retrieval]
    [('needle', 256, 0.0), ('keys', 256, 0.0)]
    """
    if request.tasks:
        eval_tasks.check_harness()
    check_sources(filter(None, [request.text]), "text")
    source, place = open_checkpoint(request.model), choose_device(request.device)
    samples = request.samples or _SAMPLES[place.type]
    try:
        tokenizer = load_tokenizer(source, request.trust_remote_code, "an evaluation")
        context = source.config.get("max_position_embeddings") or 2048
        chosen = chosen_lengths(request.lengths, context, source.origin, place)
        body, name = _tokens(tokenizer, request.text, max(chosen) * samples)
        check_vocabulary(body, source.config.get("vocab_size", int(body.max()) + 1), source.origin)
    finally:
        source.close()
    questions = _questions(tokenizer, body, chosen, samples, request.seed) if request.retrieval else {}
    windows = _windows(tokenizer, body, max(chosen), samples)
    exam = _Exam(
        tokenizer, questions, windows, request.tasks, request.limit, request.batch, request.seed, place, request.dtype,
        request.trust_remote_code, request.quiet,
    )  # fmt: skip
    if not request.quiet:
        print(exam.description(), file=sys.stderr, flush=True)
    # One after the other: two models of 70B parameters fit into few machines.
    before, after = _examine(request.model, exam), _examine(request.out, exam)
    asked = [
        {"task": task, "length": length, "chance": 1 / CHOICES, **paired(before.right[key], after.right[key])}
        for key in questions
        for task, length in [key]
    ]
    scored = [
        {"task": task, "metric": metric, **paired(one, other)}
        for task, metric, one, other in eval_tasks.paired_scores(before.scores, after.scores)
    ]
    return Evaluation(
        request.model, request.out, name, samples, asked, by_position(before.losses, after.losses), scored
    )


def chosen_lengths(lengths: Sequence[int], context: int, origin: str, device: torch.device) -> list[int]:
    """``lengths``, or those of a model with ``context`` positions. Raises InputError for a length beyond these."""
    longest = min(context, _LONGEST.get(device.type, context))
    chosen = sorted(set(lengths)) or sorted({max(_SHORTEST, longest // part) for part in (8, 4, 2, 1)})
    if lengths and chosen[-1] > context:
        raise InputError(f"{opt('lengths', chosen[-1])}: longer than the {context} positions that {origin} is made for")
    return [min(length, context) for length in chosen]


def _tokens(tokenizer: Any, text: str | None, wanted: int) -> tuple[Tensor, str]:
    """Tokens of the text end to end, about as many as wanted or all there are, and its name."""
    corpus = open_corpus(text, partial(render, tokenizer), 0, "held_out", "text")
    documents, _ = corpus.documents(wanted * _BYTES_PER_TOKEN)
    pieces = list(tokenize(tokenizer, prefix_tokens(tokenizer), documents))
    if not sum(map(len, pieces)):
        raise InputError(f"{corpus.name}: expected text, found none")
    return torch.cat(pieces), corpus.name


def _questions(
    tokenizer: Any, body: Tensor, lengths: Sequence[int], count: int, seed: int
) -> dict[tuple[str, int], list[Question]]:
    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    makers = {task: QuestionMaker(task, encode, prefix_tokens(tokenizer), body) for task in TASKS}
    return {(task, length): maker.draw(length, count, seed) for task, maker in makers.items() for length in lengths}


def _windows(tokenizer: Any, body: Tensor, length: int, count: int) -> Tensor:
    """At most ``count`` stretches of the text that do not overlap, ``[n, length]``, each behind the prefix."""
    # A model that was trained with a BOS token in front loses much without it.
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64)
    inner = min(length - len(prefix), len(body))
    rows = body[: len(body) // inner * inner].view(-1, inner)[:count]
    return torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def _examine(folder: str | os.PathLike[str], exam: _Exam) -> _Answers:
    """Load the model in ``folder`` and give it the exam."""
    checkpoint, stages = open_checkpoint(folder), Stages(quiet=exam.quiet)
    name = checkpoint.origin
    try:
        hide_bars(exam.quiet)
        with stages(f"loading {name}"):
            dtype = compute_dtype(checkpoint, exam.device, exam.dtype)
            model = load_model(checkpoint, dtype, exam.trust_remote_code).to(exam.device).eval()
        right = {}
        for (task, length), asked in exam.questions.items():
            with stages(f"{name}: {task} at {length} tokens,", len(asked), "document") as advance:
                right[task, length] = answers(model, asked, advance)
        with stages(f"{name}: loss by position,", len(exam.windows), "document") as advance:
            losses = token_losses(model, exam.windows, advance)
        scores: Scores = {}
        if exam.tasks:
            with stages(f"{name}: {', '.join(exam.tasks)}"):
                scores = eval_tasks.harness_scores(model, exam.tokenizer, exam.tasks, exam.limit, exam.batch, exam.seed)
        return _Answers(right, losses, scores)
    finally:
        checkpoint.close()


def paired(before: Tensor, after: Tensor, difference: str = "difference") -> dict[str, Any]:
    """Means of both and of their difference, and half the width of its 95 % interval (None for one document)."""
    between = after.double() - before.double()
    means = {"source": float(before.double().mean()), "student": float(after.double().mean())}
    return {"documents": len(between), **means, difference: float(between.mean()), "margin": margin(between)}


def by_position(before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Perplexities and excess losses of both models' ``losses [n, T - 1]``, for stretches of positions that double."""
    rows = []
    for start, end in stretches(before.shape[1] + 1):
        both = [losses[:, start - 1 : end - 1].mean(1) for losses in (before, after)]
        pair = paired(both[0], both[1], "excess")
        pair |= {name: perplexity(pair[name]) for name in ("source", "student")}
        rows.append({"from": start, "to": end, **pair})
    return rows
