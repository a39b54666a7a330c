"""Carry out a conversion: plan, transform layer by layer, write, record."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.console import Pace, bar
from kvfold.convert.conversion import record as report
from kvfold.convert.conversion.journal import Journal, forget, resumable
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.errors import InputError
from kvfold.convert.io.atomic import check_output, free_space_check, output_folder
from kvfold.convert.io.checkpoint import Checkpoint, open_checkpoint
from kvfold.convert.io.config import dump, dump_record, license_of
from kvfold.convert.io.shards import OutputTensor, ShardWriter
from kvfold.convert.request import ConvertRequest
from kvfold.convert.sizes import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.conversion.fold import Calibrated
    from kvfold.convert.transforms.weights import AttentionWeights

Write = Callable[[Mapping[str, "Tensor"]], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Conversion:
    """What a run did. ``seconds`` and ``written`` are None for a dry run."""

    plan: Plan
    written: Path | None
    seconds: float | None
    record: Mapping[str, Any]

    def summary(self) -> str:
        if self.written is None or self.seconds is None:
            return report.plan_text(self.plan)
        size = sum(tensor.nbytes for tensor in self.plan.layout.tensors)
        lines = [
            report.headline(self.plan),
            report.engine_cost(self.record),
            f"wrote {self.written}: {bytes_text(size)} in {self.seconds:.1f} s",
        ]
        return "\n".join(filter(None, lines))


def convert_checkpoint(request: ConvertRequest) -> Conversion:
    """Convert ``request.model`` into the folder ``request.out``.

    OUT appears whole or not at all. Raises InputError when the request or the checkpoint is wrong (nothing is written).
    """
    started = time.monotonic()
    checkpoint = open_checkpoint(request.model)
    try:
        plan = make_plan(request, checkpoint)
        if request.dry_run:
            check_output(request.out, overwrite=request.overwrite, model=checkpoint.folder)
            return Conversion(plan, None, None, {})
        with output_folder(
            request.out,
            overwrite=request.overwrite,
            model=checkpoint.folder,
            resume=resumable(plan) if _resumes(request) else None,
        ) as folder:
            free_space_check(folder, plan.disk_bytes)
            plan, measured = _write_weights(plan, folder)
            record = _write_side_files(plan, measured, folder)
            forget(folder)
    finally:
        checkpoint.close()
    done = Conversion(plan, Path(request.out), time.monotonic() - started, record)
    _log(done)
    return done


def _resumes(request: ConvertRequest) -> bool:
    """Whether what a killed run left may be carried on. Scripts may always say ``--resume``: a method that reads no
    text has nothing to carry on and starts afresh, as a calibrated run does that finds nothing."""
    if request.resume and not request.calibrated and not request.quiet:
        print(
            f"--resume: --method {request.resolved_method} reads no text, runs at the speed of the disk and has no "
            "finished layers to go on from: starting afresh",
            file=sys.stderr,
        )
    return request.resume and request.calibrated


def _log(done: Conversion) -> None:
    """Append to ``OUT.log`` what must not be in OUT (equal requests give equal bytes): when, how long, from where."""
    request = {name: value for name, value in vars(done.plan.request).items() if value is not None}
    line = {"finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": round(done.seconds or 0, 3)}
    path = Path(f"{Path(done.plan.request.out)}.log")
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "request": request}) + "\n")
    except OSError as error:
        print(f"warning: {path}: the log was not written ({error.strerror})", file=sys.stderr)


def _write_weights(plan: Plan, folder: Path) -> tuple[Plan, "Calibrated | None"]:
    """All shards and their index. Returns the plan as it was settled, and what calibration found."""
    if plan.request.calibrated and plan.request.to == "mla":
        from kvfold.convert.conversion import latent as latent_run

        with (
            bar(2 * plan.geometry.layers, "layer", plan.request.quiet) as shown,
            latent_run.surveyed(plan, folder, shown) as found,
        ):
            plan, slots, choices = latent_run.settled(plan, found)
            return plan, _write_shards(
                plan,
                folder,
                lambda write, journal: latent_run.convert_surveyed(plan, found, slots, choices, write, shown, journal),
            )
    if plan.request.calibrated:
        from kvfold.convert.conversion.fold import fold_calibrated

        with bar(plan.geometry.layers, "layer", plan.request.quiet) as shown:
            return plan, _write_shards(
                plan, folder, lambda write, journal: fold_calibrated(plan, write, shown, journal)
            )
    if plan.request.to == "mla":
        from kvfold.convert.conversion import latent as latent_run

        plan = latent_run.svd_plan(plan)
        _write_shards(plan, folder, lambda write, _: latent_run.svd_layers(plan, write))
    else:
        _write_shards(plan, folder, lambda write, _: pool_layers(plan, write))
    return plan, None


def _write_shards(plan: Plan, folder: Path, compute: Callable[[Write, Journal], Result]) -> Result:
    """Write what ``compute`` makes and, beside it, copy the rest of the source's bytes."""
    planned = {tensor.name: tensor for tensor in plan.layout.tensors}
    journal = Journal(folder, plan)
    with (
        ShardWriter(folder, plan.shards, journal.written) as writer,
        bar(sum(tensor.nbytes for tensor in planned.values()), "B", plan.request.quiet) as shown,
    ):
        journal.sync = writer.sync
        pace = Pace(plan.geometry.layers - journal.layers, plan.request.quiet or not plan.request.calibrated)

        def write(tensors: Mapping[str, "Tensor"]) -> None:
            shown(write_tensors(planned, writer, tensors))
            pace.layer_done()

        with writer.copying_rest(plan.checkpoint, shown):
            result = compute(write, journal)
        writer.finish()
    return result


def pool_layers(plan: Plan, write: Write) -> None:
    """Fold every layer by a method that reads no text."""
    for layer in range(plan.geometry.layers):
        write(plan.layout.encode(layer, transform_layer(plan, layer)))


def write_tensors(planned: Mapping[str, OutputTensor], writer: ShardWriter, tensors: Mapping[str, "Tensor"]) -> int:
    """Write computed tensors in their planned dtypes; returns their bytes."""
    from kvfold.convert.io.tensors import cast_chunk, torch_dtype

    for name, tensor in tensors.items():
        writer.write(name, cast_chunk(tensor, torch_dtype(planned[name].dtype), name))
    return sum(planned[name].nbytes for name in tensors)


def transform_layer(plan: Plan, layer: int) -> "AttentionWeights":
    """``layer`` folded by a method that looks at nothing but weights."""
    from kvfold.convert.families.layout import read_layer
    from kvfold.convert.transforms.fold import pool

    weights = read_layer(plan.model, layer, reader(plan, layer))
    kv_heads = plan.kv_heads
    match plan.request.resolved_method:
        case "first":
            return pool.first(weights, kv_heads)
        case "random":
            return pool.random(
                weights, kv_heads, seed=plan.request.seed, layer=layer, std=plan.geometry.initializer_range
            )
        case _:
            return pool.mean(weights, kv_heads)


def reader(plan: Plan, layer: int) -> Callable[[str], "Tensor"]:
    """Reads what the transform of ``layer`` needs, refusing non-finite weights; the rest has a shape but no bytes."""
    import torch

    from kvfold.convert.io.tensors import torch_dtype

    needed = set(plan.read_names(layer))

    def read(name: str) -> "Tensor":
        info = plan.checkpoint.info(name)
        if name not in needed:
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        return finite(plan.checkpoint, name)

    return read


def finite(checkpoint: Checkpoint, name: str) -> "Tensor":
    """The tensor ``name``. Raises InputError when it holds NaN or infinity."""
    from kvfold.convert.io.tensors import count_non_finite

    tensor = checkpoint.read(name)
    bad = count_non_finite(tensor)
    if bad:
        raise InputError(
            f"{checkpoint.origin}: tensor {name!r} in {checkpoint.tensors[name].file}: expected finite numbers, "
            f"found {bad} NaN or infinite; such a model is damaged: fetch it again"
        )
    return tensor


def _write_side_files(plan: Plan, measured: "Calibrated | None", folder: Path) -> dict[str, Any]:
    """Config, tokenizer and licence files, the model card and ``kvfold.json``, whose content is returned.

    A calibrated conversion is read back first: its record tells what the files on disk do, not what was in memory.
    """
    for path in plan.checkpoint.extra_files():
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(dump(plan.layout.config), encoding="utf-8")
    found: dict[str, Any] = {}
    if measured is not None:
        from kvfold.convert.conversion.fold import written_loss

        found = measured.record(written_loss(folder, measured))
    record = report.record(plan, found)
    card = report.model_card(plan, license_of(plan.checkpoint.folder), record)
    for name, text in {"kvfold.json": dump_record(record), "README.md": card}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return record
