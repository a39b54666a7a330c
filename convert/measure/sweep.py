"""Run the source through its layers, together with a student for each target.

::

    for GQA and MQA, then for MLA:
        survey   for MLA: statistics and rotary slots of all layers
        splits   for each budget: choose its split by trials in a few layers
        sweep    for each layer of the source, opened once, with its attention's results:
                     for each target: fit its layer as `kvfold convert` does, and run its student
        measure  compare the students with the source on held-out text; show their rows

Each student has its own residual streams and shares the source's open layer; no checkpoint is
written. The fitted layers and the measured loss are the same as with `kvfold convert`.
"""

import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvfold.attention.drift.compare import DriftMeasurement
from kvfold.attention.drift.metrics import (
    EXCESS,
    METRICS,
    format_cache_saving,
    format_metric,
    format_metrics,
    metrics_to_dict,
)
from kvfold.attention.drift.report import compute_perplexity
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import Calibration, load_source_and_text
from kvfold.convert.conversion.estimate import announce_stages
from kvfold.convert.conversion.judgment import (
    LIMITS,
    NEAR,
    LossFigures,
    format_convert_command,
    is_within,
    predict_loss_after_normal_effort,
    request_more_training,
)
from kvfold.convert.conversion.layers import build_student, convert_layer
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.conversion.record import describe_calibration_text, get_package_versions
from kvfold.convert.conversion.splits import choose_slots_and_split, survey_layers
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import make_model
from kvfold.convert.formatting import format_duration
from kvfold.convert.measure.sweep_targets import (
    format_target,
    parse_targets,
    propose_default_targets,
)
from kvfold.convert.progress import Progress, ProgressStages
from kvfold.convert.request import ConvertRequest, SweepRequest
from kvfold.convert.transforms.fold.grouping import PairLosses
from kvfold.convert.walk.walk import Teacher, Walk, WalkLayer

# Options that say what a sweep does; its conversions have all others too, in the same sense.
_OWN_OPTIONS = ("targets", "layout", "context", "out", "within", "quiet")


@dataclass(frozen=True)
class SweepRow:
    """A target of a sweep with its cache size, its measured loss and the request that converts to
    it.

    target: in the notation of ``--targets``
    request: converts to it, with the split that was chosen for a budget
    kind: such as ``MLA 32+32``
    cache_elements: per token per layer
    measured: the target's student against the source on held-out text
    seconds: without the work that targets share
    """

    target: str
    request: ConvertRequest
    kind: str
    cache_elements: int
    measured: DriftMeasurement
    seconds: float

    @property
    def command(self) -> list[str]:
        """The ``kvfold convert`` command that converts to this target, as a list of words."""
        return format_convert_command(self.request, exact=True)

    @property
    def expected(self) -> LossFigures | None:
        """What ``--effort normal`` is expected to leave of the measured loss; None if the sweep
        refined the target.
        """
        return predict_loss_after_normal_effort(self.request, self.measured)


def _find_smallest(rows: Iterable[SweepRow]) -> SweepRow | None:
    """The row with the smallest cache, and of several the one with the least loss; None without
    rows.
    """
    return min(rows, key=lambda row: (row.cache_elements, row.measured.excess), default=None)


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep: one row per target, and the limit that a target must meet.

    model: the name of the source
    sha256: the digest of the source's tensors
    kind: the source's attention
    cache_elements: of the source, per token per layer
    text: the held-out text on which targets are measured
    within: the accepted share of perplexity, 0.01 is 1 %; None accepts what is near the source
    rows: one for each target, in the requested order
    seconds: in total
    """

    model: str
    sha256: str
    kind: str
    cache_elements: int
    text: str
    within: float | None
    rows: list[SweepRow]
    seconds: float

    @property
    def loss_limit(self) -> LossFigures:
        """The largest figures that a target may have."""
        if self.within is None:
            return LIMITS[NEAR]
        # Perplexities compare as ratios, losses as differences: 1 % is 0.00995 nats.
        return LossFigures(math.log1p(self.within), kl=math.inf, agreement=0.0)

    @property
    def limit_name(self) -> str:
        """The limit in words."""
        return NEAR if self.within is None else f"within {100 * self.within:g} % perplexity"

    @property
    def smallest(self) -> SweepRow | None:
        """The target with the smallest cache whose measured loss is within the limit, or None."""
        return _find_smallest(row for row in self.rows if is_within(row.measured, self.loss_limit))

    @property
    def smallest_after_training(self) -> SweepRow | None:
        """The target with the smallest cache that is expected to be within the limit after
        ``--effort normal``, or None.
        """
        return _find_smallest(
            row for row in self.rows if row.expected and is_within(row.expected, self.loss_limit)
        )

    @property
    def least_loss_row(self) -> SweepRow:
        """The target with the least excess loss, whether or not it is within the limit."""
        finite = [row for row in self.rows if math.isfinite(row.measured.excess)]
        return min(finite or self.rows, key=lambda row: row.measured.excess)

    @property
    def recommended(self) -> ConvertRequest:
        """The request of the smallest target within the limit, with ``--effort normal`` if it is
        only expected to be; otherwise that of the nearest target, with more training.
        """
        if self.smallest is not None:
            return self.smallest.request
        request = (self.smallest_after_training or self.least_loss_row).request
        return request_more_training(request) or request

    @property
    def verdict(self) -> str:
        """One sentence that names the smallest target within the limit, or else the target with the
        least loss.
        """
        limit = self.limit_name
        if self.smallest is not None:
            row = self.smallest
            highest = row.measured.excess + (row.measured.excess_margin or 0.0)
            doubt = ", uncertain" if highest > self.loss_limit.excess else ""
            return f"{limit}: {row.kind}{doubt}"
        if self.smallest_after_training is not None:
            return f"{limit}, expected with --effort normal: {self.smallest_after_training.kind}"
        return f"none {limit}; nearest: {self.least_loss_row.kind}"

    def format_rows(self) -> list[tuple[str, ...]]:
        """The cells of a table with a header and one row per target, largest cache first."""
        labels = [metric.label for metric in METRICS]
        rows = [("target", "cache", "saving", *labels, "normal", "time")]
        for row in sorted(self.rows, key=lambda row: (-row.cache_elements, row.measured.excess)):
            saving = format_cache_saving(self.cache_elements, row.cache_elements)
            saving = saving.removesuffix(" less")  # the table then fits 80 columns
            figures = (
                format_metric(metric, row.measured, interval=metric.interval) for metric in METRICS
            )
            expected = "-" if row.expected is None else format_metric(EXCESS, row.expected)
            seconds = format_duration(row.seconds)
            rows.append((row.kind, str(row.cache_elements), saving, *figures, expected, seconds))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The sweep as JSON values. Its key ``smallest`` names the smallest target whose perplexity
        rises by at most ``within``; None if there is none. ``recommended`` is a command.
        """
        targets = [
            {
                "target": row.target,
                "kind": row.kind,
                "command": shlex.join(row.command),
                "cache_elements": row.cache_elements,
                "saving": 1 - row.cache_elements / self.cache_elements,
                **metrics_to_dict(row.measured, None),
                "expected": row.expected and row.expected._asdict(),
                "perplexity": compute_perplexity(row.measured.student_loss),
                "seconds": row.seconds,
            }
            for row in self.rows
        ]
        return {
            **vars(self),
            "perplexity": compute_perplexity(self.rows[0].measured.teacher_loss),
            "rows": targets,
            "smallest": self.smallest and self.smallest.target,
            "recommended": shlex.join(format_convert_command(self.recommended)),
            "versions": get_package_versions(),
        }


def sweep_checkpoint(request: SweepRequest, progress: Progress | None = None) -> SweepResult:
    """Fit and measure several targets of a model, the quickest first, without writing a checkpoint.

    For example::

        found = sweep_checkpoint(SweepRequest("MODEL", "gqa:4,2 mqa mla:576,512+64", within=0.02))
        if found.smallest is not None:  # within 2 % of the source's perplexity
            convert_checkpoint(found.smallest.request)

    The default ``targets`` are a few GQA, MQA and MLA sizes that suit the model. The split for a
    budget ``mla:N`` is chosen by trials in a few layers. The other options are the same as in
    `ConvertRequest`; ``out`` is that of the rows' requests. ``progress`` works as in
    `convert_checkpoint`, with the stages ``survey``, ``splits``, ``sweep`` (layers times targets
    that are fitted together) and ``measure`` (tokens times these targets). The residual streams of
    all calibration tokens stay in memory, once for the source and once for each target. Raises
    InputError for an invalid target, option or checkpoint.

    >>> sizes = {"samples": 4, "seq_len": 32, "quiet": True}
    >>> found = sweep_checkpoint(SweepRequest(demo_folder(), "gqa:4 mqa", **sizes))
    >>> [(row.kind, row.cache_elements) for row in found.rows]
    [('GQA-4', 256), ('MQA', 64)]
    """
    named = parse_targets(request.targets)
    common = {name: value for name, value in vars(request).items() if name not in _OWN_OPTIONS}
    common |= {"out": request.out or "OUT", "quiet": True}
    started = time.monotonic()
    stages = ProgressStages(progress, request.quiet)
    plans = {}
    rows = {}
    checkpoint = open_checkpoint(request.model)
    model = make_model(checkpoint.config, checkpoint.tensors)
    if request.context is not None:
        model = model.shorten_context(request.context)
    for options in named or propose_default_targets(model, request.layout):
        target = format_target(options)
        if options["to"] == "mla":
            options |= {"layout": request.layout, "context": request.context}
        try:
            conversion = ConvertRequest(**common, **options)
            plans[target] = make_plan(conversion, checkpoint)
        except InputError as error:
            raise error.with_prefix(f"--targets {target}") from error
    plan = next(iter(plans.values()))
    plan.checkpoint.print_notes()
    check_memory(plan)
    with stages("reading the text and the model"), TemporaryDirectory() as scratch:
        calibration = load_source_and_text(plan, Path(scratch), stages)
    folds = {target: plan for target, plan in plans.items() if plan.mla_spec is None}
    latents = {target: plan for target, plan in plans.items() if target not in folds}
    groups = [group for group in (folds, latents) if group]
    estimates = announce_stages("sweep", [group.values() for group in groups], calibration, stages)
    for group, seconds in zip(groups, estimates, strict=True):
        stages.estimates = seconds
        for row in _fit_and_measure_targets(group, calibration, stages):
            rows[row.target] = row
            if not request.quiet:
                print(f"{row.kind}: {format_metrics(row.measured)}", file=sys.stderr)
    # A file that was replaced while its layers were read would give numbers of no model.
    checkpoint.check_unchanged()
    tokens = calibration.tokens
    sequences, length = tokens.held_out.shape
    text = describe_calibration_text(tokens.source)
    return SweepResult(
        model=request.model,
        sha256=checkpoint.compute_model_digest(),
        kind=plan.source_kind,
        cache_elements=plan.cache_elements,
        text=f"{sequences} x {length} held-out tokens of {text}",
        within=request.within,
        rows=[rows[target] for target in plans],
        seconds=time.monotonic() - started,
    )


def _fit_and_measure_targets(
    plans: Mapping[str, Plan], calibration: Calibration, stages: ProgressStages
) -> Iterator[SweepRow]:
    """Fit and measure the targets in ``plans`` in one walk over the source; either all of them are
    MLA or none is.
    """
    first = next(iter(plans.values()))
    if first.mla_spec is not None:
        trials = any(plan.request.budget is not None for plan in plans.values())
        survey = survey_layers(first, calibration, stages, trials)
        plans = {
            target: choose_slots_and_split(plan, calibration, survey, stages)[0]
            for target, plan in plans.items()
        }
    tokens = calibration.tokens
    teacher = Teacher(calibration.source, tokens.held_out, tokens.calibration, first.model)
    walks = {
        target: Walk(teacher, build_student(plan, calibration)) for target, plan in plans.items()
    }
    seconds = dict.fromkeys(plans, 0.0)
    with stages("sweep", teacher.stream.layers * len(plans), "fit") as advance:
        for lesson in teacher.run_layers():
            # The loss of sharing a pair of heads depends on the layer alone, not on the number of
            # heads that stay.
            shared: dict[bool, PairLosses] = {}
            for target, plan in plans.items():
                started = time.monotonic()
                walk_layer = WalkLayer(lesson, walks[target])
                tensors, _ = convert_layer(plan, walk_layer, plan.request.refine, shared)
                walk_layer.advance_student(tensors)
                seconds[target] += time.monotonic() - started
                advance(1)
    compared = tokens.held_out[:, 1:].numel()
    with stages("measure", compared * len(plans), "token") as advance:
        for target, plan in plans.items():
            request = plan.request
            if latent := plan.mla_spec:
                request = replace(
                    request, budget=None, kv_rank=latent.kv_rank, rope_dim=latent.rope_dim
                )
            yield SweepRow(
                target=target,
                request=request,
                kind=plan.output.kind,
                cache_elements=plan.result.count_cache_elements(),
                measured=walks[target].measure_drift(advance),
                seconds=seconds[target],
            )
