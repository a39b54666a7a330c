"""Run the source through its layers, together with a student for each target.

::

    survey       if there are MLA targets: statistics and rotary slots of all layers
    for each group of targets (GQA and MQA, then MLA splits, then every budget):
        splits   for a budget: choose its split by trials in a few layers
        sweep    for each layer of the source, opened once, with its attention's results:
                     for each target: fit its layer as `kvfold convert` does, and run its student
        measure  compare each student with the source on held-out text; its row is shown and kept

Each student has its own residual streams and shares the source's open layer; no checkpoint is
written. The fitted layers and the measured loss are the same as with `kvfold convert`.
"""

import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvfold.attention.drift.compare import Measurement
from kvfold.attention.drift.metrics import (
    METRICS,
    finite,
    format_metric,
    format_metrics,
    format_saving,
    metrics_dict,
)
from kvfold.attention.drift.report import dtype_name, perplexity
from kvfold.convert.checkpoint.atomic import check_output, replacing, write_file
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import Calibration, load_source_and_text
from kvfold.convert.conversion.convert import convert_checkpoint
from kvfold.convert.conversion.journal import run_settings
from kvfold.convert.conversion.layers import (
    attention_update,
    fit_layer,
    open_student,
    refine_tensors,
)
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.conversion.record import text_name, versions
from kvfold.convert.conversion.results import Conversion, Split
from kvfold.convert.conversion.splits import choose_split, survey_layers
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import model_of
from kvfold.convert.formatting import format_duration
from kvfold.convert.measure.sweep_targets import (
    WITHIN,
    default_targets,
    format_target,
    group_targets,
    parse_targets,
)
from kvfold.convert.options import to_argv
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import ConvertRequest, SweepRequest
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.transforms.latent.slots import LayerSurvey
from kvfold.convert.walk.output_fit import refit_output
from kvfold.convert.walk.walk import Step, Teacher, Walk

# Options that say what a sweep does; its conversions have all others too, in the same sense.
_OWN_OPTIONS = ("targets", "layout", "out", "fresh", "quiet")
# Without influence on the row of a target.
_RUN_ONLY = ("targets", "out", "fresh", "quiet")
# Given as arguments of the command, or without influence on the result.
_NOT_REPEATED = ("model", "out", "quiet", "max_shard_size")


@dataclass(frozen=True)
class SweepSource:
    """The source of a sweep, and the text: targets are measured on ``sequences`` held-out sequences
    of ``length`` tokens. ``cache_elements`` are per token per layer.
    """

    name: str
    sha256: str
    kind: str
    cache_elements: int
    layers: int
    text: str
    text_sha256: str
    calibration_sequences: int
    sequences: int
    length: int

    @property
    def held_out(self) -> str:
        """A description of the text on which targets are measured."""
        return f"{self.sequences} x {self.length} held-out tokens of {text_name(self.text)}"


@dataclass(frozen=True)
class SweepRow:
    """What a target costs.

    target: in the notation of ``--targets``
    request: converts to it, with the split that was chosen for a budget
    kind: such as ``MLA 32+32``
    cache_elements: per token per layer
    measured: the target's student against the source on held-out text
    precision: dtype in which the target was fitted
    seconds: without the work that targets share
    splits: those tried for a budget
    distances: relative error of the residual stream after each layer
    """

    target: str
    request: ConvertRequest
    kind: str
    cache_elements: int
    measured: Measurement
    precision: str
    seconds: float
    splits: tuple[Split, ...] = ()
    distances: tuple[float, ...] = ()

    @property
    def excess(self) -> float:
        """The target's loss on held-out text minus the source's, in nats per token."""
        return self.measured.excess

    def command(self, model: str, out: str) -> list[str]:
        """The words of the command that converts ``model`` to the target, into ``out``."""
        given = self.request.given()
        options = {name: value for name, value in given.items() if name not in _NOT_REPEATED}
        return ["kvfold", "convert", model, out, *to_argv(options)]

    def to_dict(self, source: SweepSource) -> dict[str, Any]:
        """JSON values, with None for numbers that are not finite."""
        return {
            "target": self.target,
            "kind": self.kind,
            "options": self.request.result_options(),
            "command": shlex.join(self.command(source.name, self.request.out)),
            "cache_elements": self.cache_elements,
            "saving": 1 - self.cache_elements / source.cache_elements,
            **metrics_dict(self.measured, None),
            "perplexity": finite(perplexity(self.measured.student_loss)),
            "precision": self.precision,
            "seconds": self.seconds,
            "residual_by_layer": [finite(distance) for distance in self.distances],
            "splits": [split.to_dict() for split in self.splits],
        }


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep, with ``rows`` in the requested order, after ``seconds`` in all."""

    source: SweepSource
    rows: tuple[SweepRow, ...]
    seconds: float = 0.0

    def smallest(self, within: float = WITHIN) -> SweepRow | None:
        """The target with the smallest cache whose perplexity is at most ``within`` higher (0.01 is
        1 %), or None.

        If several have the same cache size, this is the one with the least loss.
        """
        # Perplexities compare as ratios, losses as differences: 1 % is 0.00995 nats.
        inside = [row for row in self.rows if row.excess <= math.log1p(within)]
        return min(inside, key=lambda row: (row.cache_elements, row.excess), default=None)

    def nearest(self) -> SweepRow:
        """The target with the least excess loss."""
        return min(self.rows, key=lambda row: row.excess if math.isfinite(row.excess) else math.inf)

    def verdict(self, within: float = WITHIN) -> str:
        """The smallest target within the limit, or the nearest to it, in a few words."""
        limit = f"within {100 * within:g} % perplexity"
        row = self.smallest(within)
        if row is None:
            return f"none {limit}; nearest: {self.nearest().kind}"
        margin = row.measured.excess_margin or 0.0
        doubt = ", uncertain" if row.excess + margin > math.log1p(within) else ""
        return f"{limit}: {row.kind}{doubt}"

    def table_rows(self) -> list[tuple[str, ...]]:
        """The header and a row of cells per target, largest cache first."""
        rows = [("target", "cache", "saving", *(metric.label for metric in METRICS), "time")]
        for row in sorted(self.rows, key=lambda row: (-row.cache_elements, row.excess)):
            saving = format_saving(self.source.cache_elements, row.cache_elements)
            figures = (
                format_metric(metric, row.measured, interval=metric.interval) for metric in METRICS
            )
            cells = (f"{row.cache_elements}", saving, *figures)
            rows.append((row.kind, *cells, format_duration(row.seconds)))
        return rows

    def convert(self, within: float = WITHIN, *, quiet: bool = False) -> Conversion:
        """Convert to the smallest target within the limit. Raises InputError if no target is within
        it.
        """
        row = self.smallest(within)
        if row is None:
            raise InputError(
                f"{self.rows[0].request.out}: nothing was written; {self.verdict(within)}. Accept"
                " more with --within, try larger --targets, or --refine auto",
                field="within",
            )
        return convert_checkpoint(replace(row.request, quiet=quiet))

    def to_dict(self, within: float = WITHIN) -> dict[str, Any]:
        """JSON values; ``smallest`` is the smallest target within the limit, or None."""
        row = self.smallest(within)
        before = perplexity(self.rows[0].measured.teacher_loss)
        return {
            "source": asdict(self.source) | {"perplexity": finite(before)},
            "versions": versions(),
            "seconds": self.seconds,
            "targets": [row.to_dict(self.source) for row in self.rows],
            "within": within,
            "smallest": None if row is None else row.target,
        }


class FinishedRows:
    """The rows of an unfinished sweep, in the user's cache folder until it ends, so that the same
    command continues.

    A sweep of another model, text or options has another file. ``plan`` is that of a target.
    Without a writable cache folder nothing is kept.
    """

    def __init__(self, plan: Plan, request: SweepRequest) -> None:
        settings = run_settings(plan)
        options = {name: value for name, value in vars(request).items() if name not in _RUN_ONLY}
        about = [options, settings["device"], settings["versions"], settings["files"]]
        digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = cache / "kvfold" / f"sweep-{digest[:16]}.json"
        self.values: dict[str, Any] = {}
        if not request.fresh:
            with suppress(OSError, ValueError, TypeError):  # none, or a damaged file
                self.values = dict(json.loads(self.path.read_bytes()))

    def restore(self, target: str, plan: Plan) -> SweepRow | None:
        """The row of ``target``, if it was finished before."""
        with suppress(KeyError, TypeError):  # none, or a damaged file
            values = dict(self.values[target])
            rank, rope = values.pop("split")
            request = replace(plan.request, budget=None, kv_rank=rank, rope_dim=rope)
            values["measured"] = Measurement(layers=(), **values["measured"])
            values["splits"] = tuple(Split(**split) for split in values["splits"])
            values["distances"] = tuple(values["distances"])
            return SweepRow(target=target, request=request, **values)
        return None

    def add(self, row: SweepRow) -> None:
        """Store a finished row."""
        values = {name: value for name, value in vars(row).items() if name != "request"}
        del values["target"]
        measured = vars(row.measured)
        values["measured"] = {name: value for name, value in measured.items() if value != ()}
        values["split"] = [row.request.kv_rank, row.request.rope_dim]
        values["splits"] = [vars(split) for split in row.splits]
        self.values[row.target] = values
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.path) as new:
                write_file(new, json.dumps(self.values))
        except OSError as error:
            print(
                f"warning: {self.path}: finished rows are not kept ({error.strerror})",
                file=sys.stderr,
            )

    def remove(self) -> None:
        """Remove the file, after the sweep's end."""
        with suppress(OSError):  # without a usable cache folder there is none
            self.path.unlink()


@dataclass
class _Student:
    """The walk of the student that is converted to a target, and the splits tried for a budget."""

    target: str
    plan: Plan
    walk: Walk
    splits: Sequence[Split]
    seconds: float = 0.0
    distances: list[float] = field(default_factory=list)


def sweep_checkpoint(request: SweepRequest, progress: Progress | None = None) -> Sweep:
    """Fit and measure ``targets`` of ``model`` without writing a checkpoint::

        found = sweep_checkpoint(SweepRequest("MODEL", "gqa:4,2 mqa mla:576,512+64"))
        found.smallest(0.01)        # the smallest within 1 % of the source's perplexity, or None

    The default ``targets`` are a few GQA, MQA and MLA sizes that suit the model. The split for a
    budget ``mla:N`` is chosen by trials in a few layers. The other options are the same as in
    `ConvertRequest`; ``out`` is only checked here and used by `Sweep.convert`. ``progress`` works
    as in `convert_checkpoint`, with the stages ``survey``, ``splits`` (splits times layers) and
    ``sweep`` (layers times targets that are fitted together). The residual streams of all
    calibration tokens stay in memory, once for the source and once for each target. Raises
    InputError for an invalid target, option or checkpoint.

    >>> sizes = {"samples": 4, "seq_len": 32, "quiet": True}
    >>> found = sweep_checkpoint(SweepRequest(demo_folder(), "gqa:4 mqa", **sizes))
    >>> [(row.kind, row.cache_elements) for row in found.rows]
    [('GQA-4', 256), ('MQA', 64)]
    """
    named = parse_targets(request.targets) if request.targets else None
    common = {name: value for name, value in vars(request).items() if name not in _OWN_OPTIONS}
    common |= {"out": request.out or "OUT", "quiet": True}
    started = time.monotonic()
    with closing(open_checkpoint(request.model)) as checkpoint:
        if request.out is not None:
            check_output(request.out, model=checkpoint.folder)
        model = model_of(checkpoint.config, checkpoint.tensors)
        targets = {}
        for options in named or default_targets(model, request.layout):
            target = format_target(options)
            layout = request.layout if options["to"] == "mla" else None
            try:
                conversion = ConvertRequest(**common, **options, layout=layout)
                targets[target] = make_plan(conversion, checkpoint)
            except InputError as error:
                raise error.with_prefix(f"--targets {target}") from error
        check_memory(next(iter(targets.values())))
        with tempfile.TemporaryDirectory(prefix="kvfold-sweep-") as scratch:
            found = _sweep(targets, Path(scratch), Stages(progress, request.quiet), request)
        # A file that was replaced while its layers were read would give numbers of no model.
        checkpoint.check_unchanged()
        source = replace(found.source, sha256=checkpoint.model_digest())
    return replace(found, source=source, seconds=time.monotonic() - started)


def _sweep(
    targets: Mapping[str, Plan], scratch: Path, stages: Stages, request: SweepRequest
) -> Sweep:
    """Sweep over groups of ``targets``, what needs least first; finished rows are shown, and kept
    until the end.
    """
    first = next(iter(targets.values()))
    finished = FinishedRows(first, request)
    rows = dict[str, SweepRow]()
    for target, plan in targets.items():
        row = finished.restore(target, plan)
        if row is not None:
            rows[target] = row
    if rows and not request.quiet:
        print(
            f"resuming after {len(rows)} of {len(targets)} targets of the interrupted sweep"
            " (--fresh starts over)",
            file=sys.stderr,
        )
    with stages("reading the text and the model"):
        calibration = load_source_and_text(first, scratch, stages, "")
    tokens = calibration.tokens
    source = SweepSource(
        name=first.request.model,
        sha256="",  # not known before every byte is read
        kind=first.source_kind,
        cache_elements=first.cache_elements,
        layers=first.geometry.layers,
        text=tokens.source,
        text_sha256=tokens.digest,
        calibration_sequences=len(tokens.calibration),
        sequences=len(tokens.held_out),
        length=tokens.held_out.shape[1],
    )
    if not request.quiet:
        count, length = tokens.calibration.shape
        print(
            f"sweeping over {len(targets)} targets on {count} x {length} tokens of"
            f" {text_name(tokens.source)}",
            file=sys.stderr,
        )
    survey: list[LayerSurvey] = []
    left = {target: plan for target, plan in targets.items() if target not in rows}
    try:
        for group in group_targets(left):
            latent = [plan for plan in group.values() if plan.latent is not None]
            if latent and not survey:
                survey = survey_layers(latent[0], calibration, scratch, stages)
            for row in _fit_group(group, calibration, survey, scratch, stages):
                rows[row.target] = row
                finished.add(row)
                if not request.quiet:
                    saving = format_saving(source.cache_elements, row.cache_elements)
                    line = f"{row.kind}: {saving} cache, {format_metrics(row.measured)}"
                    tqdm.write(line, file=sys.stderr)
    except BaseException as error:
        if rows:
            error.add_note(f"finished rows kept for the same request: {len(rows)}")
        raise
    finished.remove()
    return Sweep(source, tuple(rows[target] for target in targets))


def _fit_group(
    plans: Mapping[str, Plan],
    calibration: Calibration,
    survey: Sequence[LayerSurvey],
    scratch: Path,
    stages: Stages,
) -> list[SweepRow]:
    """Fit and measure targets in one walk over the source; ``survey`` is for MLA targets, with
    statistics in ``scratch``.
    """
    source = calibration.source
    teacher = Teacher(
        source,
        calibration.tokens.held_out,
        calibration.tokens.calibration,
        next(iter(plans.values())).model,
        keep_calibration=True,
    )
    students = []
    for target, plan in plans.items():
        splits: list[Split] = []
        if plan.latent is not None:
            plan, splits, _ = choose_split(plan, calibration, survey, scratch, stages)
        students.append(
            _Student(target, plan, Walk(teacher, open_student(plan, calibration)), splits)
        )
    with stages("sweep", teacher.stream.layers * len(students), "fit") as advance:
        for lesson in teacher.layers():
            # The loss of sharing a pair of heads depends on the layer alone, not on the number of
            # heads that stay.
            shared: dict[bool, Pairs] = {}
            for student in students:
                started = time.monotonic()
                step = Step(lesson, student.walk)
                plan = student.plan
                weights = fit_layer(plan, step.index, step, shared).weights
                weights, _ = refit_output(step, weights, attention_update(plan))
                tensors = plan.layout.encode(step.index, weights)
                tensors, _ = refine_tensors(plan, step, tensors, plan.request.refine)
                student.distances.append(step.replace(tensors))
                student.seconds += time.monotonic() - started
                advance(1)
    with stages("measuring"):
        return [_measure(student, dtype_name(source.training_dtype)) for student in students]


def _measure(student: _Student, precision: str) -> SweepRow:
    """The target with its loss on held-out text; its request contains the chosen split instead of a
    budget.
    """
    started = time.monotonic()
    plan = student.plan
    request = plan.request
    # Errors by layer and position are not reported.
    measured = replace(student.walk.measurement(), layers=(), stretches=(), by_sequence=())
    if request.budget is not None and plan.latent is not None:
        rank = plan.latent.kv_rank
        request = replace(request, budget=None, kv_rank=rank, rope_dim=plan.latent.rope_dim)
    return SweepRow(
        target=student.target,
        request=request,
        kind=plan.layout.kind,
        cache_elements=plan.layout.cache_elements,
        measured=measured,
        precision=precision,
        seconds=student.seconds + time.monotonic() - started,
        splits=tuple(student.splits),
        distances=tuple(student.distances),
    )
