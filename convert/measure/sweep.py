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

Until a sweep ends, its finished rows are in ``sweep.json`` of the user's cache folder, by a digest
of what determines them: model, text, options, device and versions. The same targets continue from
them, in the same command or another.
"""

import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from kvfold.convert.conversion.layers import convert_layer, open_student
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.conversion.record import text_name, versions
from kvfold.convert.conversion.results import Conversion
from kvfold.convert.conversion.splits import choose_split, survey_layers
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import model_of
from kvfold.convert.formatting import format_duration
from kvfold.convert.measure.sweep_targets import (
    WITHIN,
    default_targets,
    format_target,
    parse_targets,
)
from kvfold.convert.options import format_argv
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import ConvertRequest, SweepRequest
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.transforms.latent.slots import LayerSurvey
from kvfold.convert.walk.walk import Step, Teacher, Walk

# Options that say what a sweep does; its conversions have all others too, in the same sense.
_OWN_OPTIONS = ("targets", "layout", "out", "fresh", "quiet")
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
    splits: Sequence[dict[str, Any]] = ()
    distances: tuple[float, ...] = ()

    @property
    def excess(self) -> float:
        """The target's loss on held-out text minus the source's, in nats per token."""
        return self.measured.excess

    def command(self, model: str, out: str) -> list[str]:
        """The words of the command that converts ``model`` to the target, into ``out``."""
        given = self.request.non_defaults()
        options = {name: value for name, value in given.items() if name not in _NOT_REPEATED}
        return ["kvfold", "convert", model, out, *format_argv(options)]

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
            "splits": list(self.splits),
        }


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep: ``rows`` in the requested order, measured in ``seconds`` in total."""

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


def _row_key(plan: Plan) -> str:
    settings = json.dumps(run_settings(plan), sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()


def _stored_path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvfold" / "sweep.json"


def _read_stored() -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):  # none, or a damaged file
        return dict(json.loads(_stored_path().read_bytes()))
    return {}


def _write_stored(rows: Mapping[str, Any]) -> None:
    path = _stored_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as new:
            write_file(new, json.dumps(rows))
    except OSError as error:
        print(f"warning: {path}: finished rows are not kept ({error.strerror})", file=sys.stderr)


def _stored_row(row: SweepRow) -> dict[str, Any]:
    split = {name: getattr(row.request, name) for name in ("budget", "kv_rank", "rope_dim")}
    return {**asdict(row), "request": split}


def _restore_row(stored: Mapping[str, Any], plan: Plan) -> SweepRow:
    measured = {**stored["measured"], "layers": (), "stretches": (), "by_sequence": ()}
    changed = {
        "request": replace(plan.request, **stored["request"]),
        "measured": Measurement(**measured),
        "distances": tuple(stored["distances"]),
    }
    return SweepRow(**{**stored, **changed})


@dataclass
class _Student:
    """The walk of the student that is converted to a target, and the splits tried for a budget."""

    target: str
    plan: Plan
    walk: Walk
    splits: Sequence[dict[str, Any]]
    seconds: float = 0.0
    distances: list[float] = field(default_factory=list)

    def measure(self, precision: str) -> SweepRow:
        """The row of the target. Its request names the split that was chosen for a budget."""
        started = time.monotonic()
        # Errors by layer and position are not reported.
        measured = replace(self.walk.measurement(), layers=(), stretches=(), by_sequence=())
        request = self.plan.request
        latent = self.plan.latent
        if latent is not None:
            request = replace(
                request, budget=None, kv_rank=latent.kv_rank, rope_dim=latent.rope_dim
            )
        return SweepRow(
            target=self.target,
            request=request,
            kind=self.plan.output.kind,
            cache_elements=self.plan.output.cache_elements,
            measured=measured,
            precision=precision,
            seconds=self.seconds + time.monotonic() - started,
            splits=tuple(self.splits),
            distances=tuple(self.distances),
        )


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
            check_output(request.out, overwrite=None, model=checkpoint.folder)
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
    """Sweep over groups of ``targets``, what needs least first; finished rows are shown, and stored
    until the end.
    """
    first = next(iter(targets.values()))
    keys = {target: _row_key(plan) for target, plan in targets.items()}
    stored = _read_stored()
    rows = dict[str, SweepRow]()
    for target, plan in targets.items():
        if keys[target] in stored and not request.fresh:
            with suppress(KeyError, TypeError):  # a damaged file
                rows[target] = _restore_row(stored[keys[target]], plan)
    if rows:
        _tell(
            request,
            f"resuming after {len(rows)} of {len(targets)} targets of the interrupted sweep"
            " (--fresh starts over)",
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
    count, length = tokens.calibration.shape
    text = f"{count} x {length} tokens of {text_name(tokens.source)}"
    _tell(request, f"sweeping over {len(targets)} targets on {text}")
    left = {target: plan for target, plan in targets.items() if target not in rows}
    try:
        for row in _fit_targets(left, calibration, scratch, stages):
            rows[row.target] = row
            stored[keys[row.target]] = _stored_row(row)
            _write_stored(stored)
            saving = format_saving(source.cache_elements, row.cache_elements)
            _tell(request, f"{row.kind}: {saving} cache, {format_metrics(row.measured)}")
    except BaseException as error:
        if rows:
            error.add_note(f"finished rows kept for the same request: {len(rows)}")
        raise
    _write_stored({key: row for key, row in stored.items() if key not in keys.values()})
    return Sweep(source, tuple(rows[target] for target in targets))


def _tell(request: SweepRequest, line: str) -> None:
    if not request.quiet:
        tqdm.write(line, file=sys.stderr)


def _fit_targets(
    plans: Mapping[str, Plan], calibration: Calibration, scratch: Path, stages: Stages
) -> Iterator[SweepRow]:
    """Fit and measure targets in groups that share a walk: folds, which need no survey, then MLA
    splits, then each budget, which needs trials of splits too.
    """
    folds = {target: plan for target, plan in plans.items() if plan.latent is None}
    latent = {target: plan for target, plan in plans.items() if plan.latent is not None}
    splits = {target: plan for target, plan in latent.items() if plan.request.budget is None}
    budgets = [{target: plan} for target, plan in latent.items() if target not in splits]
    if folds:
        yield from _fit_group(folds, calibration, [], scratch, stages)
    if latent:
        survey = survey_layers(next(iter(latent.values())), calibration, scratch, stages)
        for group in filter(None, [splits, *budgets]):
            yield from _fit_group(group, calibration, survey, scratch, stages)


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
        splits: list[dict[str, Any]] = []
        if plan.latent is not None:
            plan, splits = choose_split(plan, calibration, survey, scratch, stages)
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
                tensors, _ = convert_layer(plan, step, plan.request.refine, shared)
                student.distances.append(step.replace(tensors))
                student.seconds += time.monotonic() - started
                advance(1)
    with stages("measuring"):
        return [student.measure(dtype_name(source.training_dtype)) for student in students]
