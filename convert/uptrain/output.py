"""The trained checkpoint: weights in the layout of its source, the source's side files, and the record of the training.

Side files are read before the first step and written after the last. One that cannot be read, or is a link out of the
checkpoint, must end a run before it trained, and one that changes meanwhile must not change what was checked: their
contents are held in memory from the start.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.convert.checkpoint.atomic import output_folder
from kvfold.convert.checkpoint.files import dump, parse_json, portable_name, read_bytes, write_file
from kvfold.convert.checkpoint.folder import RECORD, raise_problems, resolve_member
from kvfold.convert.checkpoint.hashing import file_hashes
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.conversion.card import trained_card
from kvfold.convert.conversion.record import versions
from kvfold.convert.errors import InputError, KvfoldError, opt
from kvfold.convert.measure.verify import non_finite
from kvfold.convert.sizes import parse_size
from kvfold.convert.uptrain.request import UptrainRequest

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
_CARD = "README.md"


@dataclass(frozen=True)
class SideFiles:
    """``copied`` files by name, the ``record`` of the conversion, and the text of the model card, None without one."""

    copied: dict[str, bytes]
    record: dict[str, Any]
    card: str | None

    def write(self, folder: Path) -> None:
        """Write the copied files into ``folder``."""
        for name, data in self.copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, data)


def read_side_files(source: Checkpoint) -> SideFiles:
    """Config, tokenizer, license and Python files, ``kvfold.json`` and the card of ``source``.

    Raises InputError, with every problem at once, when one is a link out of the folder, no file, or not in its format.
    """
    names = [
        "config.json",
        *(str(path.relative_to(source.folder)) for path in source.extra_files()),
        *sorted(path.name for path in source.folder.glob("*.py")),
    ]
    own = [name for name in (RECORD, _CARD) if os.path.lexists(source.folder / name)]
    contents: dict[str, bytes] = {}
    problems = []
    for name in dict.fromkeys([*names, *own]):
        try:
            contents[name] = read_bytes(resolve_member(source.folder, name))
        except InputError as error:
            problems.append(error.message)
    raise_problems(problems)
    record = parse_json(source.folder / RECORD, contents[RECORD]) if RECORD in contents else {"format": 2}
    card = _text(source.folder / _CARD, contents[_CARD]) if _CARD in contents else None
    return SideFiles({name: contents[name] for name in names}, record, card)


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected text in UTF-8, found a byte that is none at {error.start}; save it as UTF-8 or remove it"
        ) from None


def write_trained(
    request: UptrainRequest,
    source: Checkpoint,
    side_files: SideFiles,
    model: Any,
    state: Mapping[str, Tensor],
    training: Mapping[str, Any],
) -> None:
    """Write OUT, whole or not at all. ``training`` is the record of the run for ``kvfold.json``.

    ``side_files`` are the side files of ``source``. Raises KvfoldError when the written tensors are not those of the
    source by name, dtype and shape.
    """
    with output_folder(request.out, overwrite=request.overwrite, model=source.folder) as folder:
        dtypes = {name: torch_dtype(info.dtype) for name, info in source.tensors.items()}
        most_common = max(dtypes.values(), key=list(dtypes.values()).count)
        # a cast copies a tied head, and save_pretrained no longer sees that it is one
        tied = {"lm_head.weight"} - dtypes.keys() if model.config.get_text_config().tie_word_embeddings else set()
        stored = {name: value.to(dtypes.get(name, most_common)) for name, value in state.items() if name not in tied}
        model.save_pretrained(folder, state_dict=stored, max_shard_size=parse_size(request.max_shard_size))
        side_files.write(folder)
        _write_records(side_files, folder, request, training)
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


def _write_records(side_files: SideFiles, folder: Path, request: UptrainRequest, training: Mapping[str, Any]) -> None:
    """``kvfold.json`` and the model card of the source, each with the training added."""
    record = dict(side_files.record)
    if "drift" in record:
        record["drift_before_uptraining"] = record.pop("drift")
    record["uptraining"] = {**training, "versions": versions()}
    name, attention = portable_name(Path(request.out)), request.train == "attention"
    card = trained_card(side_files.card or "", name, _section(request, training), attention_only=attention)
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
