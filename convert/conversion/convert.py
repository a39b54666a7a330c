"""Run a conversion: plan it, convert layer by layer, write the files and the record."""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert import processes
from kvfold.convert.checkpoint.atomic import check_output, free_space_check, output_folder
from kvfold.convert.checkpoint.files import dump, write_file
from kvfold.convert.checkpoint.folder import RECORD, read_member
from kvfold.convert.checkpoint.hashing import file_hashes, hashing
from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
from kvfold.convert.checkpoint.writer import ShardWriter, write_index
from kvfold.convert.console import append_line
from kvfold.convert.conversion.card import model_card
from kvfold.convert.conversion.fitted import Change, FitReport, fitted_of
from kvfold.convert.conversion.journal import Journal, finished_layers, forget, resumable
from kvfold.convert.conversion.judgment import loss_of, verdict_of
from kvfold.convert.conversion.memory import (
    check_memory,
    check_spill,
    free_disk,
    needs_of,
)
from kvfold.convert.conversion.plan import Plan, check_processes, described, make_plan
from kvfold.convert.conversion.record import headline, plan_text, summary_text
from kvfold.convert.conversion.record import record as record_of
from kvfold.convert.errors import InputError
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import ConvertRequest
from kvfold.convert.sizes import jsonable
from kvfold.convert.text.corpus import check_seq_len, check_sources

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.conversion.student import Calibrated


@dataclass(frozen=True)
class Conversion(FitReport):
    """The result of a run. A dry run has no ``seconds`` and ``written``; a run without text has no
    ``drift``.

    ``record`` is the content of ``kvfold.json``; the choices and gains in it are also attributes
    (`FitReport`). ``pass_seconds`` is the time of one pass of the result over the held-out text.
    """

    plan: Plan
    written: Path | None
    seconds: float | None
    record: Mapping[str, Any]
    drift: "DriftReport | None" = None
    pass_seconds: float | None = None

    def __repr__(self) -> str:
        where = "planned" if self.written is None else f"written to {str(self.written)!r}"
        return f"Conversion({headline(self.plan)}; {where})"

    @property
    def attention(self) -> Change[str]:
        """The kinds of attention, such as MHA and GQA-4."""
        return Change(self.plan.source_kind, self.plan.layout.kind)

    @property
    def cache_elements(self) -> Change[int]:
        """The KV-cache elements per token per layer."""
        return Change(self.plan.cache_elements, self.plan.layout.cache_elements)

    @property
    def verdict(self) -> str | None:
        """The verdict on the result in words (`judgment.LIMITS`); None for a run without text."""
        return None if self.drift is None else verdict_of(loss_of(self.drift))

    @property
    def split(self) -> tuple[int, int] | None:
        """The rank and the rotary dims of an MLA result; None for GQA and MQA."""
        latent = self.plan.latent
        return None if latent is None else (latent.kv_rank, latent.rope_dim)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the plan for a dry run, otherwise the record without its lists of tensors
        and files.
        """
        plan = self.plan
        if self.written is None:
            needs = needs_of(plan)
            facts = {
                "out": None,
                "dry_run": True,
                "files": {
                    shard.file: sum(tensor.nbytes for tensor in shard.tensors)
                    for shard in plan.shards
                },
                "disk_bytes": needs.disk,
                "free_bytes": free_disk(plan),
                "memory_bytes": needs.memory,
                "spilled_bytes": needs.spilled,
                "scratch_bytes": needs.scratch,
                **record_of(plan),
            }
        else:
            size = sum(tensor.nbytes for tensor in plan.layout.tensors)
            record = {name: value for name, value in self.record.items() if name != "files"}
            facts = {
                "out": str(self.written),
                "seconds": self.seconds,
                "weight_bytes": size,
                "verdict": self.verdict,
                **record,
            }
        return {name: value for name, value in facts.items() if name != "tensors"}

    def summary(self) -> str:
        """The terminal text: the plan for a dry run, otherwise the conversion, its cost and its
        output.
        """
        if self.written is None or self.seconds is None:
            return plan_text(self.plan)
        return summary_text(
            self.plan, self.record, self.drift, self.written, self.seconds, self.pass_seconds
        )


def convert_checkpoint(request: ConvertRequest, progress: Progress | None = None) -> Conversion:
    """Convert ``request.model`` into the folder ``request.out``.

    OUT appears complete or not at all. ``progress(stage, done, total)`` is called at every step of
    a stage, possibly from another thread: ``survey`` (layers), ``splits``, ``convert`` (layers), at
    the same time ``write`` (bytes), and ``polish`` (steps). Without ``progress``, bars appear on
    stderr. If torch.distributed is initialized, its processes share the work and each must call
    this function; only the first returns the record, the others an empty one. Raises InputError if
    the request or the checkpoint is invalid; nothing is written then.

    >>> request = ConvertRequest(model=demo_folder(), out=folder / "mqa", to="mqa", method="mean", quiet=True)
    >>> convert_checkpoint(request).attention
    Change(before='MHA', after='MQA')
    """
    started = time.monotonic()
    if not processes.is_rank0():
        request = replace(request, quiet=True)
        progress = None
    check_output(request.out, overwrite=request.overwrite, model=request.model)
    check_sources(request.calibration)
    stages = Stages(progress, request.quiet or request.dry_run)
    with stages("reading"):
        if request.dry_run:
            # Headers are enough for a model on the hub, and config.json for a folder without
            # weights.
            checkpoint = described(request) or open_headers(request.model)
        else:
            if processes.world_size() > 1:  # the first downloads it for all
                processes.broadcast_from_rank0(lambda: open_checkpoint(request.model).close())
            checkpoint = open_checkpoint(request.model)
    with closing(checkpoint):
        plan = make_plan(request, checkpoint)
        request = plan.request
        check_processes(plan)
        check_spill(plan)
        if request.dry_run:
            check_output(request.out, overwrite=request.overwrite, model=checkpoint.folder)
            if request.calibrated:
                check_seq_len(request.length, plan.geometry.positions, checkpoint.origin)
            return Conversion(plan, None, None, {})
        check_memory(plan)
        with _output_folder(plan) as folder:
            plan, measured, hashes = _write_weights(plan, folder, stages)
            checkpoint.check_unchanged()
            processes.broadcast_from_rank0(lambda: _write_config(plan, folder))
            if request.polish:
                from kvfold.convert.conversion.polishing import polish_checkpoint

                assert measured is not None  # a request to polish is calibrated
                measured = polish_checkpoint(plan, measured, folder, stages)
                hashes = {}
            completed = processes.on_rank0(
                lambda: _complete(plan, hashes, stages, measured, folder)
            )
    record, drift, passed = completed or ({}, None, None)
    seconds = time.monotonic() - started
    fitted = fitted_of(record)
    done = Conversion(plan, Path(request.out), seconds, record, drift, passed, **vars(fitted))
    if processes.is_rank0():
        _log(done)
    return done


@contextmanager
def _output_folder(plan: Plan) -> Iterator[Path]:
    """Create the temporary folder that becomes OUT after the block; all processes share the first
    one's folder.
    """
    request = plan.request
    model = plan.checkpoint.folder
    opened = partial(output_folder, overwrite=request.overwrite, model=model, fresh=request.fresh)
    folder: Path | None = None
    try:
        with ExitStack() as stack:

            def make() -> Path:
                folder = stack.enter_context(opened(request.out, resume=resumable(plan)))
                needs = needs_of(plan)
                free_space_check(folder, needs.disk + needs.scratch)
                return folder

            folder = processes.broadcast_from_rank0(make)
            if not folder.is_dir():
                raise InputError(
                    f"{folder}: this machine cannot see the temporary folder that the first process"
                    " created; choose an OUT on a file system that all machines share"
                )
            yield folder
    except BaseException as error:
        if folder is not None and folder.exists():
            error.add_note(f"finished layers kept for the same request: {finished_layers(folder)}")
        raise


def _write_weights(
    plan: Plan, folder: Path, stages: Stages
) -> tuple[Plan, "Calibrated | None", dict[str, str]]:
    """Write all shards. Returns the plan with its choices resolved, the measurements and the hash
    of each shard.
    """
    # Only here: it imports torch and transformers, which takes seconds.
    from kvfold.convert.conversion.layers import open_layers

    with stages("reading the text and the model"), open_layers(plan, folder, stages) as layers:
        plan = layers.plan
        journal = Journal(folder, plan)
        count = plan.geometry.layers
        done = len(journal.notes)
        if done and not plan.request.quiet:
            start_over = "(--fresh starts over)"
            print(
                f"resuming after layer {done} of {count} of the interrupted run {start_over}",
                file=sys.stderr,
            )
        sizes = {
            tensor.name: tensor.nbytes for shard in plan.own_shards for tensor in shard.tensors
        }
        resumed = sum(sizes[name] for name in journal.written)
        writer = ShardWriter(folder, plan.own_shards, journal.written if done else None)
        # Beside the converted layers the other tensors are copied; each of several processes writes
        # its own shards.
        with (
            hashing(folder, plan.own_shards, writer.written) as hashes,
            plan.checkpoint.hashing(
                processes.shard_range(len(plan.checkpoint.paths)), copied_first=True
            ) as copied,
            stages("write", sum(sizes.values()), "B", resumed) as wrote,
        ):
            with writer.copying_rest(plan.checkpoint, wrote, copied):
                # The walk of a resumed run passes the finished layers with the tensors that are
                # already written.
                if layers.walk is not None and done:
                    layers.walk.skip_fits(done)
                    for step in stages.over(
                        "again", itertools.islice(layers.walk.steps, done), done, "layer"
                    ):
                        step.convert(journal.finished(step.index))
                for tensors, notes in stages.over(
                    "convert", layers.converted(journal), count, "layer", done
                ):
                    wrote(writer.write_own(tensors))
                    # A run without text starts over when it is killed: it takes only as long as
                    # copying the model.
                    if plan.request.calibrated:
                        writer.sync()
                        processes.all_gather(None)
                        journal.note(notes)
            writer.finish()
            made = processes.all_gather(hashes())
        for found in processes.all_gather(plan.checkpoint.hashes):
            plan.checkpoint.hashes.update(found)
        measured = None
        if layers.walk is not None and (processes.is_rank0() or plan.request.polish):
            with stages("measuring"):
                measured = layers.walk.measured(journal.notes, layers.choices)
        return plan, measured, {file: digest for each in made for file, digest in each.items()}


def _write_config(plan: Plan, folder: Path) -> None:
    """Write what loading the weights in ``folder`` needs."""
    write_index(folder, plan.shards)
    write_file(folder / "config.json", dump(plan.layout.config))


def _complete(
    plan: Plan,
    hashes: Mapping[str, str],
    stages: Stages,
    measured: "Calibrated | None",
    folder: Path,
) -> "tuple[dict[str, Any], DriftReport | None, float | None]":
    """Add the other files to ``folder``; ``hashes`` are the known ones of its shards.

    Returns the record, the drift and the seconds of a pass of the written checkpoint over the
    held-out text.
    """
    # Tokenizer and license files, and the modeling code, which is found without importing it: it
    # needs torch.
    for path in plan.checkpoint.extra_files():
        name = path.relative_to(plan.checkpoint.folder)
        (folder / name).parent.mkdir(exist_ok=True)
        write_file(folder / name, read_member(plan.checkpoint.folder, str(name)))
    if plan.layout.code is not None and (spec := find_spec(plan.layout.code)) is not None:
        code = Path(str(spec.origin))
        write_file(folder / code.name, code.read_bytes())
    entries = dict[str, Any]()
    drift = None
    passed = None
    if measured is not None:
        with stages("measuring the loss by position"):
            measured = measured.with_positions(folder)
    with stages("checking what was written"):
        if measured is not None:
            # A calibrated conversion is read back: its record holds the loss of the files on disk
            # too.
            started = time.monotonic()
            entries = measured.record(folder)
            drift = measured.drift
            passed = (
                (time.monotonic() - started) * len(measured.tokens.held_out) / len(measured.checked)
            )
        record = record_of(plan, entries)
        write_file(folder / "README.md", model_card(plan, record, drift))
        record["files"] = file_hashes(folder, known=hashes)
        write_file(folder / RECORD, dump(jsonable(record)))
    forget(folder)
    plan.checkpoint.check_unchanged()
    return record, drift, passed


def _log(done: Conversion) -> None:
    """Append date, duration and paths to ``OUT.log``. OUT contains none, so equal requests produce
    equal bytes.
    """
    request = {name: value for name, value in vars(done.plan.request).items() if value is not None}
    line = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(done.seconds or 0, 3),
    }
    path = Path(f"{Path(done.plan.request.out)}.log")
    try:
        append_line(path, json.dumps({**line, "request": request}, default=str))
    except OSError as error:
        print(f"warning: {path}: cannot write the log ({error.strerror})", file=sys.stderr)
