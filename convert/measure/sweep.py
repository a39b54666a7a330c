"""A sweep: the source goes through its layers once, together with a student of every target.

::

    survey     source alone over the calibration text: statistics, rotary slots    (only where a target is MLA)
    splits     of budgets, by trials in a few layers               conversion/latent.py
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

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.conversion.latent import Candidate, Survey, choose_split, fitted_latent, split_record, survey_layers
from kvfold.convert.conversion.layers import fitted_fold
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, dense_dtype, make_plan
from kvfold.convert.conversion.source import load_tokens, source_heads, source_stream
from kvfold.convert.conversion.student import StudentWalk
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.model import model_of
from kvfold.convert.measure.sweep_result import Sweep, SweptSource, SweptTarget
from kvfold.convert.measure.sweep_targets import (
    TargetOptions,
    default_targets,
    parse_targets,
    spelled,
    worded_as_targets,
)
from kvfold.convert.options import takes
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import DEFAULT_LAYOUT, ConvertRequest, Layout, SweepRequest
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.walk.walk import Teacher

# Stands for OUT in requests that write nothing.
_PLACEHOLDER = "OUT"
# Options of a sweep that its conversions have too, in the same sense.
_SHARED = ("model", "calibration", "samples", "seq_len", "seed", "refine", "device", "dtype", "trust_remote_code")


@dataclass
class _SweepStudent:
    """The student of a target, with its ``split`` if it is MLA, and the splits that were ``tried`` for a budget.

    ``seconds``: spent on it alone; ``distances``: of its residual stream from the source's, layer by layer.
    """

    options: TargetOptions
    plan: Plan
    walk: StudentWalk
    split: Candidate | None
    tried: Sequence[Candidate]
    seconds: float = 0.0
    distances: list[float] = field(default_factory=list)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the time of the block."""
        started = time.monotonic()
        yield
        self.seconds += time.monotonic() - started

    def explicit_request(self) -> ConvertRequest:
        """The request of the target, a budget replaced by the split that it got."""
        request, target = self.plan.request, self.plan.latent
        if request.budget is None or target is None:
            return request
        return replace(request, budget=None, kv_rank=target.kv_rank, rope_dim=target.rope_dim)

    def result(self) -> SweptTarget:
        """The target with its loss on the held-out text."""
        with self.clock():
            measured = self.walk.measurement()
        return SweptTarget(
            target=spelled(self.options),
            request=self.explicit_request(),
            kind=self.plan.layout.kind,
            elements=self.plan.layout.cache_elements,
            measured=measured,
            seconds=self.seconds,
            splits=[split_record(each) for each in self.tried],
            distances=tuple(self.distances),
        )


@takes(SweepRequest)
def sweep_checkpoint(request: SweepRequest, progress: Progress | None = None) -> Sweep:
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
    named = None if request.targets is None else parse_targets(request.targets)
    common: TargetOptions = {name: getattr(request, name) for name in _SHARED}
    common |= {"out": request.out or _PLACEHOLDER, "quiet": True}
    started = time.monotonic()
    checkpoint = open_checkpoint(request.model, dense_dtype(ConvertRequest(**common, to="mqa")))
    try:
        if request.out is not None:
            check_output(request.out, model=checkpoint.folder)
        chosen = named or default_targets(
            model_of(checkpoint.config, checkpoint.tensors), request.layout or DEFAULT_LAYOUT
        )
        plans = [_plan(options, common, request.layout, checkpoint) for options in chosen]
        check_memory(plans[0])
        with tempfile.TemporaryDirectory(prefix="kvfold-sweep-") as scratch:
            found = _sweep(chosen, plans, Path(scratch), Stages(progress, request.quiet), request.quiet)
        # A file that was replaced while its layers were read would give numbers of no model.
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
        raise InputError(f"{opt('targets', spelled(options))}: {error.message}", error.details) from error


def _sweep(chosen: Sequence[TargetOptions], plans: Sequence[Plan], scratch: Path, stages: Stages, quiet: bool) -> Sweep:
    first = plans[0]
    with stages("reading the text and the model"):
        tokens, stream = load_tokens(first, scratch, stages, ""), source_stream(first)
    source = SweptSource(
        name=first.request.model,
        sha256=first.checkpoint.source_hash(),
        kind=first.source_kind,
        elements=first.cache_elements,
        layers=first.geometry.layers,
        text=tokens.source,
        text_sha256=tokens.digest,
        calibration_sequences=len(tokens.calibration),
        sequences=len(tokens.held_out),
        length=tokens.held_out.shape[1],
    )
    if not quiet:
        count, length = tokens.calibration.shape
        where = f"{count} x {length} tokens of {source.text_name}"
        print(f"sweeping over {len(plans)} targets on {where}", file=sys.stderr)
    latent = [plan for plan in plans if plan.latent is not None]
    surveyed = survey_layers(latent[0], stream, tokens, scratch, stages) if latent else None
    splits = iter([choose_split(plan, surveyed, stages) for plan in latent] if surveyed else ())
    teacher = Teacher(
        stream,
        tokens.held_out,
        tokens.calibration,
        profile=True,
        # A survey has collected them already.
        statistics=surveyed is None,
        keep_calibration=True,
        heads=source_heads(first),
        remember=True,
    )
    students = []
    for options, plan in zip(chosen, plans, strict=True):
        split, tried = next(splits) if plan.latent is not None else (None, [])
        resolved = plan if split is None else split.plan
        walk = StudentWalk(resolved, stream, tokens, statistics=False, teacher=teacher)
        students.append(_SweepStudent(options, resolved, walk, split, tried))
    _fit_layers(students, teacher, surveyed, stages)
    with stages("measuring"):
        return Sweep(source, tuple(student.result() for student in students))


def _fit_layers(students: Sequence[_SweepStudent], teacher: Teacher, surveyed: Survey | None, stages: Stages) -> None:
    """Fit every layer for every target, and take all students past it."""
    with stages("sweep", teacher.stream.layers * len(students), "fit") as advance:
        for lesson in teacher.layers():
            if surveyed is not None:
                lesson.statistics = surveyed.notes(lesson.index)[0]
            # The loss of sharing a pair of heads depends on the layer alone, not on the number of heads that stay.
            shared: dict[bool, Pairs] = {}
            for student in students:
                with student.clock(), student.walk.step(lesson) as step:
                    if student.split is None or surveyed is None:
                        fitted = fitted_fold(student.plan, step.index, step, shared)
                    else:
                        fitted = fitted_latent(student.split, step.index, step, surveyed)
                    student.distances.append(step.follow(student.walk.made(step, fitted.weights)[0]))
                advance(1)
