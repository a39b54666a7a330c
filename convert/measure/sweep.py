"""A sweep: the source goes through its layers once, and a student of every target beside it.

::

    survey     source alone over the calibration text: statistics, rotary slots    (only where a target is MLA)
    splits     of budgets, by trials in a few layers               conversion/splits.py
    sweep      for lesson in teacher.layers():        one layer of the source, its attention's results kept
                   for each target:                    fit, output fit, --refine: as in `kvfold convert`
                       its student passes the layer
    measure    every student against the source on held-out text

Every student has its own residual streams and shares the source's open layer; no checkpoint is written. A target's
layers and its loss are those that `kvfold convert` would write and record.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.conversion.calibration import load_tokens, source_stream
from kvfold.convert.conversion.latent import Survey, fitted_latent, survey_layers
from kvfold.convert.conversion.layers import fitted_fold
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, dense_dtype, make_plan
from kvfold.convert.conversion.source import source_heads
from kvfold.convert.conversion.splits import Split, choose_split, split_record
from kvfold.convert.conversion.student_walk import StudentWalk
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.model import model_of
from kvfold.convert.measure.sweep_result import Row, Source, Sweep
from kvfold.convert.measure.sweep_targets import (
    TargetOptions,
    default_targets,
    parse_targets,
    spelled,
    worded_as_targets,
)
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import DEFAULT_LAYOUT, ConvertRequest, Layout
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.walk.walk import Step, Teacher

_PLACEHOLDER = "OUT"


@dataclass
class _Student:
    """A target's student. ``seconds`` were spent on it alone; ``split`` is that of an MLA target.

    ``distances`` are those of its residual stream from the source's, layer by layer.
    """

    options: TargetOptions
    plan: Plan
    walk: StudentWalk
    split: Split | None
    seconds: float = 0.0
    distances: list[float] = field(default_factory=list)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the time of the block."""
        started = time.monotonic()
        yield
        self.seconds += time.monotonic() - started


def sweep_checkpoint(
    model: str,
    targets: str | Sequence[str] | None = None,
    *,
    out: str | None = None,
    calibration: str | Sequence[str] | None = None,
    samples: int = ConvertRequest.samples,
    seq_len: int = ConvertRequest.seq_len,
    seed: int = ConvertRequest.seed,
    refine: int | str = ConvertRequest.refine,
    layout: Layout | None = None,
    device: str = ConvertRequest.device,
    dtype: str = ConvertRequest.dtype,
    quiet: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Fit and measure ``targets`` of ``model`` in one walk, without writing a checkpoint::

        found = sweep_checkpoint("MODEL", "gqa:4,2 mqa mla:576,512+64")
        print(found.table())
        found.smallest(0.01)        # the smallest within 1 % of the source's perplexity, None when there is none

    Without ``targets``: a few folds and latents that suit the model. A budget ``mla:N`` gets its split by trials in
    a few layers. The other options are those of `ConvertRequest`; ``out`` is only checked, for `Sweep.convert` to write
    into. ``progress`` as in `convert_checkpoint`, with the stages ``survey``, ``splits`` (splits times layers) and
    ``sweep`` (layers times targets). In memory are the residual streams of all calibration tokens, once for the source
    and once for every target. Raises InputError for a wrong target, option or checkpoint.

    >>> found = sweep_checkpoint(demo_folder(), "gqa:4 mqa", samples=4, seq_len=32, quiet=True)
    >>> [(row.kind, row.elements) for row in found.rows]
    [('GQA-4', 256), ('MQA', 64)]
    """
    named = None if targets is None else parse_targets(targets)
    common: TargetOptions = {
        "model": model,
        "out": out or _PLACEHOLDER,
        "calibration": calibration,
        "samples": samples,
        "seq_len": seq_len,
        "seed": seed,
        "refine": refine,
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "quiet": True,
    }
    started = time.monotonic()
    checkpoint = open_checkpoint(model, dense_dtype(ConvertRequest(**common, to="mqa")))
    try:
        if out is not None:
            check_output(out, model=checkpoint.folder)
        chosen = named or default_targets(model_of(checkpoint.config, checkpoint.tensors), layout or DEFAULT_LAYOUT)
        plans = [_plan(options, common, layout, checkpoint) for options in chosen]
        check_memory(plans[0])
        with tempfile.TemporaryDirectory(prefix="kvfold-sweep-") as scratch:
            found = _sweep(chosen, plans, Path(scratch), Stages(progress, quiet), quiet)
        checkpoint.check_unchanged()
    finally:
        checkpoint.close()
    return replace(found, seconds=time.monotonic() - started)


def _plan(options: TargetOptions, common: TargetOptions, layout: Layout | None, checkpoint: Checkpoint) -> Plan:
    try:
        with worded_as_targets():
            request = ConvertRequest(**common, **options, layout=layout if options["to"] == "mla" else None)
            return make_plan(request, checkpoint)
    except InputError as error:
        raise InputError(
            f"{opt('targets', spelled(options))}: {error.message}", error.details, error.problems
        ) from error


def _sweep(chosen: Sequence[TargetOptions], plans: Sequence[Plan], scratch: Path, stages: Stages, quiet: bool) -> Sweep:
    with stages("reading the text and the model"):
        tokens, source = load_tokens(plans[0], scratch, stages, ""), source_stream(plans[0])
    if not quiet:
        _print_start(plans, tokens)
    latent = [plan for plan in plans if plan.latent is not None]
    surveyed = survey_layers(latent[0], source, tokens, scratch, stages) if latent else None
    splits = iter([choose_split(plan, surveyed, stages) for plan in latent] if surveyed else ())
    teacher = Teacher(
        source,
        tokens.held_out,
        tokens.calibration,
        profile=True,
        statistics=surveyed is None,
        keep_calibration=True,
        heads=source_heads(plans[0]),
        remember=True,
    )
    students = []
    for options, plan in zip(chosen, plans, strict=True):
        split = next(splits) if plan.latent is not None else None
        resolved = plan if split is None else split.option.plan
        walk = StudentWalk(resolved, source, tokens, statistics=False, teacher=teacher)
        students.append(_Student(options, resolved, walk, split))
    _learn(students, teacher, surveyed, stages)
    with stages("measuring"):
        return _measured(students, tokens)


def _learn(students: Sequence[_Student], teacher: Teacher, surveyed: Survey | None, stages: Stages) -> None:
    """Fit every layer for every target, and take all students past it."""
    with stages("sweep", teacher.stream.layers * len(students), "fit") as advance:
        for lesson in teacher.layers():
            if surveyed is not None:
                lesson.statistics = surveyed.notes(lesson.index)[0]
            shared: dict[bool, Pairs] = {}
            for student in students:
                with student.clock(), student.walk.step(lesson) as step:
                    fitted = _fitted(student, step, surveyed, shared)
                    student.distances.append(student.walk.follow(step, fitted))
                advance(1)


def _fitted(student: _Student, step: Step, surveyed: Survey | None, shared: dict[bool, Pairs]) -> Any:
    """The layer's weights for a target; ``shared`` among those of the layer."""
    if student.split is None or surveyed is None:
        return fitted_fold(student.plan, step.index, step, shared).weights
    return fitted_latent(student.split.option, step.index, step, surveyed).weights


def _measured(students: Sequence[_Student], tokens: CalibrationTokens) -> Sweep:
    rows = []
    for student in students:
        with student.clock():
            measured = student.walk.measurement()
        layout, request, target = student.plan.layout, _explicit(student.plan), spelled(student.options)
        tried = [] if student.split is None else [split_record(each) for each in student.split.tried]
        size, distances = layout.cache_elements, tuple(student.distances)
        rows.append(Row(target, request, layout.kind, size, measured, student.seconds, tried, distances))
    return Sweep(_source(students[0].plan, tokens), tuple(rows))


def _source(plan: Plan, tokens: CalibrationTokens) -> Source:
    return Source(
        name=plan.request.model,
        sha256=plan.checkpoint.source_hash(),
        kind=plan.source_kind,
        elements=plan.cache_elements,
        layers=plan.geometry.layers,
        text=tokens.source,
        text_sha256=tokens.digest,
        calibration_sequences=len(tokens.calibration),
        sequences=len(tokens.held_out),
        length=tokens.held_out.shape[1],
    )


def _explicit(plan: Plan) -> ConvertRequest:
    """The request of ``plan``, a budget replaced by the split that it got."""
    if plan.request.budget is None:
        return plan.request
    target = plan.latent_target()
    return replace(plan.request, budget=None, kv_rank=target.kv_rank, rope_dim=target.rope_dim)


def _print_start(plans: Sequence[Plan], tokens: CalibrationTokens) -> None:
    """Print the calibration text and the number of targets to stderr."""
    count, length = tokens.calibration.shape
    text = _source(plans[0], tokens).text_name
    print(f"sweeping over {len(plans)} targets on {count} x {length} tokens of {text}", file=sys.stderr)
