"""Uptraining: training a converted checkpoint a little further on ``transformers.Trainer``.

``OUT.training`` has the checkpoints of Trainer, from which an interrupted run continues, the best
weights so far, and ``request.json``, which says whose they are.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from kvfold.attention.drift.report import format_dtype
from kvfold.convert.checkpoint.atomic import (
    lock_output,
    open_output_folder,
    resolve_output_path,
    write_small_file,
)
from kvfold.convert.checkpoint.digests import add_hashes, fingerprint_files
from kvfold.convert.checkpoint.files import (
    CARD,
    RECORD,
    decode_file_name,
    format_json,
    list_files_besides_weights,
    parse_json_object,
    read_bytes,
    read_checkpoint_file,
)
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor, ShardWriter, assign_shards, write_index
from kvfold.convert.conversion.card import escape_markdown_value, render_trained_card
from kvfold.convert.conversion.memory import (
    check_free_memory,
    estimate_uptraining_memory,
)
from kvfold.convert.conversion.record import get_package_versions
from kvfold.convert.device import choose_autocast_dtype, choose_device
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.families.family import find_text_type
from kvfold.convert.formatting import to_json_values
from kvfold.convert.processes import (
    broadcast_from_rank0,
    count_launched,
    launched_as_rank0,
)
from kvfold.convert.stream.stock import hide_progress_bars, load_config
from kvfold.convert.text.corpus import check_seq_len, open_corpus
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import draw_sequences
from kvfold.convert.training.budget import BATCH_TOKENS
from kvfold.convert.training.loop import draw_batches
from kvfold.convert.training.steps import check_constant_channel
from kvfold.convert.uptrain.uptrain_request import FULL_BATCH, UptrainRequest

# The maximum size of a shard, as by default in transformers.
_SHARD_BYTES = 5 * 10**9
# Trainer writes this file of a checkpoint last.
STATE = "trainer_state.json"
# The figures of an evaluation on held-out text, in nats per token.
_FIGURES = {
    "eval_loss": "loss",
    "eval_excess": "excess loss over the teacher's",
    "eval_kl": "KL from the teacher",
}


@dataclass(frozen=True)
class Uptrained:
    """The result of uptraining: what ``kvfold.json`` says about it under ``uptraining``.

    ``record["log"]`` holds the rows that Trainer logged. If drift was measured,
    ``record["held_out"]`` holds the row ``before`` training and that ``after``, of the state that
    was written.
    """

    record: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
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
    source = open_checkpoint(request.model)
    if inner := find_text_type(source.config):
        raise InputError(
            f"{source.origin} wraps a model of type {inner}, but uptraining supports text models"
            " only; use another trainer"
        )
    work = request.training_folder
    resolve_output_path(request.out, overwrite=request.overwrite, model=source.folder)
    work.parent.mkdir(parents=True, exist_ok=True)
    first = launched_as_rank0()
    if first:
        source.print_notes()
    # No second run may write to the same folder meanwhile.
    with lock_output(work.absolute()) if first else nullcontext():
        try:
            return _run_uptraining(request, source)
        except BaseException as error:
            # A refusal of the folder says what to do with it.
            if any(work.glob("checkpoint-*")) and str(work) not in str(error):
                error.add_note(f"{work} is kept: the same command continues")
            raise


def _run_uptraining(request: UptrainRequest, source: Checkpoint) -> Uptrained:
    """Train the open checkpoint ``source`` as ``request`` asks, and write the result to OUT."""
    from kvfold.convert.uptrain.trainer import (
        Uptrainer,
        get_held_out_error,
        load_teacher,
        make_training_arguments,
    )

    config = load_config(source, request.trust_remote_code)
    check_seq_len(request.seq_len, getattr(config, "max_position_embeddings", None), source.origin)
    # Before the first step, so that a bad file does not cost the training.
    side_files = read_side_files(source)
    device = choose_device(request.device)
    # On a CPU a step of 65,536 tokens takes a small language model many minutes.
    tokens = BATCH_TOKENS * count_launched() if device.type == "cpu" else FULL_BATCH
    tokens = max(1, tokens // request.seq_len) * request.seq_len
    request = replace(request, batch_tokens=request.batch_tokens or tokens)
    precision = choose_autocast_dtype(source, device, request.precision) or torch.float32
    # From here on the processes are connected.
    arguments = make_training_arguments(request, config.hidden_size, precision)
    checkpoint = broadcast_from_rank0(lambda: prepare_training_folder(request, source))
    arguments.eval_on_start = bool(request.eval_every) and checkpoint is None
    sequences, held_out = broadcast_from_rank0(
        lambda: draw_uptraining_tokens(request, source, config.vocab_size)
    )
    _check_memory(request, source, config, arguments.per_device_train_batch_size, precision)
    teacher = load_teacher(request, source, precision)
    trainer = Uptrainer(request, source, arguments, teacher, sequences, held_out)
    with hide_progress_bars():  # of the checkpoints that the trainer saves
        state = trainer.train_and_gather_state(checkpoint)

    def write_result() -> Uptrained:
        """Write the trained checkpoint to OUT, and remove the training folder."""
        if trainer.constant:
            check_constant_channel(state, source)
        options = request.collect_result_options()
        for name in options.keys() & {"model", "text", "teacher"}:
            path = Path(options[name])
            if path.exists():  # without its path, which is of this machine
                options[name] = decode_file_name(path.resolve())
        # Without the summary of the whole run. Trainer sorts the keys of rows that it saves: a
        # resumed run must write the same bytes.
        history = trainer.state.log_history
        rows = [dict(sorted(row.items())) for row in history if "train_runtime" not in row]
        record = {"request": options, "log": rows, "precision": format_dtype(precision)}
        if measured := [row for row in rows if "eval_loss" in row]:
            # As in `Uptrainer`, the first of equals is the best.
            best = min(measured, key=get_held_out_error)
            record["held_out"] = {"before": measured[0], "after": best}
        _write_checkpoint(request, source, side_files, trainer.model, state, record)
        shutil.rmtree(request.training_folder)
        return Uptrained(record)

    return broadcast_from_rank0(write_result)


def _check_memory(
    request: UptrainRequest, source: Checkpoint, config: Any, sequences: int, precision: torch.dtype
) -> None:
    """Raise InputError if training ``sequences`` sequences at a time needs more memory than is
    free on the host or on the GPU. Runs of several processes, which may be sharded, pass.
    """
    if count_launched() > 1:
        return
    elements = source.count_elements()
    frozen = 0
    if request.teacher is not None:
        frozen += open_checkpoint(request.teacher).count_elements() * precision.itemsize
    if precision != torch.float32 and not request.gradient_checkpointing:
        # The casts of the weights stay for the gradients.
        frozen += elements * precision.itemsize
    on_gpu = choose_device(request.device).type == "cuda"
    tokens = sequences * request.seq_len
    need = estimate_uptraining_memory(
        elements, frozen, config, tokens, on_gpu, request.gradient_checkpointing
    )
    check_free_memory([need], on_gpu)


def read_side_files(source: Checkpoint) -> dict[str, bytes]:
    """Return the bytes of the files of ``source`` that are not weights, by name: config, tokenizer,
    license and Python files, ``kvfold.json`` and the model card.

    Raises InputError if a file links out of the folder, is not a regular file or has an invalid
    format.
    """
    names = ["config.json", *list_files_besides_weights(source.folder)]
    names += [path.name for path in source.folder.glob("*.py")]
    names += [name for name in (RECORD, CARD) if os.path.lexists(source.folder / name)]
    files = {name: read_checkpoint_file(source.folder, name) for name in names}
    if RECORD in files:
        parse_json_object(source.folder / RECORD, files[RECORD])
    return files


def prepare_training_folder(request: UptrainRequest, source: Checkpoint) -> Path | None:
    """Prepare the folder ``OUT.training``. Returns the newest complete checkpoint in it, or None if
    training starts anew.

    Raises InputError if it is of a run with other options or of files of MODEL, the teacher or the
    text that have changed since, or if the folder contains links or other files: what is read from
    it must have been written by a run of this request.
    """
    work = request.training_folder
    started = work / "request.json"
    links = [path for path in (work, *work.rglob("*")) if path.is_symlink()]
    before = {}
    if started.is_file() and not links:
        with suppress(InputError):
            before = parse_json_object(started, read_bytes(started))
    exists = work.is_file() or any(work.glob("*"))
    if links or (exists and before.keys() != {"options", "files"}):
        raise InputError(
            f"{work}: the training writes its checkpoints into this folder, but it contains links"
            f" or files of something else, or its {started.name} is damaged; delete {work} if only"
            " an interrupted run is in it, or choose another OUT"
        )
    files = [*source.states, Path(request.text)]
    if request.teacher is not None:
        files += open_checkpoint(request.teacher).states
    now = json.dumps(
        {"options": request.collect_result_options(), "files": fingerprint_files(files)}, indent=1
    )
    checkpoint = None if request.fresh else _find_newest_checkpoint(work)
    if checkpoint is None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_small_file(started, now)
    elif before != json.loads(now):
        raise InputError(
            f"{work} has an interrupted run with other options, or its model or text has changed"
            " since; use the same options and files to continue it, or --fresh to discard it"
        )
    else:
        print(f"resuming from {checkpoint.name} (--fresh starts over)", file=sys.stderr)
    return checkpoint


def _find_newest_checkpoint(work: Path) -> Path | None:
    """Return the newest training checkpoint in ``work`` that was written to its end; None if there
    is none.
    """
    states = [
        state
        for state in work.glob(f"*/{STATE}")
        if re.fullmatch("checkpoint-[0-9]{1,9}", state.parent.name)
    ]
    for state in sorted(states, key=os.path.getmtime, reverse=True):
        with suppress(InputError):
            parse_json_object(state, read_bytes(state))
            return state.parent
    return None


def draw_uptraining_tokens(
    request: UptrainRequest, source: Checkpoint, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return the training sequences ``[steps * n, T]`` in their order, and the held-out sequences
    ``[m, T]``; both int32.

    Raises InputError if the text is unreadable, too short or does not fit the model.
    """
    held_out = request.eval_sequences if request.eval_every else 0
    count = request.steps * request.sequences_per_step
    tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
    corpus = open_corpus(request.text, tokenizer, request.seed, option="text")
    advice = "or lower --eval-sequences or --seq-len"
    rows = draw_sequences(corpus, request.seq_len, held_out + 1, held_out + count, advice)
    check_vocabulary(rows, vocabulary, source.origin)
    training = rows[held_out : held_out + count]
    # A new order in every epoch, independent of the number of processes.
    epochs = draw_batches(len(training), 1, request.seed)
    order = [index for (index,) in islice(epochs, count)]
    return training[order], rows[:held_out]


def _write_checkpoint(
    request: UptrainRequest,
    source: Checkpoint,
    side_files: Mapping[str, bytes],
    model: Any,
    state: Mapping[str, Tensor],
    training: Mapping[str, Any],
) -> None:
    """Write the trained weights ``state`` of ``model`` to OUT atomically, with the names, dtypes
    and shapes of ``source``.
    """
    # Files of a base model lack the prefix of the whole model's names.
    prefix = f"{model.base_model_prefix}."
    stored = {
        name if name in source.tensors else name.removeprefix(prefix): tensor
        for name, tensor in revert_weight_conversion(model, dict(state)).items()
    }
    if unknown := stored.keys() - source.tensors.keys() - model.all_tied_weights_keys.keys():
        raise KvfoldError(
            f"tensor {min(unknown)!r} was trained, but {source.origin} has no tensor of this"
            " name; OUT was not written, please report this"
        )
    # Tensors that transformers does not load, such as inv_freq of old models, are copied.
    planned = [
        PlannedTensor(name, info.dtype, info.shape, None if name in stored else name)
        for name, info in source.tensors.items()
    ]
    shards = assign_shards(planned, _SHARD_BYTES)
    with open_output_folder(
        request.out, overwrite=request.overwrite, model=source.folder
    ) as folder:
        writer = ShardWriter(folder, shards)
        with writer.copy_source_tensors(source, lambda _: None):
            # Of tied parameters the files have one.
            writer.write({name: stored[name] for name in stored if name in source.tensors})
        writer.finish()
        write_index(folder, shards)
        for name, data in side_files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_small_file(folder / name, data)
        card = side_files.get(CARD, b"").decode(errors="replace")
        name = decode_file_name(Path(request.out))
        options = training["request"]
        names = {key: escape_markdown_value(str(value)) for key, value in options.items()}
        teacher = f", distilled from `{names['teacher']}`" if request.teacher else ""
        section = (
            f"A converted checkpoint, trained further by kvfold: all weights, for {request.steps}"
            f" steps of {request.batch_tokens} tokens of {names['text']}{teacher}.\n\n"
        )
        section += "\n".join(f"- {figure}" for figure in _format_held_out_figures(training))
        write_small_file(folder / CARD, render_trained_card(card, name, section))
        record: dict[str, Any] = json.loads(side_files.get(RECORD, b'{"format": 4}'))
        if "drift" in record:
            record["drift_before_uptraining"] = record.pop("drift")
        record["uptraining"] = {**training, "versions": get_package_versions()}
        checkpoint = open_checkpoint(folder)
        checkpoint.digests.update(writer.digests)
        add_hashes(record, checkpoint)
        write_small_file(folder / RECORD, format_json(to_json_values(record)))
        source.check_unchanged()


def format_summary(request: UptrainRequest, uptrained: Uptrained) -> str:
    """Return a summary of the result for users, one to four lines long."""
    tokens = request.steps * uptrained.record["request"]["batch_tokens"]
    wrote = f"wrote {request.out}: {request.steps} steps, {tokens} tokens"
    return "\n".join([wrote, *_format_held_out_figures(uptrained.record)])


def _format_held_out_figures(record: Mapping[str, Any]) -> list[str]:
    """Return one line for each figure on held-out text: its value before and after training."""
    rows = record.get("held_out", {"before": {}})
    return [
        f"held-out {title}: {rows['before'][name]:.4f} -> {rows['after'][name]:.4f} nats per token"
        for name, title in _FIGURES.items()
        if name in rows["before"]
    ]
