"""A run of uptraining: opening the checkpoint, text and teacher, training, and writing the result
with its record.

Weights are written in the layout of the source checkpoint. Its side files are read before the first
step and written after the last: a file that is unreadable or links out of the checkpoint must fail
the run before training, and changes during training must not affect files that were already
checked.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.attention.drift.report import dtype_name
from kvfold.convert.checkpoint.atomic import check_output, output_folder, output_lock
from kvfold.convert.checkpoint.files import (
    dump,
    parse_json,
    portable_name,
    recorded_name,
    write_file,
)
from kvfold.convert.checkpoint.folder import CARD, RECORD, raise_problems, read_member
from kvfold.convert.checkpoint.hashing import file_hashes
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.conversion.card import trained_card
from kvfold.convert.conversion.fitted import Change
from kvfold.convert.conversion.record import versions
from kvfold.convert.device import stored_dtype
from kvfold.convert.errors import InputError, KvfoldError, option_error
from kvfold.convert.families.family import text_type
from kvfold.convert.measure.verify import non_finite
from kvfold.convert.processes import launched_as_rank0, on_rank0
from kvfold.convert.sizes import jsonable, parse_size
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import hide_bars, load_config
from kvfold.convert.text.corpus import check_seq_len, open_corpus
from kvfold.convert.text.tokenizer import load_tokenizer, render
from kvfold.convert.training.steps import check_constant
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.work import (
    BEST,
    COMPLETE,
    LogRow,
    TokenPlan,
    TrainingOrder,
    last_checkpoint,
    prepare,
)

_SECTION = """
A converted checkpoint, trained further by kvfold: {what} trained for {steps} steps of {tokens} tokens{text}{teacher}.
"""
_TABLE = """
| on {count} x {length} held-out tokens | before | after |
|---|---|---|
"""
_CARD_ROWS = {
    "eval_perplexity": ("perplexity", "{:.3f}"),
    "eval_excess": ("excess loss over the teacher's, nats", "{:+.4f}"),
    "eval_kl": ("KL from the teacher, nats", "{:.4f}"),
}


@dataclass(frozen=True)
class Uptrained:
    """The record of a run in ``kvfold.json`` and the rows of its log; both are empty except on the
    first process.
    """

    record: Mapping[str, Any]
    rows: list[LogRow]

    def __repr__(self) -> str:
        steps = self.record.get("request", {}).get("steps", 0)
        return f"Uptrained({steps} steps, {len(self.rows)} rows of the log)"

    @property
    def held_out(self) -> Change[LogRow] | None:
        """The rows with figures on held-out text before training and of the state written; None if
        not measured.
        """
        measured = [row for row in self.rows if row.error is not None]
        # As in `Uptrainer`, the first of equals is the best.
        return (
            Change(measured[0], min(measured, key=lambda row: row.error or 0.0))
            if measured
            else None
        )

    def to_dict(self) -> dict[str, Any]:
        """The record and the rows of the log as plain JSON values."""
        return {**self.record, "log": [row.to_dict() for row in self.rows]}


def uptrain_checkpoint(request: UptrainRequest) -> Uptrained:
    """Train ``request.model`` further and write it to ``request.out``; in distributed runs, call it
    in every process.

    Raises InputError if the request, a checkpoint or a text is invalid; OUT is not written in this
    case.

    >>> (folder / "words.txt").write_text("The list of all items is sorted in place. " * 40)
    1680
    >>> sizes = {"steps": 1, "batch_tokens": 32, "seq_len": 32, "eval_every": 0, "device": "cpu", "quiet": True}
    >>> request = UptrainRequest(demo_folder(), folder / "trained", folder / "words.txt", **sizes)
    >>> uptrain_checkpoint(request)
    Uptrained(1 steps, 1 rows of the log)
    """
    if find_spec("accelerate") is None:
        raise InputError(
            "uptraining needs accelerate, which is not installed: pip install 'kvfold[train]'"
        )
    with closing(open_checkpoint(request.model)) as source, ExitStack() as locks:
        if (inner := text_type(source.config)) is not None:
            wraps = (
                f"model type {source.config['model_type']} is multimodal (a wrapper around {inner})"
            )
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
            return _train(request, source, read_side_files(source))
        except BaseException as error:
            if checkpoints := [*request.work.glob(f"checkpoint-*/{COMPLETE}")]:
                error.add_note(
                    f"checkpoints kept for the same request in {request.work}: {len(checkpoints)}"
                )
            elif request.work.exists():
                error.add_note(f"{request.work} is kept for the same request")
            raise


def _train(request: UptrainRequest, source: Checkpoint, side_files: "SideFiles") -> Uptrained:
    from kvfold.convert.uptrain.trainer import (
        Uptrainer,
        forward_dtype,
        load_teacher,
        prepare_model,
        training_arguments,
    )

    config = load_config(source, request.trust_remote_code)
    check_seq_len(request.seq_len, getattr(config, "max_position_embeddings", None), source.origin)
    plan = _token_plan(request, source, config.vocab_size)
    files = list(source.states)
    if request.teacher is not None:
        with closing(open_checkpoint(request.teacher)) as teacher:
            files += teacher.states
    checkpoint = last_checkpoint(request, files)
    precision = forward_dtype(request, source)
    arguments = training_arguments(request, config.hidden_size, precision, checkpoint is not None)
    hide_bars(request.quiet)
    if not request.quiet and launched_as_rank0():
        if checkpoint is not None:
            after = f"{checkpoint.name.removeprefix('checkpoint-')} of {request.steps}"
            print(
                f"resuming after step {after} of the interrupted run (--fresh starts over)",
                file=sys.stderr,
            )
        chosen = (
            "" if request.relative_lr else f", chosen for {request.batch_tokens} tokens per step"
        )
        warmup = (
            f" after {arguments.warmup_steps} steps of warmup" if arguments.warmup_steps else ""
        )
        computed = f"forward and backward passes in {dtype_name(precision)}"
        print(
            f"learning rate: {arguments.learning_rate:.2g} of each tensor's size{warmup}{chosen};"
            f" {computed}",
            file=sys.stderr,
        )
    distilled = request.teacher and load_teacher(
        request.teacher, request, source, precision, arguments.device
    )
    model = load_model(source, torch.float32, request.trust_remote_code)
    held = prepare_model(model, source, request)
    tokens = prepare(request, files, checkpoint, plan, arguments)
    order = TrainingOrder(tokens.training, plan.training, plan.seed)
    trainer = Uptrainer(model, arguments, request, order, tokens.held_out.long(), distilled, held)
    state = trainer.run(checkpoint)

    def write() -> Uptrained:
        if held:
            check_constant(state, source)
        rows = trainer.run_log.rows(trainer.state.log_history)
        record = _record(request, plan, Uptrained({}, rows).held_out) | {
            "precision": dtype_name(precision)
        }
        model = trainer.accelerator.unwrap_model(trainer.model)
        write_trained(request, source, side_files, model, state, record)
        # Only a resumed run needs these.
        for path in request.work.glob("checkpoint-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in [*request.work.glob("tokens.*"), *request.work.glob(f"{BEST}*")]:
            path.unlink()
        return Uptrained(record, rows)

    return on_rank0(write) or Uptrained({}, [])


def _token_plan(request: UptrainRequest, source: Checkpoint, vocabulary: int) -> TokenPlan:
    tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
    corpus = partial(open_corpus, render=partial(render, tokenizer), seed=request.seed)
    text = corpus(request.text, option="text")
    eval_text = None
    if request.eval_text is not None and request.eval_every:
        eval_text = corpus(request.eval_text, option="eval_text")
        paths = [Path(request.text), Path(request.eval_text)]
        same = all(path.exists() for path in paths) and paths[0].samefile(paths[1])
        if same or request.text == request.eval_text:
            raise option_error(
                "eval_text",
                request.eval_text,
                "must differ from --text; omit --eval-text to hold out part of --text",
            )
    return TokenPlan(
        text,
        eval_text,
        tokenizer,
        source.origin,
        vocabulary,
        length=request.seq_len,
        training=request.steps * request.sequences,
        held_out=request.eval_sequences if request.eval_every else 0,
        seed=request.seed,
    )


def _record(
    request: UptrainRequest, plan: TokenPlan, held_out: Change[LogRow] | None
) -> dict[str, Any]:
    """The record of a run for ``kvfold.json``; local files and folders are recorded by name,
    without their paths.
    """
    options = request.result_options()
    for name in options.keys() & {"model", "text", "eval_text", "teacher"}:
        options[name] = recorded_name(options[name])
    record: dict[str, Any] = {
        "request": options,
        "text": plan.text.name,
        "teacher": options.get("teacher"),
    }
    if held_out is not None:
        record["held_out"] = {"sequences": plan.held_out, "length": plan.length}
        for end, row in vars(held_out).items():
            figures = {
                name: value for name, value in row.to_dict().items() if name.startswith("eval_")
            }
            record["held_out"][end] = figures
    return record


def summary(request: UptrainRequest, done: Uptrained) -> str:
    """A summary of the result for users, one to three lines long."""
    tokens = request.steps * request.batch_tokens
    log = request.work / "log.jsonl"
    lines = [f"wrote {request.out}: {request.steps} steps, {tokens} tokens; log in {log}"]
    if (drift := done.held_out) is not None:
        # Distillation lowers the KL; the loss of few sequences says less.
        names = {"eval_excess": "excess loss over the teacher's", "eval_kl": "KL from the teacher"}
        for name, what in [("eval_loss", "loss")] if drift.after.eval_kl is None else names.items():
            before, after = (getattr(row, name) for row in (drift.before, drift.after))
            lines.append(f"held-out {what}: {before:.4f} -> {after:.4f} nats per token")
    return "\n".join(lines)


class SideFiles(NamedTuple):
    """The ``copied`` files by name, the ``record`` of the conversion, and the model card's text,
    possibly empty.
    """

    copied: dict[str, bytes]
    record: dict[str, Any]
    card: str


def read_side_files(source: Checkpoint) -> SideFiles:
    """Read the config, tokenizer, license and Python files, ``kvfold.json`` and the model card of
    ``source``.

    Raises InputError if a file links out of the folder, is not a regular file or has an invalid
    format.
    """
    names = [
        "config.json",
        *(str(path.relative_to(source.folder)) for path in source.extra_files()),
    ]
    names += sorted(path.name for path in source.folder.glob("*.py"))
    own = [name for name in (RECORD, CARD) if os.path.lexists(source.folder / name)]
    contents: dict[str, bytes] = {}
    problems = []
    for name in dict.fromkeys([*names, *own]):
        try:
            contents[name] = read_member(source.folder, name)
        except InputError as error:
            problems.append(error.message)
    raise_problems(problems)
    record = (
        parse_json(source.folder / RECORD, contents[RECORD])
        if RECORD in contents
        else {"format": 2}
    )
    try:
        card = contents.get(CARD, b"").decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8; save the file as UTF-8 or remove it"
        raise InputError(f"{source.folder / CARD}: {problem}") from None
    return SideFiles({name: contents[name] for name in names}, record, card)


def write_trained(
    request: UptrainRequest,
    source: Checkpoint,
    side_files: SideFiles,
    model: Any,
    state: Mapping[str, Tensor],
    training: Mapping[str, Any],
) -> None:
    """Write the trained checkpoint to OUT atomically. ``training`` is the record of the run for
    ``kvfold.json``.

    Raises KvfoldError if the written tensors differ from the source's in name, dtype or shape,
    InputError if they are not finite.
    """
    with output_folder(request.out, overwrite=request.overwrite, model=source.folder) as folder:
        dtypes = {name: torch_dtype(info.dtype) for name, info in source.tensors.items()}
        main = stored_dtype(source)
        # A cast copies a tied head, and save_pretrained no longer sees that it is one.
        tied = (
            {"lm_head.weight"} - dtypes.keys()
            if model.config.get_text_config().tie_word_embeddings
            else set()
        )
        stored = {
            name: value.to(dtypes.get(name, main))
            for name, value in state.items()
            if name not in tied
        }
        model.save_pretrained(
            folder, state_dict=stored, max_shard_size=parse_size(request.max_shard_size)
        )
        for name, data in side_files.copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, data)
        record = dict(side_files.record)
        if "drift" in record:
            record["drift_before_uptraining"] = record.pop("drift")
        record["uptraining"] = {**training, "versions": versions()}
        name = portable_name(Path(request.out))
        only = request.train == "attention"
        write_file(
            folder / CARD,
            trained_card(side_files.card, name, _section(request, training), attention_only=only),
        )
        record["files"] = file_hashes(folder)
        write_file(folder / RECORD, dump(jsonable(record)))
        _check(source, folder, stored)
        source.check_unchanged()


def _section(request: UptrainRequest, training: Mapping[str, Any]) -> str:
    """The section of the model card about the training, with the drift on held-out text if it was
    measured.
    """
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
        f"| {title} | {form.format(drift['before'][name])} |"
        f" {form.format(drift['after'][name])} |\n"
        for name, (title, form) in _CARD_ROWS.items()
        if name in drift["before"]
    ]
    return section + _TABLE.format(count=drift["sequences"], length=drift["length"]) + "".join(rows)


def _check(source: Checkpoint, folder: Path, trained: Mapping[str, Tensor]) -> None:
    """Raise KvfoldError unless the tensors in ``folder`` are finite and match ``source`` in name,
    dtype and shape.
    """
    with closing(open_checkpoint(folder)) as written:
        before, after = (
            {name: (info.dtype, info.shape) for name, info in opened.tensors.items()}
            for opened in (source, written)
        )
        damaged = list(non_finite(written, written.tensors))
    if damaged:
        what = (
            f"training produced NaN or infinity in {len(damaged)} tensor{'s' * (len(damaged) != 1)}"
        )
        raise InputError(
            f"{source.origin}: {what}, so OUT was not written; lower --relative-lr", damaged
        )
    for name in sorted(before.keys() | after.keys()):
        # Tensors that transformers does not load, such as inv_freq of old models, may be missing.
        dropped = name not in after and (name == "lm_head.weight" or name not in trained)
        if before.get(name) != after.get(name) and not dropped:
            raise KvfoldError(
                f"{name}: written as {after.get(name)}, but {source.origin} has {before.get(name)};"
                " OUT was not written, please report this"
            )
