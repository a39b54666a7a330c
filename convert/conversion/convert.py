"""Run a conversion: plan it, convert layer by layer, write the files and the record.

Modules that import torch or transformers, which takes seconds, are imported where they are used.
"""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.atomic import resolve_output_path
from kvfold.convert.checkpoint.opening import open_checkpoint, open_checkpoint_headers
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion import output
from kvfold.convert.conversion.journal import Journal, count_finished_layers
from kvfold.convert.conversion.memory import check_memory
from kvfold.convert.conversion.plan import Plan, checkpoint_from_config, make_plan
from kvfold.convert.conversion.results import Conversion, describe_start
from kvfold.convert.progress import Progress, ProgressStages
from kvfold.convert.request import ConvertRequest
from kvfold.convert.text.corpus import check_text_sources

if TYPE_CHECKING:
    from kvfold.convert.conversion.calibration import Calibration
    from kvfold.convert.walk.walk import Walk


def convert_checkpoint(request: ConvertRequest, progress: Progress | None = None) -> Conversion:
    """Convert ``request.model`` into the folder ``request.out``.

    OUT appears complete or not at all. ``progress(stage, done, total)`` is called at every step of
    a stage, possibly from another thread: ``survey`` (layers), ``splits``, ``convert`` (layers), at
    the same time ``write`` (bytes), ``teacher`` (layers), ``polish`` (steps), ``measure`` and
    ``positions`` (tokens). Without ``progress``, bars appear on stderr. Raises InputError if the
    request or the checkpoint is invalid; nothing is written then.

    >>> options = {"to": "mqa", "method": "mean", "quiet": True}
    >>> convert_checkpoint(ConvertRequest(demo_folder(), folder / "mqa", **options)).attention
    BeforeAndAfter(before='MHA', after='MQA')
    """
    started = time.monotonic()
    resolve_output_path(request.out, overwrite=request.overwrite, model=request.model)
    check_text_sources(request.calibration)
    if request.dry_run:
        return _plan_dry_run(request)
    stages = ProgressStages(progress, request.quiet)
    with stages("reading"):
        checkpoint = open_checkpoint(request.model)
    with closing(checkpoint):
        with stages("planning"):
            plan = make_plan(request, checkpoint)
        request = plan.request
        plan.checkpoint.print_notes()
        if not request.quiet:
            print(describe_start(plan), file=sys.stderr)
        check_memory(plan)
        with output.open_run_folder(plan) as folder:
            calibration = None
            notes: dict[str, Any] = {}
            if request.calibrated:
                with stages("reading the text and the model"):
                    from kvfold.convert.conversion.calibration import load_source_and_text
                    from kvfold.convert.conversion.estimate import announce_stages

                    calibration = load_source_and_text(plan, folder, stages)
                stages.estimates, *_ = announce_stages(
                    "convert", [[plan]], calibration, stages, count_finished_layers(folder)
                )
            if request.to == "mla":
                from kvfold.convert.conversion.splits import choose_slots_and_split, survey_layers

                survey = survey_layers(plan, calibration, stages, request.budget is not None)
                plan, splits = choose_slots_and_split(plan, calibration, survey, stages)
                notes = {"splits": splits} if splits else {}
            journal = Journal(folder, plan)
            with output.open_shard_writer(plan, journal, stages) as writer:
                walk = _convert_layers(plan, calibration, journal, writer, stages)
            notes |= journal.collect_notes_by_name()
            checkpoint.check_unchanged()
            output.write_config(plan, folder)
            if request.polish and calibration is not None:
                from kvfold.convert.conversion.polishing import polish_checkpoint

                walk = None  # of the weights before
                writer.digests.clear()
                notes["polish"] = polish_checkpoint(plan, calibration, folder, stages)
            record, drift = output.complete_output(
                plan, calibration, walk, folder, writer.digests, notes, stages
            )
    return Conversion(plan, Path(request.out), time.monotonic() - started, record, drift)


def _plan_dry_run(request: ConvertRequest) -> Conversion:
    """Plan the conversion for ``--dry-run`` without writing anything. Of a hub model only the
    headers are fetched; a local folder without weights needs only its config.json.
    """
    checkpoint = checkpoint_from_config(request.model) or open_checkpoint_headers(request.model)
    plan = make_plan(request, checkpoint)
    plan.checkpoint.print_notes()
    return Conversion(plan)


def _convert_layers(
    plan: Plan,
    calibration: "Calibration | None",
    journal: Journal,
    writer: ShardWriter,
    stages: ProgressStages,
) -> "Walk | None":
    """Convert all layers of the source model in order and write their tensors. A resumed run loads
    the layers in ``journal`` instead of converting them again.

    Returns the finished walk, whose student is what was written; None without text, or if all
    layers had been converted before.
    """
    if calibration is None:  # the method reads no text, and no training follows
        # Only here: bytes are copied while it imports torch.
        from kvfold.convert.conversion.layers import fit_layer

        layers = plan.geometry.layers
        for index in stages.iterate_over("convert", range(layers), layers, "layer"):
            weights = fit_layer(plan, index).weights
            writer.write(plan.output.encode_layer(index, weights))
        return None
    from kvfold.convert.conversion.layers import convert_layer, make_walk

    finished = journal.finished_count
    if finished == plan.geometry.layers:
        return None  # only polishing and measuring are left
    walk = make_walk(plan, calibration, plan.request.refine, finished)
    compare = not plan.request.polish  # else the weights change again
    for walk_layer in stages.iterate_over("convert", walk, plan.geometry.layers, "layer"):
        if walk_layer.index < finished:
            walk_layer.advance_student(journal.read_layer(walk_layer.index), compare)
        else:
            tensors, notes = convert_layer(plan, walk_layer, plan.request.refine)
            walk_layer.advance_student(tensors, compare)
            writer.write(tensors)
            writer.sync()
            journal.add_layer(notes)
    return walk
