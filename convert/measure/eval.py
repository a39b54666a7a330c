"""``kvfold eval``: compare a source and its conversion on the same documents, with one model in
memory at a time.

Loss by position needs no task. ``needle`` hides a sentence such as "The secret word of Anna is
apple." in ordinary text, which ends with a question for the word (Kamradt, 2023). The answer is the
likeliest of eight words of one token each, so models need not follow instructions; a guess is right
one time in eight. ``replies`` compares greedy replies to open questions: the number of tokens
before the first difference, and the rate at which the source would accept the result's
tokens as a draft, one minus the total variation of the next-token distributions (Leviathan et al.,
2023, arXiv 2211.17192). All other tasks are of lm-evaluation-harness (Gao et al., 2024), in the
extra ``eval``.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.cache_rounding import CacheRoundingError, round_cache
from kvfold.attention.drift.compare import compute_margin, split_positions
from kvfold.attention.rounding_schemes import describe_cache_rounding
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, option_error, suggest_name, summarize_error
from kvfold.convert.measure.chat import generate_reply, load_whole_model, tokenize_chat
from kvfold.convert.measure.losses import compute_token_losses
from kvfold.convert.progress import Progress, ProgressStages
from kvfold.convert.request import EvalRequest
from kvfold.convert.stream.stock import load_config, use_blockwise_attention
from kvfold.convert.text.corpus import open_corpus
from kvfold.convert.text.tokenizer import (
    check_vocabulary,
    find_prefix_tokens,
    load_tokenizer,
    tokenize_documents,
)

# Names and words of one token in most tokenizers, also in those of code models; the sentence to
# find and its question; open questions.
_TEXTS = json.loads(Path(__file__).with_name("eval_texts.json").read_text())
CHOICES = 8
# Tokens; longer than the sentence to find and its question together.
_SHORTEST = 128
# Retrieval at 8192 took hours for a model of 135 M parameters on one core.
_LENGTHS = (256, 512, 1024)
# More than any language needs, so that enough text is read.
_BYTES_PER_TOKEN = 16
_REPLY_TOKENS = 128
# Positions per window whose next-token distributions are compared, and the most probabilities that
# are kept of a model: 256 MB. Chosen.
_DRAFT_POSITIONS = 32
_PROBABILITIES = 1 << 27
# The harness names these by their mean over all texts; here the name of one text's share.
_LOSSES = {"byte_perplexity": "nats_per_byte", "word_perplexity": "nats_per_word"}

# Values ``[n]`` of a metric, one for each document, by task and metric.
Scores = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The result of `eval_checkpoints`: a row for each task and metric, which compares the source
    with the converted model (student).

    model, out: the compared checkpoints.
    text: the name of the text for losses and retrieval.
    samples: the number of documents per length.
    rows: JSON objects, one for each ``task`` and ``metric``. Each compares both models on the same
        ``documents``: the means of ``source`` and ``student``, their ``difference``, student minus
        source, and ``margin``, half the width of its 95 % interval; None for one document. The task
        ``needle`` is the share of right answers in texts of so many tokens; with ``guesses``, the
        95 % interval of the source's share reaches down to chance, so that the difference says
        nothing about the conversion. ``loss`` is the loss at these positions, in nats per token.
    cache: how the cache of ``out`` was rounded; None if it was not.
    """

    model: str
    out: str
    text: str
    samples: int
    rows: list[dict[str, Any]]
    cache: str | None = None


@dataclass(frozen=True)
class EvaluationInputs:
    """The token sequences on which both models are evaluated.

    text: the name of the text.
    windows: the text for losses, ``[N, T]``.
    questions: for each length, the tokens ``[T]`` of texts that end in a question for the word
        hidden in them, with the tokens of the possible answers, the right one first.
    prompts: the tokens of open questions; empty without the task ``replies``.
    """

    text: str
    windows: Tensor
    questions: dict[int, list[tuple[Tensor, list[int]]]]
    prompts: list[Tensor]


@dataclass(frozen=True)
class ModelResults:
    """The scores, replies and probabilities of one evaluated model.

    scores: one value for each document.
    replies: the tokens of each reply.
    probabilities: next-token probabilities on the windows; empty without the task ``replies``.
    """

    scores: Scores
    replies: list[Tensor]
    probabilities: Tensor


def eval_checkpoints(request: EvalRequest, progress: Progress | None = None) -> Evaluation:
    """Compare ``out`` with ``model``: retrieval at ``lengths``, loss by position, and ``tasks``.

    Differences are paired by document, with 95 % intervals. The default ``lengths`` are 256, 512
    and 1024 tokens, or the model's context. ``samples`` is the number of documents per length and
    of prompts (of which there are 48), ``limit`` the number per task of lm-evaluation-harness.
    Words are hidden in ``text``, which the losses are also measured on; the default is held-out
    text that ships with kvfold. ``progress`` works as in `convert_checkpoint`, for each model with
    the stages ``retrieval`` (documents, for each length), ``loss`` (documents) and ``replies``
    (prompts).
    Raises InputError for an invalid request or checkpoint.

    >>> request = EvalRequest(demo_folder(), demo_folder(), lengths=[256], samples=2)
    >>> row = eval_checkpoints(request).rows[0]
    >>> row["task"], row["metric"], row["difference"]
    ('needle', '256 tokens', 0.0)
    """
    if request.harness_tasks and find_spec("lm_eval") is None:
        raise option_error(
            "tasks",
            ",".join(request.harness_tasks),
            f": kvfold's own task is replies{suggest_name(request.harness_tasks[0], ['replies'])};"
            " any other is of lm-evaluation-harness, which is not installed: pip install"
            " 'kvfold[eval]'",
        )
    checkpoint = open_checkpoint(request.model)
    tokenizer = load_tokenizer(checkpoint, request.trust_remote_code, "an evaluation")
    documents = draw_evaluation_inputs(request, checkpoint, tokenizer)
    stages = ProgressStages(progress, request.quiet)
    # One after the other: two models of 70B parameters fit into few machines.
    source = evaluate_model(request.model, request, tokenizer, documents, stages)
    try:
        student = evaluate_model(
            request.out, request, tokenizer, documents, stages, rounding=request.cache
        )
    except CacheRoundingError as error:
        raise InputError(f"--cache {error}") from error
    if documents.prompts:
        add_reply_scores(source, student)
    rows = [
        make_evaluation_row(task, metric, scores, student.scores[task, metric])
        for (task, metric), scores in source.scores.items()
    ]
    rounding = describe_cache_rounding(request.cache) if request.cache else None
    return Evaluation(request.model, request.out, documents.text, request.samples, rows, rounding)


def draw_evaluation_inputs(
    request: EvalRequest, source: Checkpoint, tokenizer: Any
) -> EvaluationInputs:
    """The windows, questions and prompts of an evaluation, drawn at random with a fixed seed.

    Raises InputError if a length exceeds the model's context, or if the text is empty.
    """
    config = load_config(source, request.trust_remote_code)
    context = getattr(config, "max_position_embeddings", None) or 2048
    lengths = sorted(set(request.lengths or [min(length, context) for length in _LENGTHS]))
    # A model that was trained with a BOS token in front loses much without it.
    prefix = torch.tensor(find_prefix_tokens(tokenizer), dtype=torch.int64)
    shortest = _SHORTEST if request.retrieval else len(prefix) + 2
    for length in lengths:
        if not shortest <= length <= context:
            advice = ""
            if request.retrieval and length < shortest:
                advice = "; measure shorter texts with --no-retrieval"
            raise option_error(
                "lengths",
                length,
                f"must be at least {shortest} and at most {context}, the positions supported by"
                f" {source.origin}{advice}",
            )
    corpus = open_corpus(request.text, tokenizer, 0, "held_out", "text")
    bodies, _ = corpus.read_documents(lengths[-1] * request.samples * _BYTES_PER_TOKEN)
    text = torch.cat([prefix[:0], *tokenize_documents(tokenizer, prefix.tolist(), bodies)])
    if not len(text):
        raise InputError(
            f"{corpus.name} contains no text to measure on; choose another with --text"
        )
    check_vocabulary(text, config.vocab_size, source.origin)
    length = min(lengths[-1] - len(prefix), len(text))
    windows = text.unfold(0, length, length)[: request.samples]
    windows = torch.cat([prefix.expand(len(windows), -1), windows], dim=1)
    questions = {
        length: draw_needle_questions(tokenizer, text, length, request.samples, request.seed)
        for length in lengths * request.retrieval
    }
    count = request.samples if "replies" in request.tasks else 0
    prompts = draw_prompts(tokenizer, count, request.seed)
    return EvaluationInputs(corpus.name, windows, questions, prompts)


def draw_needle_questions(
    tokenizer: Any, filler: Tensor, length: int, count: int, seed: int
) -> list[tuple[Tensor, list[int]]]:
    """Return the tokens ``[length]`` of ``count`` texts, each with the tokens of the possible
    answers, the right one first. A text hides a sentence with a word (the needle), and ends in a
    question for this word. Texts are cut from ``filler [n]``; the depths of the needles are spread
    evenly.

    Raises InputError if the tokenizer has too few common words of one token.
    """

    def encode_text(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    words = [word for word in _TEXTS["words"].split() if len(encode_text(f" {word}")) == 1]
    if len(words) < CHOICES:
        raise InputError(
            f"retrieval needs {CHOICES} common English words of one token each, but the tokenizer"
            f" has only {len(words)}; skip retrieval with --no-retrieval"
        )
    prefix = find_prefix_tokens(tokenizer)
    random = Random(seed)
    questions = []
    for index in range(count):
        name = random.choice(_TEXTS["names"])
        choices = random.sample(words, CHOICES)
        word = choices.pop(random.randrange(CHOICES))
        needle = encode_text(_TEXTS["needle"].format(name=name, word=word))
        ending = encode_text(_TEXTS["question"].format(name=name))
        room = length - len(prefix) - len(needle) - len(ending)
        start = random.randrange(max(1, len(filler) - room))
        text = filler[torch.arange(start, start + room) % len(filler)].tolist()
        depth = round((index + 0.5) / count * room)
        tokens = [*prefix, *text[:depth], *needle, *text[depth:], *ending]
        answers = [encode_text(f" {choice}")[0] for choice in (word, *choices)]
        questions.append((torch.tensor(tokens), answers))
    return questions


def draw_prompts(tokenizer: Any, count: int, seed: int) -> list[Tensor]:
    """The token ids ``[T]`` of ``count`` open questions, in the tokenizer's chat template if it has
    one.
    """
    prompts = list(_TEXTS["prompts"])
    Random(seed).shuffle(prompts)
    end = "\n" if tokenizer.chat_template is None else ""
    chats = [[{"role": "user", "content": prompt + end}] for prompt in prompts[:count]]
    # The empty thoughts of models that think come before the reply.
    return [tokenize_chat(tokenizer, messages, enable_thinking=False) for messages in chats]


def evaluate_model(
    folder: str,
    request: EvalRequest,
    tokenizer: Any,
    documents: EvaluationInputs,
    stages: ProgressStages,
    rounding: str | None = None,
) -> ModelResults:
    """The results of the model in ``folder`` on all inputs, loaded for this call alone;
    ``rounding`` is that of its cache.
    """
    # Legacy files are as large as the model, which is beside them until they are closed.
    with stages(f"reading {folder}"), closing(open_checkpoint(folder)) as checkpoint:
        checkpoint.print_notes()
        model = load_whole_model(checkpoint, request)
    if rounding is not None:
        round_cache(model, rounding)
    use_blockwise_attention(model, model.device)
    scores: Scores = {}
    for length, questions in documents.questions.items():
        counted = stages.iterate_over("retrieval", questions, len(questions), "document")
        scores["needle", f"{length} tokens"] = answer_questions(model, counted)
    windows = stages.iterate_over("loss", documents.windows, len(documents.windows), "document")
    losses = compute_token_losses(model, windows)
    for start, end in split_positions(documents.windows.shape[1]):
        scores["loss", f"tokens {start} to {end}"] = losses[:, start - 1 : end - 1].mean(1)
    prompts = stages.iterate_over("replies", documents.prompts, len(documents.prompts), "prompt")
    replies = [generate_reply(model, tokenizer, prompt, _REPLY_TOKENS) for prompt in prompts]
    probabilities = torch.empty(0)
    if replies:
        probabilities = compute_next_token_probabilities(model, documents.windows)
    if request.harness_tasks:
        scores |= run_lm_eval_harness(model, tokenizer, request)
    return ModelResults(scores, replies, probabilities)


@torch.no_grad()
def answer_questions(model: Any, questions: Iterable[tuple[Tensor, list[int]]]) -> Tensor:
    """A tensor ``[n]`` with 1 for each question that the model answers correctly, and 0 for each
    other.
    """
    correct = []
    for tokens, answers in questions:
        logits = model(input_ids=tokens[None].to(model.device), logits_to_keep=1).logits[0, -1]
        correct.append(float(logits[answers].argmax() == 0))
    return torch.tensor(correct)


@torch.no_grad()
def compute_next_token_probabilities(model: Any, windows: Tensor) -> Tensor:
    """The probabilities of the next token, ``[N, positions, V]`` in float16, at evenly spaced
    positions of ``windows [N, T]``; fewer than 32 where the vocabulary is large.
    """
    most = _PROBABILITIES // (len(windows) * model.config.get_text_config().vocab_size)
    count = min(_DRAFT_POSITIONS, max(1, most))
    positions = torch.linspace(0, windows.shape[1] - 1, count).long()
    rows = []
    for row in windows.to(model.device):
        logits = model(input_ids=row[None], logits_to_keep=positions).logits[0]
        rows.append(logits.float().softmax(-1).half().cpu())
    return torch.stack(rows)


def run_lm_eval_harness(model: Any, tokenizer: Any, request: EvalRequest) -> Scores:
    """The score of each document in the request's tasks of lm-evaluation-harness. Log-likelihoods
    of texts become losses per word or byte. Raises InputError for an unknown task.
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
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request.batch),
            tasks=tasks,
            limit=request.limit,
            log_samples=True,
            bootstrap_iters=0,
        )
    except (KeyError, ValueError, AttributeError, OSError, yaml.YAMLError) as error:
        raise option_error(
            "tasks",
            ",".join(request.harness_tasks),
            f": lm-evaluation-harness failed ({summarize_error(error)}); use names of its tasks or"
            " valid .yaml files, and check that it can load their data",
        ) from error
    scores = defaultdict(list)
    for task, documents in results["samples"].items():
        for document in documents:
            for metric in document["metrics"]:
                value = document[metric]
                if metric in _LOSSES:
                    value = -value[0] / value[1]
                if isinstance(value, (int, float)):
                    scores[task, _LOSSES.get(metric, metric)].append(value)
    return {name: torch.tensor(values) for name, values in scores.items()}


def add_reply_scores(source: ModelResults, student: ModelResults) -> None:
    """Add the scores of the task ``replies`` to both models' results. ``first_difference`` is the
    number of tokens before a reply first differs from the source's; ``draft_acceptance`` the rate
    at which the source accepts the model's next tokens.
    """
    equal = []
    for reply, other in zip(source.replies, student.replies, strict=True):
        shorter = min(len(reply), len(other))
        equal.append(int((reply[:shorter] == other[:shorter]).long().cumprod(0).sum()))
    lengths = [len(reply) for reply in source.replies]
    source.scores["replies", "first_difference"] = torch.tensor(lengths)
    student.scores["replies", "first_difference"] = torch.tensor(equal)
    difference = (source.probabilities.float() - student.probabilities.float()).abs()
    acceptance = 1 - difference.sum(-1).mean(-1) / 2
    source.scores["replies", "draft_acceptance"] = torch.ones_like(acceptance)
    student.scores["replies", "draft_acceptance"] = acceptance


def make_evaluation_row(task: str, metric: str, source: Tensor, student: Tensor) -> dict[str, Any]:
    """A row of `Evaluation.rows` with the means, their difference and its 95 % interval, from both
    models' values ``[n]``, one per document.
    """
    source = source.double()
    student = student.double()
    difference = student - source
    row = {
        "task": task,
        "metric": metric,
        "documents": len(source),
        "source": float(source.mean()),
        "student": float(student.mean()),
        "difference": float(difference.mean()),
        "margin": compute_margin(difference),
    }
    if task == "needle":
        row["guesses"] = float(source.mean()) - (compute_margin(source) or 1) <= 1 / CHOICES
    return row
