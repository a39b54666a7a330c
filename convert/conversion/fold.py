"""Conversions that read text: the walk, a transform per layer, and the drift on sequences kept aside."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.lockstep import compare_predictions
from kvfold.attention.drift.report import DriftReport
from kvfold.convert.console import duration
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.refinement import Refiner, refinement_record
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.families.layout import read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import layer_rotary
from kvfold.convert.io.checkpoint import open_checkpoint
from kvfold.convert.measure.drift import report_of
from kvfold.convert.request import WEIGHTS_ONLY
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.documents import BUILT_IN
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.weights import AttentionWeights, Rotary
from kvfold.convert.walk.walk import Step, Twin, Walk, chunk_size, embed, estimate_seconds, residual

_AGREE = 1e-3  # relative; what is written was rounded in memory too, so only the order of sums differs
Write = Callable[[Mapping[str, Tensor]], Any]
Made = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # a layer's tensors, and what to note about it


def load_tokens(plan: Plan) -> CalibrationTokens:
    """The calibration sequences and those kept aside. Raises InputError without a tokenizer or enough text."""
    request = plan.request
    check_seq_len(request.seq_len, plan.geometry.positions, plan.source_name)
    otherwise = f", or use --method {quick_method(plan)}, which reads no text"
    tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration", otherwise)
    tokens = load_calibration(request.calibration, tokenizer, request.samples, request.seq_len, request.seed)
    for part in (tokens.calibration, tokens.held_out):
        check_vocabulary(part, plan.geometry.vocabulary, plan.source_name)
    return tokens


@dataclass(frozen=True)
class Calibrated:
    """What a calibrated run found out beside the weights."""

    tokens: CalibrationTokens
    drift: DriftReport
    choices: Mapping[str, Any]
    stream: CheckpointStream  # the source's

    def record(self, written: float) -> dict[str, Any]:
        """For ``kvfold.json``: nothing that differs between equal runs. ``written`` is the loss of the files on disk.

        Raises KvfoldError when it is not the loss that was measured in memory.
        """
        expected = self.drift.measured.student_loss
        if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
            raise KvfoldError(
                f"the written checkpoint has a loss of {written:.6f} nats, the converted model in memory had "
                f"{expected:.6f} on the same text: nothing was kept; please report it"
            )
        text = {"source": self.tokens.source, "sha256": self.tokens.digest}
        counts = {"sequences": len(self.tokens.calibration), "kept_aside": len(self.tokens.held_out)}
        both = {"loss_in_memory": expected, "loss_of_written_checkpoint": written}
        length = {"tokens_each": self.tokens.calibration.shape[1]}
        return {
            "calibration": text | counts | length,
            **self.choices,
            "drift": self.drift.to_dict() | {"written": both},
        }


def fold_calibrated(plan: Plan, write: Write, progress: Callable[[int], None], journal: Journal) -> Calibrated:
    """Walk the model, fold every layer, give its tensors to ``write`` and measure the drift."""
    source = source_stream(plan)
    tokens = load_tokens(plan)
    twin = Twin(source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")
    tell(plan, tokens, estimate_seconds(source, tokens.held_out, tokens.calibration))
    refine = Refiner(plan)
    walk = Walk(source, twin, tokens.held_out, tokens.calibration, profile=True, keep_calibration=refine.wanted)
    notes = []
    for step in walk:
        notes.append(settle_layer(step, write, journal, lambda step: _folded(plan, step, refine)))
        progress(1)
    drift = report_of(walk.measurement(), source, twin.stream, tokens.held_out)
    choices = {"groups": [note["groups"] for note in notes], **refinement_record(notes)}
    return Calibrated(tokens, drift, choices, source)


def settle_layer(step: Step, write: Write, journal: Journal | None, make: Callable[[Step], Made]) -> Mapping[str, Any]:
    """Take the walk past a layer with the tensors that ``make`` finds, or those that a killed run had written.

    Returns what there is to note about the layer. Without ``journal`` nothing is resumed and nothing noted.
    """
    finished = None if journal is None else journal.finished(step.index)
    if finished is not None:
        step.convert(finished.tensors)
        return finished.notes
    tensors, notes = make(step)
    step.convert(tensors)
    write(tensors)
    if journal is not None:
        journal.note(step.index, notes)
    return notes


def _folded(plan: Plan, step: Step, refine: Refiner) -> Made:
    folded, groups = fold_layer(plan, step)
    tensors, notes = refine(step, plan.layout.encode(step.index, folded))
    return tensors, {"groups": [list(group) for group in groups], **notes}


@torch.no_grad()
def written_loss(folder: Path, measured: Calibrated) -> float:
    """Mean negative log-likelihood of the checkpoint in ``folder`` on the sequences kept aside, nats per token."""
    checkpoint, like, tokens = open_checkpoint(folder), measured.stream, measured.tokens.held_out
    try:
        stream = CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device, like.dtype)
        states = embed(stream, tokens)
        for index in range(stream.layers):
            with stream.open_layer(index) as layer:
                states = [residual(layer(hidden)) for hidden in states]
        parts = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
        return compare_predictions(stream, stream, states, states, parts).teacher_loss
    finally:
        checkpoint.close()


def fold_layer(plan: Plan, step: Step) -> tuple[AttentionWeights, grouping.Partition]:
    """The layer with its key/value heads folded, and which of them share."""
    if plan.request.resolved_method in WEIGHTS_ONLY:
        return pooled(plan, step.index)
    weights = canonical_layer(plan, step.index)
    rotary, context = fold_rotary(plan, step.index), fold_context(plan, step.index)
    statistics, kv_heads = step.statistics, plan.kv_heads
    if statistics is None:
        raise ValueError("step: expected statistics, found none")
    plain = grouping.contiguous(weights.kv_heads, kv_heads)
    if grouping_of(plan) == "contiguous":
        return principal.fold(weights, statistics, rotary, plain, context), plain
    choice = grouping.similar(
        weights,
        statistics,
        rotary,
        kv_heads,
        lambda folded: step.attention_error(plan.layout.encode(step.index, folded)),
        context,
    )
    return choice.weights, choice.groups


def pooled(plan: Plan, layer: int) -> tuple[AttentionWeights, grouping.Partition]:
    """``layer`` folded by a method that reads no text, as a start for refinement."""
    from kvfold.convert.conversion.run import transform_layer

    folded = transform_layer(plan, layer)
    return folded, grouping.contiguous(plan.geometry.kv_heads, folded.kv_heads)


def source_stream(plan: Plan) -> CheckpointStream:
    """The source as a stream of layers, on the device and in the precision that the request asks for."""
    checkpoint, device = plan.checkpoint, choose_device(plan.request.device)
    dtype = compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype)


def canonical_layer(plan: Plan, layer: int) -> AttentionWeights:
    """The source's attention in ``layer``. Raises InputError when a weight is not finite."""
    from kvfold.convert.conversion.run import reader

    return read_layer(plan.model, layer, reader(plan, layer))


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The frequencies that a fold is fitted for; they guide it, whatever they are, rotation itself stays the model's.

    Rope types whose frequencies move with the length of the text (dynamic) count as what they are for short ones.
    """
    try:
        return layer_rotary(plan.model, layer, "short")
    except InputError:
        plain = {"rope_type": "default", "rope_theta": plan.model.rope_table()["rope_theta"]}
        config = {**plan.model.config, "rope_scaling": None, "rope_parameters": plain}
        return layer_rotary(Model(plan.model.family, config), layer)


def fold_context(plan: Plan, layer: int) -> int:
    """How many positions back ``layer`` has to see."""
    window = plan.model.layers[layer].window
    return min(plan.geometry.positions, window or plan.geometry.positions)


def grouping_of(plan: Plan) -> str:
    """``similar`` for MHA sources unless asked otherwise: heads that share already were trained to."""
    return plan.request.group or ("similar" if plan.geometry.kv_heads == plan.geometry.heads else "contiguous")


def quick_method(plan: Plan) -> str:
    """The method that reads no text."""
    return "svd" if plan.request.to == "mla" else "mean"


def tell(plan: Plan, tokens: CalibrationTokens, seconds: float) -> None:
    """Say on stderr what is about to take how long, and what text it rests on."""
    if plan.request.quiet:
        return
    steps = plan.request.refine
    besides = f" and refining (--refine {steps})" if steps else ""
    count, length = tokens.calibration.shape
    print(
        f"calibrating on {count} x {length} tokens of {tokens.source}: about {duration(seconds)} for the walk, fitting"
        f"{besides} {plan.geometry.layers} layers not counted "
        f"(quick, without text, and worse: --method {quick_method(plan)})",
        file=sys.stderr,
    )
    if tokens.source == BUILT_IN:
        print("text like the model's own use calibrates better: --calibration FILE.txt|FILE.jsonl", file=sys.stderr)
