"""The trained checkpoint: layout, config and side files of its source, and the record of the training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.convert.checkpoint.atomic import output_folder
from kvfold.convert.checkpoint.file_bytes import write_file
from kvfold.convert.checkpoint.folder import RECORD
from kvfold.convert.checkpoint.hashing import file_hashes
from kvfold.convert.checkpoint.json_text import dump, portable_name
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.conversion.card import trained_card
from kvfold.convert.conversion.record import versions
from kvfold.convert.errors import KvfoldError, opt
from kvfold.convert.measure.verify import non_finite
from kvfold.convert.sizes import parse_size
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.side_files import SideFiles

_SECTION = """
A converted checkpoint, trained further by kvfold: {what} trained for {steps} steps of {tokens} tokens{text}{teacher}.
"""
_TABLE = """
| on {count} x {length} held-out tokens | before | after |
|---|---|---|
"""
_ROWS = {
    "eval_perplexity": ("perplexity", "{:.3f}"),
    "eval_excess": ("excess loss over the teacher's, nats", "{:+.4f}"),
    "eval_kl": ("KL from the teacher, nats", "{:.4f}"),
}


def write_trained(
    request: UptrainRequest,
    source: Checkpoint,
    beside: SideFiles,
    model: Any,
    state: Mapping[str, Tensor],
    training: Mapping[str, Any],
) -> None:
    """Write OUT, whole or not at all. ``training`` is the record of the run for ``kvfold.json``.

    ``beside`` are the side files of ``source``. Raises KvfoldError when the written tensors are not those of the
    source by name, dtype and shape.
    """
    with output_folder(request.out, overwrite=request.overwrite, model=source.folder) as folder:
        dtypes = {name: torch_dtype(info.dtype) for name, info in source.tensors.items()}
        most_common = max(dtypes.values(), key=list(dtypes.values()).count)
        # a cast copies a tied head, and save_pretrained no longer sees that it is one
        tied = {"lm_head.weight"} - dtypes.keys() if model.config.get_text_config().tie_word_embeddings else set()
        stored = {name: value.to(dtypes.get(name, most_common)) for name, value in state.items() if name not in tied}
        model.save_pretrained(folder, state_dict=stored, max_shard_size=parse_size(request.max_shard_size))
        beside.write(folder)
        _write_records(beside, folder, request, training)
        _check(source, folder, stored)
        source.check_unchanged()


def _check(source: Checkpoint, folder: Path, trained: Mapping[str, Tensor]) -> None:
    """Compare with the source; tensors that transformers does not load (``inv_freq`` of old models) may be missing."""
    written = open_checkpoint(folder)
    try:
        before, after = (
            {name: (info.dtype, info.shape) for name, info in opened.tensors.items()} for opened in (source, written)
        )
        damaged = list(non_finite(written, written.tensors))
    finally:
        written.close()
    if damaged:
        what = f"{len(damaged)} tensors with NaN or infinity; nothing was kept: lower {opt('relative_lr')}"
        raise KvfoldError(f"{source.origin}: expected finite weights after the training, found {what}", damaged)
    for name in sorted(before.keys() | after.keys()):
        dropped = name not in after and (name == "lm_head.weight" or name not in trained)
        if before.get(name) != after.get(name) and not dropped:
            raise KvfoldError(
                f"{name}: expected {before.get(name)} as in {source.origin}, found {after.get(name)} in what was "
                "written: nothing was kept; please report it"
            )


def _write_records(beside: SideFiles, folder: Path, request: UptrainRequest, training: Mapping[str, Any]) -> None:
    """``kvfold.json`` and the model card of the source, each with the training added."""
    record = dict(beside.record)
    if "drift" in record:
        record["drift_before_uptraining"] = record.pop("drift")
    record["uptraining"] = {**training, "versions": versions()}
    name, attention = portable_name(Path(request.out)), request.train == "attention"
    card = trained_card(beside.card or "", name, _section(request, training), attention_only=attention)
    write_file(folder / "README.md", card)
    record["files"] = file_hashes(folder)
    write_file(folder / RECORD, dump(record))


def _section(request: UptrainRequest, training: Mapping[str, Any]) -> str:
    section = _SECTION.format(
        what="its attention was" if request.train == "attention" else "all weights were",
        steps=request.steps,
        tokens=request.batch_tokens,
        text=f" of {training['text']}",
        teacher=f", distilled from `{training['teacher']}`" if training.get("teacher") else "",
    )
    drift = training.get("held_out")
    if not drift:
        return section
    rows = [
        f"| {title} | {form.format(drift['before'][name])} | {form.format(drift['after'][name])} |\n"
        for name, (title, form) in _ROWS.items()
        if name in drift["before"]
    ]
    return section + _TABLE.format(count=drift["sequences"], length=drift["length"]) + "".join(rows)
