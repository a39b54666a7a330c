"""Load what a calibrated conversion runs, the source model as a stream of layers and the tokens,
and measure the converted checkpoint by both.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from kvfold.attention.drift.compare import (
    ComparisonProgress,
    compare_models,
    compare_predictions,
)
from kvfold.attention.drift.report import (
    DriftReport,
    format_dtype,
    make_drift_report,
    select_floor_tokens,
)
from kvfold.convert.checkpoint.atomic import replace_file
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.journal import PRECISION, SELF_TEXT
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import describe_calibration_text
from kvfold.convert.device import (
    FLOAT64_PAYS,
    choose_autocast_dtype,
    choose_device,
    choose_fit_device,
)
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.formatting import parse_number
from kvfold.convert.progress import ProgressStages
from kvfold.convert.request import LONG_LENGTH, count_held_out
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.text.corpus import choose_calibration_texts
from kvfold.convert.text.self_written import find_turn_tokens, sample_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import LONG_SEQUENCES, CalibrationTokens, load_calibration
from kvfold.convert.training.budget import choose_batch_size, count_polish_steps
from kvfold.convert.walk.walk import (
    Walk,
    check_finite,
    choose_sequences_per_chunk,
    run_all_layers,
)

# Time of comparing two models' logits, relative to that of their products. Chosen, not tuned.
_LOGITS = 1.35
# The most of the time of a fit that measuring the loss by position takes.
_POSITIONS_SHARE = 0.1


@dataclass(frozen=True)
class Calibration:
    """The source model and the tokens that a calibrated conversion runs through it.

    source: the source as a stream of layers.
    tokens: the sequences of its calibration text.
    """

    source: CheckpointStream
    tokens: CalibrationTokens


def load_source_and_text(plan: Plan, scratch: Path, stages: ProgressStages) -> Calibration:
    """Return the source model as a stream of layers, with the calibration and held-out tokens that
    the request of ``plan`` asks for. Raises InputError without a tokenizer or enough text.

    Text that the source model writes itself is saved in ``scratch``, so that a resumed run uses the
    same text.
    """
    request = plan.request
    tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration")
    # Each step of polishing takes sequences that no other step had, while there are any.
    steps = count_polish_steps(request.polish, request.calibration_length)
    further = steps * choose_batch_size(request.calibration_length) - request.samples
    tokens = load_calibration(
        choose_calibration_texts(request.calibration, plan.checkpoint.has_chat_template),
        tokenizer,
        request.samples,
        request.calibration_length,
        request.seed,
        further=max(0, further),
        # Only a number of tokens says how much text there must be.
        fewer=parse_number(request.polish) is None or request.repeat_text,
        write=lambda count: _write_sequences(plan, tokenizer, scratch, stages, count),
        long_length=min(LONG_LENGTH, plan.geometry.positions),
        long_count=choose_long_sequence_count(plan),
    )
    for sequences in (tokens.training_sequences, tokens.held_out, tokens.long):
        check_vocabulary(sequences, plan.geometry.vocabulary, plan.checkpoint.origin)
    if not request.quiet:
        count, length = tokens.calibration.shape
        text = describe_calibration_text(tokens.source)
        print(f"calibrating on {count} x {length} tokens of {text}", file=sys.stderr)
        device = choose_device(request.device)
        if choose_fit_device(device) != device:
            print(
                "fits run on the CPU: this GPU multiplies in float64 less than"
                f" {FLOAT64_PAYS:g} times as fast as in float32",
                file=sys.stderr,
            )
    return Calibration(open_source_stream(plan, scratch), tokens)


def choose_long_sequence_count(plan: Plan) -> int:
    """Return the number of sequences on which the loss by position is measured: at most four, and
    so many that they take about a tenth of the time of the fit, but at least one. Equal requests
    give equal numbers.
    """
    request = plan.request
    if not request.positions:
        return 0
    shapes = (tensor.shape for tensor in plan.model.tensors.values())
    # Passes of both models and their logits; a fit takes at least as long as its passes do.
    share = 1 + measure_logits_share(shapes, plan.geometry.vocabulary)
    sequences = request.samples + count_held_out(request.samples)
    fit = 2 * sequences * request.calibration_length
    cost = min(LONG_LENGTH, plan.geometry.positions) * share
    return max(1, min(LONG_SEQUENCES, int(_POSITIONS_SHARE * fit / cost)))


def measure_logits_share(shapes: Iterable[Sequence[int]], vocabulary: int) -> float:
    """Return how many times as long as all layers of two models the comparison of their logits
    takes, from the ``shapes`` of one model's tensors.
    """
    inside = 1
    head = 0
    for shape in shapes:
        if vocabulary in shape:
            head = max(head, prod(shape))
        else:
            inside += prod(shape)
    return _LOGITS * head / inside


def open_source_stream(plan: Plan, scratch: Path) -> CheckpointStream:
    """Open the source model as a stream of layers in float32, on the requested device, with the
    requested autocast precision for calibration passes and training steps.

    A precision chosen by measurement is saved in ``scratch``, so that a resumed run uses it too.
    """
    request = plan.request
    checkpoint = plan.checkpoint
    device = choose_device(request.device)
    saved = scratch / PRECISION
    if saved.is_file():
        autocast = None if saved.read_text() == "float32" else torch.bfloat16
    else:
        # Float32 weights would be rounded to less than they are stored in.
        full = request.precision == "auto" and request.dtype == "float32"
        name = "float32" if full else request.precision
        autocast = choose_autocast_dtype(checkpoint, device, name)
        with replace_file(saved) as new:
            new.write_text(format_dtype(autocast or torch.float32))
    # On a GPU too: held-out text is judged in float32.
    return CheckpointStream(
        checkpoint.config,
        checkpoint.read_tensor,
        list(checkpoint.tensors),
        device,
        autocast=autocast,
    )


def _write_sequences(
    plan: Plan, tokenizer: Any, scratch: Path, stages: ProgressStages, count: int
) -> Tensor:
    """Sample ``count`` sequences of tokens ``[count, T]`` from the source model as calibration
    text, and save them in ``scratch``. A resumed run loads the saved ones.
    """
    request = plan.request
    saved = scratch / SELF_TEXT
    turns = find_turn_tokens(tokenizer, plan.checkpoint.origin)
    check_vocabulary(torch.tensor(turns.start), plan.geometry.vocabulary, plan.checkpoint.origin)
    if request.calibration_length <= len(turns.start):
        raise option_error(
            "seq_len",
            request.calibration_length,
            f"must exceed {len(turns.start)}, the number of tokens with which each text that the"
            " model writes begins; raise it",
        )
    if saved.is_file():
        return cast(Tensor, torch.load(saved, weights_only=True))
    device = choose_device(request.device)
    dtype = choose_autocast_dtype(plan.checkpoint, device, request.precision) or torch.float32
    model = load_model(plan.checkpoint, dtype, request.trust_remote_code)
    with stages(
        "text", count * (request.calibration_length - len(turns.start)), "token"
    ) as advance:
        tokens = sample_sequences(
            model.to(device).eval(), turns, count, request.calibration_length, request.seed, advance
        )
    with replace_file(saved) as new:
        torch.save(tokens, new)
    return tokens


@contextmanager
def open_comparison_stage(
    stages: ProgressStages,
    name: str,
    source: CheckpointStream,
    *texts: Tensor,
    logits_only: Sequence[Tensor] = (),
) -> Iterator[ComparisonProgress]:
    """A context manager for a stage that compares models of the size of ``source`` on ``texts [N,
    T]``, and the logits alone on those in ``logits_only``. It counts tokens in each layer, and in
    the logits as many times as they take the time of a layer. Its value is the function to call
    with them.
    """
    shapes = (weight.shape for weight in source.weights.expected.values())
    logits = max(1, round(2 * source.layers * measure_logits_share(shapes, source.vocabulary)))
    layers = 2 * source.layers
    total = layers * sum(text.numel() for text in texts)
    total += logits * sum(text[:, 1:].numel() for text in (*texts, *logits_only))
    with stages(name, total, "token") as advance:
        yield lambda tokens, heads: advance(tokens * logits if heads else tokens)


@torch.no_grad()
def measure_checkpoint(
    checkpoint: Checkpoint,
    calibration: Calibration,
    walk: Walk | None,
    stages: ProgressStages,
    rounding: str | None = None,
) -> DriftReport:
    """Measure the converted ``checkpoint`` against the source on held-out text: KL divergence and
    loss, in nats per token. If the calibration has long sequences, also the loss by position.
    ``rounding`` is that of the converted model's KV cache.

    A finished ``walk`` to these weights has run the held-out text through all layers already.
    Where activations exceed float32 only in long sequences, the stretches stay those of the shorter
    ones.
    """
    source = calibration.source
    tokens = calibration.tokens
    length = tokens.held_out.shape[1]
    student = CheckpointStream(
        checkpoint.config,
        checkpoint.read_tensor,
        list(checkpoint.tensors),
        source.device,
        rounding=rounding,
    )
    floor = select_floor_tokens(tokens.held_out)
    texts = [floor] if walk else [floor, tokens.held_out]
    finished = [tokens.held_out] if walk else []
    with open_comparison_stage(stages, "measure", source, *texts, logits_only=finished) as progress:
        if walk:
            measured = walk.measure_drift(lambda compared: progress(compared, True))
        else:
            size = choose_sequences_per_chunk(source.device, length)
            measured = compare_models(source, student, tokens.held_out, size, progress)
            check_finite([torch.tensor(measured.teacher_loss)], source, None)
        report = make_drift_report(measured, source, student, tokens.held_out, progress=progress)
    count, length = tokens.long.shape
    if not count:
        return report
    if not stages.quiet and stages.progress is None:
        print(f"measuring the loss by position on {count} x {length} tokens", file=sys.stderr)
    with open_comparison_stage(stages, "positions", source, tokens.long) as progress:
        layer = partial(progress, count * length, False)
        try:
            expected = run_all_layers(source, tokens.long, layer)
            actual = run_all_layers(student, tokens.long, layer)
        except InputError as error:
            # Hours of work are not lost for a measurement beside it.
            print(f"the loss by position ends at {report.length} tokens: {error}", file=sys.stderr)
            return report
        chunks = torch.split(tokens.long, choose_sequences_per_chunk(source.device, length))
        stretches = compare_predictions(
            source,
            student,
            expected,
            actual,
            chunks,
            lambda compared: progress(compared, True),
        ).stretches
    return replace(report, stretches=stretches)


def make_record_entries(
    calibration: Calibration, notes: Mapping[str, Any], drift: DriftReport
) -> dict[str, Any]:
    """Return the entries of a calibrated run for ``kvfold.json``: its text, the ``notes`` of its
    layers, and the measured drift. Equal runs give equal entries.
    """
    tokens = calibration.tokens
    entries = {
        "calibration": {
            "source": tokens.source,
            "sha256": tokens.digest,
            "sequences": len(tokens.calibration),
            "held_out": len(tokens.held_out),
            "tokens_each": tokens.calibration.shape[1],
        },
        **notes,
        "drift": drift.to_dict(),
    }
    by_text: dict[str, list[tuple[float, float, float]]] = {}
    for text, figures in zip(tokens.held_out_texts, drift.by_sequence, strict=False):
        by_text.setdefault(text, []).append(figures)
    if by_text:  # of a mixture
        entries["drift"]["texts"] = [
            {
                "text": text,
                "sequences": len(figures),
                "kl": fmean(kl for kl, _, _ in figures),
                "excess": fmean(excess for _, excess, _ in figures),
            }
            for text, figures in sorted(by_text.items())
        ]
    return entries
