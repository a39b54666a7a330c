"""``kvfold eval``: a source and its conversion on the same documents, one model in memory at a time."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import margin
from kvfold.attention.drift.report import perplexity
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.console import duration
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError
from kvfold.convert.measure import harness
from kvfold.convert.measure.positions import stretches, token_losses
from kvfold.convert.measure.retrieval import CHOICES, TASKS, Question, Questions, answers
from kvfold.convert.progress import stage
from kvfold.convert.stream.loading import hide_bars, load_model
from kvfold.convert.text.documents import open_corpus
from kvfold.convert.text.sources import check_sources
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer, prefix_tokens, renderer, tokenize

_SHORTEST = 256  # tokens of a default length
_SAMPLES = {"cpu": 16, "cuda": 32}
_LONGEST = {"cpu": 1024}  # tokens by default: retrieval at 8192 took hours for a model of 135 M parameters on one core
_BYTES_PER_TOKEN = 16
_LEARNED = 3  # times the share of right answers by guessing: below it 32 documents cannot tell a model from a guess


@dataclass(frozen=True)
class Found:
    """What one model did: right answers by task and length, losses ``[n, T - 1]``, and the harness's scores."""

    right: dict[tuple[str, int], Tensor]
    losses: Tensor
    scores: harness.Scores


@dataclass(frozen=True)
class Test:
    """What both models are asked: questions by task and length, ``windows [N, T]`` of tokens, tasks of the harness."""

    tokenizer: Any
    asked: dict[tuple[str, int], list[Question]]
    windows: Tensor
    tasks: Sequence[str]
    limit: int | None
    batch: int
    seed: int


@dataclass(frozen=True)
class Place:
    """Where and how a model is run."""

    device: torch.device
    dtype: str
    trust_remote_code: bool
    quiet: bool

    def shown(self, name: str, documents: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda amount: None) if self.quiet else stage(name, documents, "document")


def eval_checkpoints(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    lengths: Sequence[int] = (),
    samples: int | None = None,
    text: str | os.PathLike[str] | None = None,
    retrieval: bool = True,
    batch: int = 1,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Compare ``out`` with ``model``: retrieval at ``lengths``, loss by position, and ``tasks`` of the harness.

    Differences are paired by document, with 95 % intervals. ``lengths`` are by default the context (on a CPU at most
    1024 tokens) and its half, quarter and eighth. ``samples``: documents of each length, by default 32, on a CPU 16;
    ``limit``: of each task. Filler and losses are of ``text``, or of held-out text that ships with kvfold. Returns
    plain JSON values. Raises InputError.

    >>> found = eval_checkpoints(demo_folder(), demo_folder(), lengths=[256], samples=2)
    >>> [(row["task"], row["length"], row["difference"]) for row in found["retrieval"]]
    [('needle', 256, 0.0), ('keys', 256, 0.0)]
    """
    if tasks:
        harness.check_harness()
    texts = [] if text is None else [os.fspath(text)]
    check_sources(texts, "--text")
    source = open_checkpoint(model)
    place = Place(choose_device(device), dtype, trust_remote_code, quiet)
    samples = samples or _SAMPLES[place.device.type]
    try:
        tokenizer = load_tokenizer(source, trust_remote_code, "an evaluation")
        context = source.config.get("max_position_embeddings") or 2048
        chosen = _lengths(lengths, context, source.origin, place.device)
        body, name = _tokens(tokenizer, next(iter(texts), None), max(chosen) * samples)
        check_vocabulary(body, source.config.get("vocab_size", int(body.max()) + 1), source.origin)
        asked = _asked(tokenizer, body, chosen, samples, seed) if retrieval else {}
        windows = _windows(tokenizer, body, max(chosen), samples)
    finally:
        source.close()

    test = Test(tokenizer, asked, windows, tasks, limit, batch, seed)
    before, after = _measure(model, test, place, first=True), _measure(out, test, place, first=False)
    return {
        "model": str(model),
        "out": str(out),
        "text": name,
        "samples": samples,
        "retrieval": [_retrieved(key, before.right[key], after.right[key]) for key in asked],
        "positions": _by_position(before.losses, after.losses),
        "tasks": [_scored(*row) for row in harness.paired(before.scores, after.scores)],
    }


def _lengths(lengths: Sequence[int], context: int, origin: str, device: torch.device) -> list[int]:
    longest = min(context, _LONGEST.get(device.type, context))
    chosen = sorted(set(lengths)) or sorted({max(_SHORTEST, longest // part) for part in (8, 4, 2, 1)})
    if lengths and chosen[-1] > context:
        raise InputError(f"--lengths {chosen[-1]}: longer than the {context} positions that {origin} is made for")
    return [min(length, context) for length in chosen]


def _tokens(tokenizer: Any, text: str | None, wanted: int) -> tuple[Tensor, str]:
    """Tokens of the text end to end, about as many as wanted or all there are, and its name."""
    corpus = open_corpus(text, renderer(tokenizer), 0, "held_out", "--text")
    documents, _ = corpus.documents(wanted * _BYTES_PER_TOKEN)
    found = list(tokenize(tokenizer, prefix_tokens(tokenizer), documents))
    if not sum(map(len, found)):
        raise InputError(f"{corpus.name}: expected text, found none")
    return torch.cat(found), corpus.name


def _asked(
    tokenizer: Any, body: Tensor, lengths: Sequence[int], count: int, seed: int
) -> dict[tuple[str, int], list[Question]]:
    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    made = {task: Questions(task, encode, prefix_tokens(tokenizer), body) for task in TASKS}
    return {(task, length): each.draw(length, count, seed) for task, each in made.items() for length in lengths}


def _windows(tokenizer: Any, body: Tensor, length: int, count: int) -> Tensor:
    """At most ``count`` stretches of the text that do not overlap, ``[n, length]``, each behind the prefix."""
    prefix = torch.tensor(prefix_tokens(tokenizer), dtype=torch.int64)
    inner = min(length - len(prefix), len(body))
    rows = body[: len(body) // inner * inner].view(-1, inner)[:count]
    return torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def _measure(folder: str | os.PathLike[str], test: Test, place: Place, *, first: bool) -> Found:
    """What the model in ``folder`` does; for the ``first`` of the two an estimate of the time on stderr."""
    checkpoint = open_checkpoint(folder)
    name = checkpoint.origin
    try:
        hide_bars(place.quiet)
        with place.shown(f"loading {name}"):
            dtype = compute_dtype(checkpoint, place.device, place.dtype)
            model = load_model(checkpoint, dtype, place.trust_remote_code).to(place.device).eval()
        if first and not place.quiet:
            print(_announcement(model, test), file=sys.stderr, flush=True)
        right = {}
        for (task, length), asked in test.asked.items():
            with place.shown(f"{name}: {task} at {length} tokens,", len(asked)) as advance:
                right[task, length] = answers(model, asked, advance)
        with place.shown(f"{name}: loss by position,", len(test.windows)) as advance:
            losses = token_losses(model, test.windows, advance)
        scores: harness.Scores = {}
        if test.tasks:
            with place.shown(f"{name}: {', '.join(test.tasks)}"):
                scores = harness.scores(model, test.tokenizer, test.tasks, test.limit, test.batch, test.seed)
        return Found(right, losses, scores)
    finally:
        checkpoint.close()


def _announcement(model: Any, test: Test) -> str:
    """What is measured, and about how long both models will take."""
    lengths = sorted({length for _, length in test.asked})
    sizes = [length for (_, length), asked in test.asked.items() for _ in asked]
    sizes += [test.windows.shape[1]] * len(test.windows)
    seconds = 2 * sum(map(_document_seconds(model, test.windows), sizes))
    parts = [f"{len(test.windows)} windows of {test.windows.shape[1]} tokens"]
    if lengths:
        count = len(next(iter(test.asked.values())))
        parts.insert(0, f"{count} documents each of {', '.join(TASKS)} at {', '.join(map(str, lengths))} tokens")
    beside = f", and the time of {', '.join(test.tasks)}" if test.tasks else ""
    return f"{'; '.join(parts)}: about {duration(seconds)} for both models{beside} (fewer: --lengths, --samples)"


@torch.no_grad()
def _document_seconds(model: Any, windows: Tensor) -> Callable[[int], float]:
    """Seconds by the length of a document, ``a T + b T^2``, from two short ones after a first that warms up."""

    def timed(length: int) -> float:
        tokens = windows[:1, :length].to(model.device)
        started = time.monotonic()
        float(model(input_ids=tokens, logits_to_keep=1).logits[0, -1, 0])
        return time.monotonic() - started

    short = min(_SHORTEST, windows.shape[1])
    long = min(2 * short, windows.shape[1])
    _, once, twice = (timed(length) for length in (short, short, long))
    square = max(0.0, (twice / long - once / short) / (long - short)) if long > short else 0.0
    linear = max(0.0, once / short - square * short)
    return lambda length: linear * length + square * length**2


def _pair(before: Tensor, after: Tensor, difference: str = "difference") -> dict[str, Any]:
    """Means of both and of their difference, and half the width of its 95 % interval (None for one document)."""
    between = after.double() - before.double()
    means = {"source": float(before.double().mean()), "student": float(after.double().mean())}
    return {"documents": len(between), **means, difference: float(between.mean()), "margin": margin(between)}


def _retrieved(key: tuple[str, int], before: Tensor, after: Tensor) -> dict[str, Any]:
    return {"task": key[0], "length": key[1], "chance": 1 / CHOICES, **_pair(before, after)}


def _by_position(before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    rows = []
    for start, end in stretches(before.shape[1] + 1):
        both = [losses[:, start - 1 : end - 1].mean(1) for losses in (before, after)]
        pair = _pair(both[0], both[1], "excess")
        pair |= {name: perplexity(pair[name]) for name in ("source", "student")}
        rows.append({"from": start, "to": end, **pair})
    return rows


def _scored(task: str, metric: str, before: Tensor, after: Tensor) -> dict[str, Any]:
    return {"task": task, "metric": metric, **_pair(before, after)}


def eval_table(found: dict[str, Any]) -> str:
    """The result as text: a part for each kind of measurement."""
    lines = [f"{found['out']} against {found['model']}; differences paired by document, with 95 % intervals", ""]
    if found["retrieval"]:
        lines += [f"{'retrieval, right answers':28} {'documents':>9} {'source':>8} {'result':>8} {'difference':>18}"]
        for row in found["retrieval"]:
            name = f"{row['task']} at {row['length']} tokens"
            lines.append(f"{name:28} {row['documents']:9} " + _cells(row, 100, ".1f", " %"))
        lines += [f"(guessing is right in {100 / CHOICES:.1f} %; filler: {found['text']})", *_guessed(found), ""]
    lines += [f"{'perplexity by position':28} {'windows':>9} {'source':>8} {'result':>8} {'excess, nats':>18}"]
    for row in found["positions"]:
        name = f"tokens {row['from']} to {row['to']}"
        excess = _change(row["excess"], row["margin"], 1, ".4f", "")
        lines.append(f"{name:28} {row['documents']:9} {row['source']:8.2f} {row['student']:8.2f} {excess:>18}")
    if found["tasks"]:
        lines += ["", f"{'task':28} {'documents':>9} {'source':>8} {'result':>8} {'difference':>18}"]
        for row in found["tasks"]:
            name = f"{row['task']}, {row['metric']}"
            lines.append(f"{name:28} {row['documents']:9} " + _cells(row, 1, ".3f", ""))
    return "\n".join(lines)


def _guessed(found: dict[str, Any]) -> list[str]:
    """A line where retrieval tells nothing: the source itself hardly does more than guess."""
    if max(row["source"] for row in found["retrieval"]) > _LEARNED * 1 / CHOICES:
        return []
    return ["(the source hardly does more than guess: these rows say nothing about the conversion)"]


def _cells(row: dict[str, Any], scale: float, form: str, unit: str) -> str:
    both = [f"{scale * row[name]:{form}}{unit}" for name in ("source", "student")]
    return f"{both[0]:>8} {both[1]:>8} {_change(row['difference'], row['margin'], scale, form, ''):>18}"


def _change(value: float, width: float | None, scale: float, form: str, unit: str) -> str:
    return f"{scale * value:+{form}}{unit}" + ("" if width is None else f" ± {scale * width:{form}}{unit}")
