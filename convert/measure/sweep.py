"""``kvfold sweep``: run the source through its layers, together with a student for each target.

::

    survey     run the source over the calibration text for statistics and rotary slots (only for
    MLA targets) for each group of targets, GQA and MQA first, then MLA splits, then every budget:
        splits     choose the budget's split by trials in a few layers (conversion/latent.py) sweep
        for lesson in teacher.layers():        one layer of the source, with its attention's results
                       for each target:                    fit, output fit, --refine: as in `kvfold
                       convert` run its student through the layer
        measure    compare each student with the source on held-out text; its row is shown and kept
        (sweep_rows.py)

Each student has its own residual streams and shares the source's open layer; no checkpoint is
written. The fitted layers and the measured loss are the same as with `kvfold convert`.
"""

import math
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvfold.attention.drift.compare import Stretch
from kvfold.attention.drift.report import Measurement, dtype_name, finite, perplexity
from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import Calibration, load_source_and_text
from kvfold.convert.conversion.convert import convert_checkpoint
from kvfold.convert.conversion.layers import finish_layer, fit_layer, open_student
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.conversion.record import percent_text, text_name, versions
from kvfold.convert.conversion.results import Conversion, Split
from kvfold.convert.conversion.splits import choose_split, survey_layers
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import model_of
from kvfold.convert.formatting import format_duration, format_table
from kvfold.convert.measure.sweep_rows import KeptRows
from kvfold.convert.measure.sweep_targets import (
    WITHIN,
    TargetOptions,
    default_targets,
    groups,
    parse_targets,
    spelled,
)
from kvfold.convert.options import to_argv
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import ConvertRequest, SweepRequest
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.transforms.latent.slots import LayerSurvey
from kvfold.convert.walk.walk import Step, Teacher, Walk

# Options of a sweep that its conversions have too, in the same sense.
_SHARED = (
    "model",
    "calibration",
    "samples",
    "seq_len",
    "seed",
    "refine",
    "device",
    "precision",
    "dtype",
    "trust_remote_code",
)
# Given as arguments of the command, or without influence on the result.
_NOT_REPEATED = ("model", "out", "quiet", "max_shard_size")
_SWEEP_HEAD = (
    "target",
    "cache_elements",
    "saving",
    "excess loss",
    "95 % interval",
    "KL, nats",
    "top-1",
    "time",
)
# Room for usual numbers, so that tables of several sweeps can be laid side by side.
_SWEEP_WIDTHS = (0, 8, 6, 11, 18, 9, 6, 6)


@dataclass(frozen=True)
class SweptSource:
    """The source model of a sweep, its ``cache_elements`` per token per layer, and the text.

    Targets are measured on ``sequences`` held-out sequences of ``length`` tokens.
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
class SweptTarget:
    """A target in the notation of ``--targets``, the request that converts to it, and its cost.

    ``kind`` is, for example, ``MLA 32+32``. ``cache_elements`` are cached per token per layer.
    ``precision`` is the dtype in which the target was fitted. ``seconds`` excludes work that
    targets share. ``splits`` are the splits tried for a budget. ``distances`` are the relative
    errors of the residual stream by layer.
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

    @property
    def kl(self) -> float:
        """Mean KL divergence of the target's next-token distributions from the source's, in nats."""
        return self.measured.kl

    @property
    def agreement(self) -> float:
        """Fraction of held-out positions at which target and source predict the same next token."""
        return self.measured.agreement

    @property
    def perplexity(self) -> float:
        """The target's perplexity on held-out text."""
        return perplexity(self.measured.student_loss)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of ``excess``; None for a single sequence."""
        half = self.measured.excess_margin
        return None if half is None else (self.excess - half, self.excess + half)

    def line(self, source: SweptSource) -> str:
        """The row as one line, for a sweep that has not ended."""
        saving = f"{100 * (1 - self.cache_elements / source.cache_elements):.1f} % less cache"
        return (
            f"{self.kind}: {saving}, {percent_text(self.excess, self.measured.excess_margin)}, KL"
            f" {self.kl:.4f} nats"
        )

    def command(self, model: str, out: str) -> str:
        """The ``kvfold convert`` command that converts ``model`` to the target."""
        given = {
            name: value for name, value in self.request.given().items() if name not in _NOT_REPEATED
        }
        return shlex.join(["kvfold", "convert", model, out, *to_argv(given)])

    def to_dict(self, source: SweptSource) -> dict[str, Any]:
        """Plain JSON values, with None for numbers that are not finite."""
        low, high = self.interval or (None, None)
        return {
            "target": self.target,
            "kind": self.kind,
            "options": self.request.result_options(),
            "command": self.command(source.name, self.request.out),
            "cache_elements": self.cache_elements,
            "saving": 1 - self.cache_elements / source.cache_elements,
            "excess": {"value": finite(self.excess), "low": finite(low), "high": finite(high)},
            "perplexity": finite(self.perplexity),
            "kl": {"value": finite(self.kl), "margin": finite(self.measured.kl_margin)},
            "agreement": self.agreement,
            "precision": self.precision,
            "seconds": self.seconds,
            "residual_by_layer": [finite(distance) for distance in self.distances],
            **({"splits": [split.to_dict() for split in self.splits]} if self.splits else {}),
        }


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep, with ``rows`` in the requested order; ``seconds`` is the time for the
    whole sweep.
    """

    source: SweptSource
    rows: tuple[SweptTarget, ...]
    seconds: float = 0.0

    def smallest(self, within: float = WITHIN) -> SweptTarget | None:
        """The target with the smallest cache whose perplexity is at most ``within`` higher (0.01 is
        1 %), or None.

        If several have the same cache size, this is the one with the least loss.
        """
        # Perplexities compare as ratios, losses as differences: 1 % is 0.00995 nats.
        inside = [row for row in self.rows if row.excess <= math.log1p(within)]
        return min(inside, key=lambda row: (row.cache_elements, row.excess), default=None)

    def nearest(self) -> SweptTarget:
        """The target with the least excess loss."""
        return min(self.rows, key=lambda row: row.excess if math.isfinite(row.excess) else math.inf)

    def heading(self) -> list[str]:
        """A line about the source and a line about the text."""
        source = self.source
        before = perplexity(self.rows[0].measured.teacher_loss)
        return [
            (
                f"{source.name}: {source.kind}, {source.cache_elements} KV-cache elements per token per"
                " layer"
            ),
            f"perplexity {before:.2f} on {source.held_out}",
        ]

    def cells(self) -> list[tuple[str, ...]]:
        """The table's header and a row per target, largest cache first."""
        rows: list[tuple[str, ...]] = [_SWEEP_HEAD]
        for row in sorted(self.rows, key=lambda row: (-row.cache_elements, row.excess)):
            interval = "-" if row.interval is None else "{:+.4f} to {:+.4f}".format(*row.interval)
            saving = 1 - row.cache_elements / self.source.cache_elements
            measured = row.measured
            shown = (
                f"{row.cache_elements}",
                f"{100 * saving:.1f} %",
                f"{row.excess:+.4f}",
                interval,
                f"{measured.kl:.4f}",
            )
            rows.append(
                (
                    row.kind,
                    *shown,
                    f"{100 * measured.agreement:.1f} %",
                    format_duration(row.seconds),
                )
            )
        return rows

    def table(self) -> str:
        """Lines about the source and the text, the table, and a line about the time, as text."""
        shared = max(0.0, self.seconds - sum(row.seconds for row in self.rows))
        times = f"the sweep took {format_duration(self.seconds)}, including {format_duration(shared)} of shared work."
        note = f"Excess loss is in nats per token; time is for the target alone: {times}"
        return "\n".join(
            [*self.heading(), "", *format_table(self.cells(), _SWEEP_WIDTHS), "", note]
        )

    def decision(self, within: float = WITHIN) -> str:
        """The smallest target within the limit and its command, in two lines; or a line with the
        nearest target.
        """
        limit = f"within {100 * within:g} % perplexity"
        most = math.log1p(within)
        row = self.smallest(within)
        if row is None:
            best = self.nearest()
            advice = "more --refine steps" if best.request.refine else "--refine auto"
            doubtful = best.interval is not None and best.interval[0] <= most
            doubt = (
                "; the interval reaches the limit; more --samples would narrow it"
                if doubtful
                else ""
            )
            nearest = (
                f"{best.kind} comes nearest"
                f" ({percent_text(best.excess, best.measured.excess_margin)}{doubt})"
            )
            return f"no target is {limit}; {nearest}. Try {advice}, or larger targets"
        saved = f"{100 * (1 - row.cache_elements / self.source.cache_elements):.1f} % less cache"
        loss = percent_text(row.excess, row.measured.excess_margin)
        beyond = row.interval is not None and row.interval[1] > most
        doubt = "; the interval exceeds the limit; more --samples would narrow it" if beyond else ""
        command = row.command(self.source.name, row.request.out)
        return f"{limit}: {row.kind}, {saved} ({loss}{doubt})\n  {command}"

    def convert(self, within: float = WITHIN, *, quiet: bool = False) -> Conversion:
        """Convert to the smallest target within the limit. Raises InputError if no target is within
        it.
        """
        row = self.smallest(within)
        if row is None:
            raise InputError(
                f"{self.rows[0].request.out}: nothing was written; {self.decision(within)}"
            )
        return convert_checkpoint(replace(row.request, quiet=quiet))

    def to_dict(self, within: float = WITHIN) -> dict[str, Any]:
        """Plain JSON values; ``smallest`` is the smallest target within the limit, or None."""
        row = self.smallest(within)
        return {
            "source": (
                vars(self.source)
                | {"perplexity": finite(perplexity(self.rows[0].measured.teacher_loss))}
            ),
            "versions": versions(),
            "seconds": self.seconds,
            "targets": [each.to_dict(self.source) for each in self.rows],
            "within": within,
            "smallest": None if row is None else row.target,
        }


@dataclass
class _Target:
    """One target, the walk of the student converted to it, and the splits tried for a budget."""

    target: str
    plan: Plan
    walk: Walk
    splits: Sequence[Split]
    seconds: float = 0.0
    distances: list[float] = field(default_factory=list)


def sweep_checkpoint(request: SweepRequest, progress: Progress | None = None) -> Sweep:
    """Fit and measure ``targets`` of ``model`` without writing a checkpoint::

        found = sweep_checkpoint(SweepRequest("MODEL", "gqa:4,2 mqa mla:576,512+64"))
        print(found.table())
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
    common: TargetOptions = {name: getattr(request, name) for name in _SHARED}
    common |= {"out": request.out or "OUT", "quiet": True}
    started = time.monotonic()
    with closing(open_checkpoint(request.model)) as checkpoint:
        if request.out is not None:
            check_output(request.out, model=checkpoint.folder)
        model = model_of(checkpoint.config, checkpoint.tensors)
        chosen = named or default_targets(model, request.layout)
        plans = []
        for options in chosen:
            layout = request.layout if options["to"] == "mla" else None
            try:
                plans.append(
                    make_plan(ConvertRequest(**common, **options, layout=layout), checkpoint)
                )
            except InputError as error:
                raise error.with_prefix(f"--targets {spelled(options)}") from error
        check_memory(plans[0])
        with tempfile.TemporaryDirectory(prefix="kvfold-sweep-") as scratch, checkpoint.hashing():
            found = _sweep(chosen, plans, Path(scratch), Stages(progress, request.quiet), request)
        # A file that was replaced while its layers were read would give numbers of no model.
        checkpoint.check_unchanged()
        source = replace(found.source, sha256=checkpoint.source_hash())
    return replace(found, source=source, seconds=time.monotonic() - started)


def _sweep(
    chosen: Sequence[TargetOptions],
    plans: Sequence[Plan],
    scratch: Path,
    stages: Stages,
    request: SweepRequest,
) -> Sweep:
    """Sweep over groups of ``plans``, what needs least first; finished rows are shown, and kept
    until the end.
    """
    first = plans[0]
    targets = [spelled(options) for options in chosen]
    rows = dict[str, SweptTarget]()
    kept = KeptRows(
        first, {name: getattr(request, name) for name in (*_SHARED, "layout")}, request.fresh
    )
    for target, plan in zip(targets, plans, strict=True):
        with suppress(KeyError, TypeError):  # a damaged file
            rows[target] = _row_of(target, plan, kept.rows[target])
    if rows and not request.quiet:
        done = f"{len(rows)} of {len(plans)} targets of the interrupted sweep"
        print(f"resuming after {done} (--fresh starts over)", file=sys.stderr)
    with stages("reading the text and the model"):
        calibration = load_source_and_text(first, scratch, stages, "")
    tokens = calibration.tokens
    source = SweptSource(
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
        where = f"{count} x {length} tokens of {text_name(tokens.source)}"
        print(
            f"sweeping over {len(plans)} target{'s' * (len(plans) != 1)} on {where}",
            file=sys.stderr,
        )
    surveyed: list[LayerSurvey] = []
    try:
        for group in groups(
            {
                target: plan
                for target, plan in zip(targets, plans, strict=True)
                if target not in rows
            }
        ):
            latent = [plan for plan in group.values() if plan.latent is not None]
            if latent and not surveyed:
                surveyed = survey_layers(latent[0], calibration, scratch, stages)
            for row in _swept(group, calibration, surveyed, scratch, stages):
                rows[row.target] = row
                kept.add(row.target, _row_values(row))
                if not request.quiet:
                    tqdm.write(row.line(source), file=sys.stderr)
    except BaseException as error:
        if rows:
            error.add_note(f"finished rows kept for the same request: {len(rows)}")
        raise
    kept.forget()
    return Sweep(source, tuple(rows[target] for target in targets))


def _swept(
    plans: Mapping[str, Plan],
    calibration: Calibration,
    surveyed: Sequence[LayerSurvey],
    scratch: Path,
    stages: Stages,
) -> list[SweptTarget]:
    """Fit and measure targets in one walk over the source; ``surveyed`` is for MLA targets, with
    statistics in ``scratch``.
    """
    tokens = calibration.tokens
    teacher = Teacher(
        calibration.source,
        tokens.held_out,
        tokens.calibration,
        next(iter(plans.values())).model,
        keep_calibration=True,
    )
    students = []
    for target, plan in plans.items():
        splits: list[Split] = []
        if plan.latent is not None:
            plan, splits, _ = choose_split(plan, calibration, surveyed, scratch, stages)
        walk = Walk(teacher, open_student(plan, calibration))
        students.append(_Target(target, plan, walk, splits))
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
                tensors, _ = finish_layer(plan, step, weights, plan.request.refine, quiet=True)
                student.distances.append(step.replace(tensors))
                student.seconds += time.monotonic() - started
                advance(1)
    with stages("measuring"):
        return [
            _measured(student, dtype_name(calibration.source.training_dtype))
            for student in students
        ]


def _row_values(row: SweptTarget) -> dict[str, Any]:
    """A finished row as JSON values, for `_row_of`; its errors by layer and head are not needed
    again.
    """
    stretches = [vars(each) for each in row.measured.stretches]
    return {
        "measured": {**vars(row.measured), "layers": [], "stretches": stretches, "by_sequence": []},
        "split": [row.request.kv_rank, row.request.rope_dim],
        "splits": [vars(each) for each in row.splits],
        **{
            name: getattr(row, name)
            for name in ("kind", "cache_elements", "precision", "seconds", "distances")
        },
    }


def _row_of(target: str, plan: Plan, values: Mapping[str, Any]) -> SweptTarget:
    """The row of a target that was finished before. Raises KeyError or TypeError if ``values`` are
    damaged.
    """
    measured, (rank, rope) = values["measured"], values["split"]
    stretches = tuple(Stretch(**each) for each in measured["stretches"])
    return SweptTarget(
        target=target,
        request=replace(plan.request, budget=None, kv_rank=rank, rope_dim=rope),
        kind=values["kind"],
        cache_elements=values["cache_elements"],
        measured=Measurement(
            **{**measured, "layers": (), "stretches": stretches, "by_sequence": ()}
        ),
        precision=values["precision"],
        seconds=values["seconds"],
        splits=tuple(Split(**each) for each in values["splits"]),
        distances=tuple(values["distances"]),
    )


def _measured(student: _Target, precision: str) -> SweptTarget:
    """The target with its loss on held-out text; its request contains the chosen split instead of a
    budget.
    """
    started = time.monotonic()
    request = student.plan.request
    target = student.plan.latent
    measured = student.walk.measurement()
    if request.budget is not None and target is not None:
        request = replace(request, budget=None, kv_rank=target.kv_rank, rope_dim=target.rope_dim)
    return SweptTarget(
        target=student.target,
        request=request,
        kind=student.plan.layout.kind,
        cache_elements=student.plan.layout.cache_elements,
        measured=measured,
        precision=precision,
        seconds=student.seconds + time.monotonic() - started,
        splits=tuple(student.splits),
        distances=tuple(student.distances),
    )
