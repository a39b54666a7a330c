"""Create the files of a conversion's output: the temporary folder, the weight files, config.json,
the model card and ``kvfold.json``.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.atomic import (
    check_free_space,
    open_output_folder,
    write_small_file,
)
from kvfold.convert.checkpoint.digests import add_hashes
from kvfold.convert.checkpoint.files import (
    RECORD,
    format_json,
    list_files_besides_weights,
    parse_json_object,
    read_checkpoint_file,
    remove_code_reference,
)
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import ShardWriter, write_index
from kvfold.convert.conversion.card import render_model_card
from kvfold.convert.conversion.journal import (
    Journal,
    can_resume,
    count_finished_layers,
    remove_resume_files,
)
from kvfold.convert.conversion.memory import estimate_disk
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import make_record
from kvfold.convert.formatting import to_json_values
from kvfold.convert.progress import ProgressStages

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.conversion.calibration import Calibration
    from kvfold.convert.walk.walk import Walk


@contextmanager
def open_run_folder(plan: Plan) -> Iterator[Path]:
    """Yield the temporary folder of the run, which becomes the output folder after the with-block.
    It may be the folder of an interrupted run.
    """
    request = plan.request
    folder = None
    try:
        with open_output_folder(
            request.out,
            overwrite=request.overwrite,
            model=plan.checkpoint.folder,
            resume=lambda folder: can_resume(plan, folder),
            fresh=request.fresh,
        ) as folder:
            check_free_space(folder, estimate_disk(plan))
            yield folder
    except BaseException as error:
        if folder is not None and (count := count_finished_layers(folder)):
            error.add_note(f"finished layers kept for the same request: {count}, in {folder}")
        raise


@contextmanager
def open_shard_writer(
    plan: Plan, journal: Journal, stages: ProgressStages
) -> Iterator[ShardWriter]:
    """Yield the writer of the weight files. During the with-block, background threads copy all
    tensors that the conversion leaves unchanged. After it, all shards are complete.
    """
    finished = journal.finished_count
    if finished and not plan.request.quiet:
        print(
            f"resuming after layer {finished} of {plan.geometry.layers} of the interrupted run"
            " (--fresh starts over)",
            file=sys.stderr,
        )
    writer = ShardWriter(journal.folder, plan.shards, journal.written_tensors if finished else None)
    sizes = {tensor.name: tensor.nbytes for tensor in plan.output.tensors}
    resumed = sum(sizes[name] for name in writer.written)
    with stages("write", sum(sizes.values()), "B", resumed) as advance:
        with writer.copy_source_tensors(plan.checkpoint, advance):
            yield writer
        writer.finish()
    if writer.non_finite:
        print(
            f"warning: {plan.checkpoint.origin}: NaN or infinite elements were copied as they are,"
            f" in {len(writer.non_finite)} tensors such as {min(writer.non_finite)}; the model is"
            " damaged: download it again",
            file=sys.stderr,
        )


def _clean_extra_file(name: str, data: bytes, names: Collection[str]) -> bytes | str:
    """Return the content ``data`` of the source's file ``name`` without ``auto_map``, because the
    code that it names stays behind; then a stock class loads ``tokenizer.json`` if it is among
    ``names``, the files that are passed on.
    """
    if not name.endswith("config.json") or b'"auto_map"' not in data:
        return data
    config = remove_code_reference(parse_json_object(Path(name), data))
    if "tokenizer_class" in config and "tokenizer.json" in names:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return format_json(config)


def write_config(plan: Plan, folder: Path) -> None:
    """Write config.json and the index of the weight files into ``folder``, which is all that
    loading the weights needs.
    """
    write_index(folder, plan.shards)
    write_small_file(folder / "config.json", format_json(plan.output.config))


def complete_output(
    plan: Plan,
    calibration: "Calibration | None",
    walk: "Walk | None",
    folder: Path,
    digests: Mapping[str, str],
    notes: Mapping[str, Any],
    stages: ProgressStages,
) -> "tuple[dict[str, Any], DriftReport | None]":
    """Measure the converted model in ``folder`` and write the remaining files: tokenizer and
    license files, model card, and ``kvfold.json``.

    ``walk`` is a finished one to the weights that were written, if there is any. ``digests`` maps
    tensors to their known SHA-256, ``notes`` are entries for ``kvfold.json``. Returns the content
    of ``kvfold.json`` and the drift, which is None without text.
    """
    # Tokenizer and license files, and the modeling code, which is found without importing it: it
    # needs torch.
    names = list_files_besides_weights(plan.checkpoint.folder)
    for name in names:
        data = read_checkpoint_file(plan.checkpoint.folder, name)
        (folder / name).parent.mkdir(exist_ok=True)
        write_small_file(folder / name, _clean_extra_file(name, data, names))
    if plan.output.code is not None and (spec := find_spec(plan.output.code)) is not None:
        code = Path(str(spec.origin))
        write_small_file(folder / code.name, code.read_bytes())
    entries: dict[str, Any] = {}
    drift = None
    checkpoint = open_checkpoint(folder)
    checkpoint.digests.update(digests)
    if calibration is not None:
        from kvfold.convert.conversion.calibration import (
            make_record_entries,
            measure_checkpoint,
        )

        drift = measure_checkpoint(checkpoint, calibration, walk, stages, plan.request.cache)
        entries = make_record_entries(calibration, notes, drift)
    record = make_record(plan, entries)
    write_small_file(folder / "README.md", render_model_card(plan, record, drift))
    add_hashes(record, checkpoint)
    write_small_file(folder / RECORD, format_json(to_json_values(record)))
    remove_resume_files(folder)
    plan.checkpoint.check_unchanged()
    return record, drift
