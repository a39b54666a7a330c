"""Uptraining: training a converted checkpoint a little further on ``transformers.Trainer``."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from kvfold.attention.drift.report import dtype_name
from kvfold.convert.checkpoint.atomic import check_output, output_folder, output_lock, write_file
from kvfold.convert.checkpoint.digests import add_hashes
from kvfold.convert.checkpoint.members import (
    CARD,
    RECORD,
    dump,
    parse_json,
    portable_name,
    read_member,
    recorded_name,
)
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.conversion.card import trained_card
from kvfold.convert.conversion.record import versions
from kvfold.convert.device import stored_dtype
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.families.family import text_type
from kvfold.convert.formatting import parse_size, to_json_values
from kvfold.convert.processes import broadcast_from_rank0, launched_as_rank0, on_rank0
from kvfold.convert.stream.stock import hide_bars, load_config
from kvfold.convert.text.corpus import check_seq_len
from kvfold.convert.training.steps import check_constant
from kvfold.convert.uptrain.training_folder import (
    STATE,
    TOKENS,
    draw_tokens,
    resume_or_start,
)
from kvfold.convert.uptrain.uptrain_request import UptrainRequest

# The figures of an evaluation on held-out text, in nats per token.
_FIGURES = {
    "eval_loss": "loss",
    "eval_excess": "excess loss over the teacher's",
    "eval_kl": "KL from the teacher",
}


@dataclass(frozen=True)
class Uptrained:
    """What ``kvfold.json`` says about the training, under ``uptraining``; empty except on the first
    process.

    ``record["log"]`` holds the rows that Trainer logged. If drift was measured,
    ``record["held_out"]`` holds the row ``before`` training and that ``after``, of the state that
    was written.
    """

    record: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.record)


def uptrain_checkpoint(request: UptrainRequest) -> Uptrained:
    """Train ``request.model`` further and write it to ``request.out``; in distributed runs, call it
    in every process.

    Raises InputError if the request, a checkpoint or a text is invalid; OUT is not written in this
    case.

    >>> (folder / "words.txt").write_text("The list of all items is sorted in place. " * 40)
    1680
    >>> sizes = {"steps": 1, "batch_tokens": 32, "seq_len": 32, "eval_every": 0, "device": "cpu"}
    >>> text = folder / "words.txt"
    >>> request = UptrainRequest(demo_folder(), folder / "trained", text, **sizes, quiet=True)
    >>> len(uptrain_checkpoint(request).record["log"])
    1
    """
    if find_spec("accelerate") is None:
        raise InputError(
            "uptraining needs accelerate, which is not installed: pip install 'kvfold[train]'"
        )
    with closing(open_checkpoint(request.model)) as source, ExitStack() as locks:
        if (inner := text_type(source.config)) is not None:
            wraps = f"model type {source.config['model_type']} is a wrapper around {inner}"
            raise InputError(
                f"{source.origin}: {wraps}, but uptraining supports text models only; use another"
                " trainer"
            )
        check_output(request.out, overwrite=request.overwrite, model=source.folder)
        request.work.parent.mkdir(parents=True, exist_ok=True)
        # No second run may write to the same folder meanwhile.
        if launched_as_rank0():
            locks.enter_context(output_lock(request.work.absolute()))
        try:
            return _train(request, source)
        except BaseException as error:
            if any(request.work.glob(f"checkpoint-*/{STATE}")):
                error.add_note(f"{request.work} is kept: the same command continues from there")
            raise


def _train(request: UptrainRequest, source: Checkpoint) -> Uptrained:
    from kvfold.convert.uptrain.trainer import Uptrainer, forward_dtype, training_arguments

    config = load_config(source, request.trust_remote_code)
    check_seq_len(request.seq_len, getattr(config, "max_position_embeddings", None), source.origin)
    # Before the first step, so that a bad file does not cost the training.
    side_files = _read_side_files(source)
    precision = forward_dtype(request, source)
    hide_bars(request.quiet)
    # From here on the processes are connected.
    arguments = training_arguments(request, config.hidden_size, precision)
    checkpoint = broadcast_from_rank0(lambda: resume_or_start(request, source))
    arguments.eval_on_start = bool(request.eval_every) and checkpoint is None
    if not request.quiet and launched_as_rank0():
        print(
            f"learning rate: {arguments.learning_rate:.2g} of each tensor's size after"
            f" {arguments.warmup_steps} steps of warmup; forward and backward passes in"
            f" {dtype_name(precision)}",
            file=sys.stderr,
        )
    on_rank0(lambda: draw_tokens(request, source, config.vocab_size))
    tokens = load_file(request.work / TOKENS)
    trainer = Uptrainer(request, source, arguments, tokens)
    state = trainer.run(checkpoint)

    def write() -> Uptrained:
        if trainer.constant:
            check_constant(state, source)
        options = request.result_options()
        for name in options.keys() & {"model", "text", "eval_text", "teacher"}:
            options[name] = recorded_name(options[name])
        record = {"request": options, "text": options["text"], "teacher": options.get("teacher")}
        record |= _held_out_rows(request, trainer.rows())
        record |= {"log": trainer.rows(), "precision": dtype_name(precision)}
        model = trainer.accelerator.unwrap_model(trainer.model)
        _write_checkpoint(request, source, side_files, model, state, record)
        shutil.rmtree(request.work)
        return Uptrained(record)

    return on_rank0(write) or Uptrained({})


def _held_out_rows(request: UptrainRequest, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The log's rows before training and of the state that is written, under ``held_out``; nothing
    without evaluations.
    """
    measured = [row for row in rows if "eval_loss" in row]
    if not measured:
        return {}
    # As in `Uptrainer`, the first of equals is the best.
    best = min(measured, key=lambda row: row.get("eval_kl", row["eval_loss"]))
    sizes = {"sequences": request.eval_sequences, "length": request.seq_len}
    return {"held_out": {**sizes, "before": measured[0], "after": best}}


def summary(request: UptrainRequest, uptrained: Uptrained) -> str:
    """A summary of the result for users, one to four lines long."""
    tokens = request.steps * request.batch_tokens
    lines = [f"wrote {request.out}: {request.steps} steps, {tokens} tokens"]
    for title, before, after in _figures(uptrained.record):
        lines.append(f"held-out {title}: {before} -> {after} nats per token")
    return "\n".join(lines)


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The title of each held-out figure, and the figure before and after training."""
    drift = record.get("held_out", {"before": {}})
    for name, title in _FIGURES.items():
        if name in drift["before"]:
            yield title, f"{drift['before'][name]:.4f}", f"{drift['after'][name]:.4f}"


def _read_side_files(source: Checkpoint) -> dict[str, bytes]:
    """Read the config, tokenizer, license and Python files, ``kvfold.json`` and the model card of
    ``source``, by name.

    Raises InputError if a file links out of the folder, is not a regular file or has an invalid
    format.
    """
    names = [
        "config.json",
        *(str(path.relative_to(source.folder)) for path in source.extra_files()),
    ]
    names += sorted(path.name for path in source.folder.glob("*.py"))
    names += [name for name in (RECORD, CARD) if os.path.lexists(source.folder / name)]
    files = {name: read_member(source.folder, name) for name in dict.fromkeys(names)}
    if RECORD in files:
        parse_json(source.folder / RECORD, files[RECORD])
    return files


def _write_checkpoint(
    request: UptrainRequest,
    source: Checkpoint,
    side_files: Mapping[str, bytes],
    model: Any,
    state: Mapping[str, Tensor],
    training: Mapping[str, Any],
) -> None:
    """Write the trained checkpoint to OUT atomically, in the layout of ``source``. ``training`` is
    the record of the run for ``kvfold.json``.
    """
    with output_folder(request.out, overwrite=request.overwrite, model=source.folder) as folder:
        dtypes = {name: torch_dtype(info.dtype) for name, info in source.tensors.items()}
        stored = {
            name: value.to(dtypes.get(name, stored_dtype(source))) for name, value in state.items()
        }
        if model.config.get_text_config().tie_word_embeddings and "lm_head.weight" not in dtypes:
            # A cast copies a tied head, and save_pretrained no longer sees that it is one.
            stored.pop("lm_head.weight", None)
        if damaged := [name for name, value in stored.items() if not value.isfinite().all()]:
            raise InputError(
                f"{source.origin}: training produced NaN or infinity in {len(damaged)} tensors, so"
                " OUT was not written; lower --relative-lr",
                damaged,
            )
        shard_size = parse_size(request.max_shard_size)
        model.save_pretrained(folder, state_dict=stored, max_shard_size=shard_size)
        for name, data in side_files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, data)
        card = trained_card(
            side_files.get(CARD, b"").decode(errors="replace"),
            portable_name(Path(request.out)),
            _describe(request, training),
        )
        write_file(folder / CARD, card)
        record: dict[str, Any] = json.loads(side_files.get(RECORD, b'{"format": 4}'))
        if "drift" in record:
            record["drift_before_uptraining"] = record.pop("drift")
        record["uptraining"] = {**training, "versions": versions()}
        add_hashes(record, folder)
        write_file(folder / RECORD, dump(to_json_values(record)))
        _check_written(source, folder, stored)
        source.check_unchanged()


def _describe(request: UptrainRequest, training: Mapping[str, Any]) -> str:
    """The model card's section about the training, with the drift on held-out text if it was
    measured.
    """
    trained = "its attention was" if request.train == "attention" else "all weights were"
    teacher = f", distilled from `{training['teacher']}`" if training["teacher"] else ""
    lines = [
        f"A converted checkpoint, trained further by kvfold: {trained} trained for {request.steps}"
        f" steps of {request.batch_tokens} tokens of {training['text']}{teacher}."
    ]
    if "held_out" in training:
        tokens = f"{request.eval_sequences} x {request.seq_len} held-out tokens"
        lines += ["", f"| nats per token on {tokens} | before | after |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in _figures(training)]
    return "\n".join(lines) + "\n"


def _check_written(source: Checkpoint, folder: Path, trained: Mapping[str, Tensor]) -> None:
    """Raise KvfoldError unless ``folder`` has the tensors of ``source``, with their dtypes and
    shapes.
    """
    with closing(open_checkpoint(folder)) as written:
        after = {name: (info.dtype, info.shape) for name, info in written.tensors.items()}
    # Tensors that transformers does not load, such as inv_freq of old models, may be missing.
    before = {
        name: (info.dtype, info.shape)
        for name, info in source.tensors.items()
        if name in after or (name in trained and name != "lm_head.weight")
    }
    if before != after:
        name = min(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        raise KvfoldError(
            f"{name}: written as {after.get(name)}, but {source.origin} has {before.get(name)};"
            " OUT was not written, please report this"
        )
