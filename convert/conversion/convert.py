"""Run a conversion: plan it, convert layer by layer, write the files and the record.

Modules that import torch or transformers, which takes seconds, are imported where they are used.
"""

import json
import sys
import time
from collections import ChainMap
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert import processes
from kvfold.convert.checkpoint.atomic import append_line, check_output, write_file
from kvfold.convert.checkpoint.digests import add_hashes
from kvfold.convert.checkpoint.members import RECORD, dump, read_member
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint, open_headers
from kvfold.convert.checkpoint.writer import ShardWriter, write_index
from kvfold.convert.conversion.card import model_card
from kvfold.convert.conversion.journal import Journal, forget, open_output
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, checkpoint_from_config, make_plan
from kvfold.convert.conversion.record import make_record
from kvfold.convert.conversion.results import Conversion
from kvfold.convert.formatting import to_json_values
from kvfold.convert.progress import Advance, Progress, Stages
from kvfold.convert.request import ConvertRequest
from kvfold.convert.text.corpus import check_seq_len, check_sources

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.conversion.calibration import Calibration


def convert_checkpoint(request: ConvertRequest, progress: Progress | None = None) -> Conversion:
    """Convert ``request.model`` into the folder ``request.out``.

    OUT appears complete or not at all. ``progress(stage, done, total)`` is called at every step of
    a stage, possibly from another thread: ``survey`` (layers), ``splits``, ``convert`` (layers), at
    the same time ``write`` (bytes), and ``polish`` (steps). Without ``progress``, bars appear on
    stderr. If torch.distributed is initialized, its processes share the work and each must call
    this function; only the first returns the record, the others an empty one. Raises InputError if
    the request or the checkpoint is invalid; nothing is written then.

    >>> options = {"to": "mqa", "method": "mean", "quiet": True}
    >>> convert_checkpoint(ConvertRequest(demo_folder(), folder / "mqa", **options)).attention
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
        checkpoint = _open_source(request)
    with closing(checkpoint):
        plan = make_plan(request, checkpoint)
        request = plan.request
        if request.dry_run:
            check_output(request.out, overwrite=request.overwrite, model=checkpoint.folder)
            if request.calibrated:
                check_seq_len(request.length, plan.geometry.positions, checkpoint.origin)
            return Conversion(plan)
        check_memory(plan)
        with open_output(plan) as folder:
            calibration = None
            notes: dict[str, Any] = {}
            if request.calibrated:
                from kvfold.convert.conversion.calibration import load_source_and_text

                with stages("reading the text and the model"):
                    calibration = load_source_and_text(plan, folder, stages)
            if request.to == "mla":
                from kvfold.convert.conversion.splits import choose_layout

                plan, notes = choose_layout(plan, calibration, folder, stages)
            digests, layer_notes, drift = _write_weights(plan, calibration, folder, stages)
            notes |= layer_notes
            checkpoint.check_unchanged()
            processes.broadcast_from_rank0(lambda: _write_config(plan, folder))
            if request.polish and calibration is not None:
                from kvfold.convert.conversion.polishing import polish_checkpoint

                digests = {}
                polished = polish_checkpoint(plan, calibration, folder, stages)
                if polished is not None:
                    drift, notes["polish"] = polished
            completed = processes.on_rank0(
                lambda: _complete(plan, calibration, folder, digests, notes, drift, stages)
            )
    record, drift = completed or ({}, None)
    seconds = time.monotonic() - started
    conversion = Conversion(plan, Path(request.out), seconds, record, drift)
    if processes.is_rank0():
        _log(conversion)
    return conversion


def _open_source(request: ConvertRequest) -> Checkpoint:
    if request.dry_run:
        # Headers are enough for a model on the hub, and config.json for a folder without weights.
        return checkpoint_from_config(request) or open_headers(request.model)
    if processes.world_size() > 1:  # the first downloads it for all
        processes.broadcast_from_rank0(lambda: open_checkpoint(request.model).close())
    return open_checkpoint(request.model)


def _write_weights(
    plan: Plan, calibration: "Calibration | None", folder: Path, stages: Stages
) -> "tuple[dict[str, str], dict[str, Any], DriftReport | None]":
    """Convert all layers and write all shards.

    Returns the digest of each written tensor, and with text the notes on each layer, and the drift
    on the first process.
    """
    journal = Journal(folder, plan)
    finished = len(journal.notes)
    if finished and not plan.request.quiet:
        print(
            f"resuming after layer {finished} of {plan.geometry.layers} of the interrupted run"
            " (--fresh starts over)",
            file=sys.stderr,
        )
    writer = ShardWriter(folder, plan.own_shards, journal.written if finished else None)
    sizes = {tensor.name: tensor.nbytes for shard in plan.own_shards for tensor in shard.tensors}
    resumed = sum(sizes[name] for name in journal.written)
    # Beside the converted layers the other tensors are copied; each of several processes writes its
    # own shards.
    with stages("write", sum(sizes.values()), "B", resumed) as wrote:
        with writer.copy_rest(plan.checkpoint, wrote):
            drift = _convert_layers(plan, calibration, journal, writer, wrote, stages)
        writer.finish()
    digests = dict(ChainMap(*processes.all_gather(writer.digests)))
    for read in processes.all_gather(plan.checkpoint.digests):
        plan.checkpoint.digests.update(read)
    return digests, journal.merge_notes(), drift


def _convert_layers(
    plan: Plan,
    calibration: "Calibration | None",
    journal: Journal,
    writer: ShardWriter,
    wrote: Advance,
    stages: Stages,
) -> "DriftReport | None":
    """Convert and write all layers. Returns the drift, on the first process of a run with text."""
    # Only here: bytes are copied while it imports torch.
    from kvfold.convert.conversion import layers

    count = plan.geometry.layers
    if calibration is None:
        # Each process converts the layers that it writes.
        for index in stages.over("convert", journal.pending, count, "layer"):
            layer = layers.fit_layer(plan, index)
            wrote(writer.write(plan.layout.encode(index, layer.weights)))
        return None
    from kvfold.convert.conversion.measurement import measure_walk
    from kvfold.convert.walk.output_fit import refit_output

    finished = len(journal.notes)
    walk = layers.open_walk(plan, calibration, plan.request.refine, finished=finished)
    for step in stages.over("convert", walk, count, "layer"):
        if step.index < finished:
            step.replace_and_measure(journal.read_layer(step.index))
            continue
        layer = layers.fit_layer(plan, step.index, step)
        weights = layer.weights
        output_fit: dict[str, Any] = {}
        if plan.method.reads_text:
            weights, output_fit = refit_output(step, weights, layers.attention_update(plan))
        tensors = plan.layout.encode(step.index, weights)
        tensors, refinement = layers.refine_tensors(plan, step, tensors, plan.request.refine)
        step.replace_and_measure(tensors)
        wrote(writer.write(tensors))
        # What the journal lists must be on the disks of all processes.
        writer.sync()
        processes.all_gather(None)
        journal.add_layer({**layer.notes, **output_fit, **refinement})
    if not processes.is_rank0():
        return None
    with stages("measuring"):
        return measure_walk(walk)


def _write_config(plan: Plan, folder: Path) -> None:
    """Write what loading the weights in ``folder`` needs."""
    write_index(folder, plan.shards)
    write_file(folder / "config.json", dump(plan.layout.config))


def _complete(
    plan: Plan,
    calibration: "Calibration | None",
    folder: Path,
    digests: Mapping[str, str],
    notes: Mapping[str, Any],
    drift: "DriftReport | None",
    stages: Stages,
) -> "tuple[dict[str, Any], DriftReport | None]":
    """Add the other files to ``folder``; ``digests`` are the known ones of its tensors.

    Returns the record and the drift.
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
    entries: dict[str, Any] = {}
    if calibration is not None and drift is not None:
        from kvfold.convert.conversion import measurement

        with stages("measuring the loss by position"):
            drift = measurement.measure_by_position(folder, calibration, drift)
        with stages("checking what was written"):
            written = measurement.check_written(folder, calibration, drift)
        entries = measurement.record_entries(calibration, notes, drift, written)
    record = make_record(plan, entries)
    write_file(folder / "README.md", model_card(plan, record, drift))
    add_hashes(record, folder, digests)
    write_file(folder / RECORD, dump(to_json_values(record)))
    forget(folder)
    plan.checkpoint.check_unchanged()
    return record, drift


def _log(conversion: Conversion) -> None:
    """Append date, duration and paths to ``OUT.log``. OUT contains none, so equal requests produce
    equal bytes.
    """
    request = conversion.plan.request
    line = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(conversion.seconds or 0, 3),
        "request": {name: value for name, value in vars(request).items() if value is not None},
    }
    path = Path(f"{Path(request.out)}.log")
    try:
        append_line(path, json.dumps(line, default=str))
    except OSError as error:
        print(f"warning: {path}: cannot write the log ({error.strerror})", file=sys.stderr)
