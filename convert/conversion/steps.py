"""The steps that calibrated methods share: source, tokens, a walk beside the student, and the measurement.

The student is always run from what the output's files will hold: transformed weights are encoded to the files' tensors
and rounded to their dtypes before a layer of the student is built from them. So a candidate is judged, a layer refined
and the drift measured on exactly what a reader of the checkpoint will load.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.lockstep import Measurement, compare_predictions
from kvfold.attention.drift.report import DriftReport, report_of
from kvfold.convert import processes
from kvfold.convert.console import duration
from kvfold.convert.conversion.costs import Machine, costs_of, layer_flops
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.method import Converted, Measured, Notes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.refinement import OUTPUT_FIT, Refiner, attention_update
from kvfold.convert.conversion.self_text import write_tokens
from kvfold.convert.conversion.source import source_heads
from kvfold.convert.conversion.stages import Stages
from kvfold.convert.device import choose_device, compute_dtype, training_autocast
from kvfold.convert.errors import KvfoldError
from kvfold.convert.io.checkpoint import open_checkpoint
from kvfold.convert.request import SELF
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.documents import BUILT_IN
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration
from kvfold.convert.training.budget import sequences_of
from kvfold.convert.walk.hidden import Keep, Spill
from kvfold.convert.walk.output_fit import refit_output
from kvfold.convert.walk.passes import chunk_size, first_layer_seconds, last_states
from kvfold.convert.walk.twin import Twin
from kvfold.convert.walk.walk import Lesson, Step, Teacher, Walk

_AGREE = 1e-3  # relative; what is written was rounded in memory too, so only the order of sums differs


def source_stream(plan: Plan) -> CheckpointStream:
    """The source as a stream of layers, on the device and in the precision that the request asks for."""
    checkpoint, device = plan.checkpoint, choose_device(plan.request.device)
    dtype = compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype)


def load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None = None) -> CalibrationTokens:
    """Calibration and held-out sequences; text that the source writes itself is kept in ``scratch``.

    The first of several processes reads them for all. Raises InputError without a tokenizer or enough text;
    ``otherwise`` is what to do instead, by default a method that reads no text.
    """
    return processes.from_first(lambda: _load_tokens(plan, scratch, stages, otherwise))


def own_sequences(tokens: Tensor) -> Tensor:
    """This process's share of the sequences ``tokens [N, T]``."""
    own = processes.part(len(tokens))
    return tokens[own.start : own.stop]


def _load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None) -> CalibrationTokens:
    request = plan.request
    check_seq_len(request.seq_len, plan.geometry.positions, plan.source_name)
    if otherwise is None:
        otherwise = f", or use --method {quick_method(plan)}, which reads no text"
    tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration", otherwise)
    if request.calibration == SELF:
        tokens = write_tokens(plan, tokenizer, scratch, stages)
    else:
        wanted = sequences_of(request.polish, request.seq_len) if request.polish else 0
        further = max(0, wanted - request.samples)
        sizes, encodes = (request.samples, request.seq_len, request.seed), plan.model.family.kind == "encoder"
        tokens = load_calibration(request.calibration, tokenizer, *sizes, further=further, closed=encodes)
    for part in (tokens.training, tokens.held_out):
        check_vocabulary(part, plan.geometry.vocabulary, plan.source_name)
    return tokens


@contextmanager
def hidden_states(folder: str | None) -> Iterator[Keep]:
    """Keeps hidden states in memory; with a ``folder``, as ``--spill`` names it, in a file there."""
    if folder is None:
        yield list
        return
    with Spill(folder) as spill:
        yield spill


class StudentWalk:
    """The walk of a conversion: the source and, beside it, the student that a finished checkpoint would be.

    ``statistics`` has the walk gather the statistics of the calibration sequences, with distance profiles;
    ``trial_steps`` replaces the request's steps of refinement, for a short trial: None leaves them, 0 refines nothing.
    ``teacher`` is one that several students share: each goes on by `step` then. ``keep`` says where hidden states are.
    """

    def __init__(
        self,
        plan: Plan,
        source: CheckpointStream,
        tokens: CalibrationTokens,
        *,
        statistics: bool,
        trial_steps: int | None = None,
        teacher: Teacher | None = None,
        keep: Keep = list,
    ) -> None:
        self._plan, self._source, self._tokens = plan, source, tokens
        self._refine = Refiner(plan, trial_steps)
        self._refits = plan.request.resolved_method == "principal"
        trains = self._refits or self._refine.enabled
        self._twin = Twin(source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")
        teacher = teacher or Teacher(
            source,
            tokens.held_out,
            own_sequences(tokens.calibration) if statistics or trains else None,
            profile=statistics,
            statistics=statistics,
            keep_calibration=trains,
            heads=source_heads(plan),
            keep=keep,
        )
        self._walk = Walk(teacher, self._twin, calibration=trains)

    def steps(self, journal: Journal | None = None) -> Iterator[Step]:
        """The layers that are left to convert, each to be passed to ``convert``.

        The walk goes past those that ``journal`` has finished with the tensors that were written.
        """
        for step in self._walk:
            finished = None if journal is None else journal.finished(step.index)
            if finished is None:
                yield step
            else:
                step.convert(finished)

    def convert(self, step: Step, weights: Any, notes: Notes | None = None) -> Converted:
        """Encode transformed ``weights`` as the target stores them and take the walk past the layer.

        Those of ``principal`` get the output projection that fits the student; they are refined where the request says
        so.
        """
        tensors, made = self._made(step, weights)
        step.convert(tensors)
        return Converted(step.index, tensors, {**(notes or {}), **made})

    def follow(self, step: Step, weights: Any) -> float:
        """As ``convert``, but without the drift of the layer, except that of the residual stream, which it returns."""
        return step.follow(self._made(step, weights)[0])

    def _made(self, step: Step, weights: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The layer's tensors as they will be stored, and notes on how they came about."""
        weights, fitted = self._refit_output(step, weights)
        tensors, refined = self._refine(step, self._plan.layout.encode(step.index, weights))
        return tensors, {**fitted, **refined}

    def _refit_output(self, step: Step, weights: Any) -> tuple[Any, dict[str, Any]]:
        if not self._refits:
            return weights, {}

        def encode(changed: Any) -> Mapping[str, Tensor]:
            return self._plan.layout.encode(step.index, changed)

        refitted, fit = refit_output(step, weights, encode, attention_update(self._plan))
        return refitted, {} if fit is None else {OUTPUT_FIT: fit.record()}

    def step(self, lesson: Lesson) -> AbstractContextManager[Step]:
        """A layer beside that of a shared teacher; to be passed to ``convert`` in the block."""
        return self._walk.step(lesson)

    @property
    def stream(self) -> CheckpointStream:
        """The student."""
        return self._twin.stream

    def measurement(self) -> Measurement:
        """The student against the source on held-out tokens, after the last layer."""
        return self._walk.measurement()

    def kl(self) -> float:
        """KL of the next-token distributions on held-out tokens after the last layer, nats.

        Of encoders what is left of the cosine similarity to 1.
        """

        def drift() -> float:
            measured = self.measurement()
            return measured.kl if measured.cosine is None else 1 - measured.cosine

        return processes.from_first(drift)

    def measured(self, choices: Notes) -> "Calibrated":
        """The drift after the last layer. ``choices`` are further entries of ``kvfold.json``."""
        drift = report_of(self.measurement(), self._source, self.stream, self._tokens.held_out)
        return Calibrated(self._tokens, drift, choices, self._source, self._plan.request.spill)


@dataclass(frozen=True)
class Calibrated(Measured):
    """The measurements of a calibrated run. ``stream`` is the source's, ``spill`` the folder for hidden states."""

    tokens: CalibrationTokens
    drift: DriftReport
    choices: Notes
    stream: CheckpointStream
    spill: str | None = None

    def record(self, folder: Path) -> dict[str, Any]:
        """For ``kvfold.json``: nothing that differs between equal runs.

        Raises KvfoldError when the loss of the checkpoint in ``folder`` is not the one that was measured in memory.
        """
        if self.drift.measured.cosine is not None:
            return self._entries({"cosine_of_written_checkpoint": self._checked_cosine(folder)})
        expected, written = self.drift.measured.student_loss, written_loss(folder, self)
        if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
            raise KvfoldError(
                f"the written checkpoint has a loss of {written:.6f} nats, the converted model in memory had "
                f"{expected:.6f} on the same text: nothing was kept; please report it"
            )
        return self._entries({"loss_in_memory": expected, "loss_of_written_checkpoint": written})

    def _checked_cosine(self, folder: Path) -> float:
        """The cosine similarity of the encoder in ``folder``. Raises KvfoldError when another one was measured."""
        expected, written = self.drift.measured.cosine or 0.0, written_cosine(folder, self)
        if abs(written - expected) > _AGREE:
            raise KvfoldError(
                f"the written checkpoint has embeddings of cosine similarity {written:.6f} with the source's, the "
                f"converted model in memory had {expected:.6f} on the same text: nothing was kept; please report it"
            )
        return written

    def _entries(self, written: Mapping[str, float]) -> dict[str, Any]:
        text = {"source": self.tokens.source, "sha256": self.tokens.digest}
        counts = {"sequences": len(self.tokens.calibration), "held_out": len(self.tokens.held_out)}
        length = {"tokens_each": self.tokens.calibration.shape[1]}
        return {
            "calibration": text | counts | length,
            **self.choices,
            "drift": self.drift.to_dict() | {"written": dict(written)},
        }


@torch.no_grad()
def written_loss(folder: Path, measured: Calibrated) -> float:
    """Mean negative log-likelihood of the checkpoint in ``folder`` on the held-out sequences, nats per token."""
    tokens = measured.tokens.held_out
    with _written(folder, measured) as stream, hidden_states(measured.spill) as keep:
        parts = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
        states = last_states(stream, tokens, keep)
        return compare_predictions(stream, stream, states, states, parts).teacher_loss


@torch.no_grad()
def written_cosine(folder: Path, measured: Calibrated) -> float:
    """Mean cosine similarity of the embeddings of held-out sequences by the encoder in ``folder`` and the source."""
    tokens = measured.tokens.held_out
    with _written(folder, measured) as stream, hidden_states(measured.spill) as keep:
        states, expected = last_states(stream, tokens, keep), last_states(measured.stream, tokens, keep)
        return compare_predictions(measured.stream, stream, expected, states, [tokens]).cosine or 0.0


@contextmanager
def _written(folder: Path, measured: Calibrated) -> Iterator[CheckpointStream]:
    """The checkpoint in ``folder`` as a stream like the source's."""
    checkpoint, like = open_checkpoint(folder), measured.stream
    try:
        yield CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device, like.dtype)
    finally:
        checkpoint.close()


def quick_method(plan: Plan) -> str:
    """The method that reads no text."""
    return "svd" if plan.request.to == "mla" else "mean"


def print_start(plan: Plan, tokens: CalibrationTokens, source: CheckpointStream) -> None:
    """Print the calibration text and the time that the run will take to stderr."""
    if plan.request.quiet:
        return
    count, length = tokens.calibration.shape
    text = "text that the source wrote itself" if tokens.source == SELF else tokens.source
    seconds = costs_of(plan, processes.count()).seconds(machine_rates(plan, source, tokens.calibration))
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
    print(
        f"calibrating on {count} x {length} tokens of {text}; about {duration(sum(seconds.values()))}: {parts}. "
        f"(--method {quick_method(plan)} needs no text and is faster, but worse.)",
        file=sys.stderr,
    )
    if tokens.source == BUILT_IN:
        print(
            "text that resembles the model's use calibrates better: --calibration FILE.txt|FILE.jsonl", file=sys.stderr
        )


def machine_rates(
    plan: Plan, source: CheckpointStream, tokens: Tensor, clock: Callable[[], float] = time.monotonic
) -> Machine:
    """The rates of this machine, from a few sequences through the first layer and a small product in float64."""
    each, opened = first_layer_seconds(source, tokens, clock)
    names = source.stored_names(0)
    stored = sum(plan.checkpoint.info(name).nbytes for name in names)
    square = torch.ones(512, 512, dtype=torch.float64)
    started = clock()
    square @ square
    product = clock() - started
    flops = layer_flops(plan, tokens.shape[1])
    return Machine(
        processes.count(),
        flops / each,
        2 * 512**3 / product,
        stored / opened,
        flops / _training_seconds(plan, source, tokens, each, clock),
    )


def _training_seconds(
    plan: Plan, source: CheckpointStream, tokens: Tensor, each: float, clock: Callable[[], float]
) -> float:
    """Seconds that a token takes through a layer in training steps; ``each`` where they compute as the walk does."""
    trains = plan.request.refine or plan.request.polish
    dtype = training_autocast(plan.checkpoint, source.device) if trains else None
    if dtype is None or dtype == source.dtype:
        return each
    with torch.autocast(source.device.type, dtype):
        return first_layer_seconds(source, tokens, clock)[0]
