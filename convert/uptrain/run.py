"""A run of uptraining: checkpoint, text, teacher, trainer, and the written result."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.checkpoint.atomic import check_output, output_lock
from kvfold.convert.checkpoint.files import portable_name
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.wrappers import text_type
from kvfold.convert.measure.figures import uptraining_curve
from kvfold.convert.options import takes
from kvfold.convert.processes import run_on_first, started_first
from kvfold.convert.stream.stock import hide_bars, load_config, load_model
from kvfold.convert.text.corpus import Corpus, open_corpus
from kvfold.convert.text.tokenizer import load_tokenizer, render
from kvfold.convert.text.windows import check_seq_len
from kvfold.convert.training.steps import check_constant
from kvfold.convert.uptrain.arguments import training_arguments
from kvfold.convert.uptrain.data import TokenPlan, TrainingOrder
from kvfold.convert.uptrain.output import SideFiles, read_side_files, write_trained
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.resume import LOG, finish, last_checkpoint, prepare, read_log


@dataclass(frozen=True)
class Uptrained:
    """The result of a run: its record in ``kvfold.json`` and the rows of its log; empty but on the first process."""

    record: Mapping[str, Any]
    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        steps = self.record.get("request", {}).get("steps", 0)
        return f"Uptrained({steps} steps, {len(self.rows)} rows of the log)"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the record and the rows of the log."""
        return {**self.record, "log": self.rows}


@takes(UptrainRequest)
def uptrain_checkpoint(request: UptrainRequest) -> Uptrained:
    """Train ``request.model`` further and write it to ``request.out``; every process of a distributed run calls this.

    Raises InputError when the request, a checkpoint or a text is wrong: nothing is written then.

    >>> (folder / "words.txt").write_text("The list of all items is sorted in place. " * 40)
    1680
    >>> sizes = {"steps": 1, "batch_tokens": 32, "seq_len": 32, "eval_every": 0, "device": "cpu", "quiet": True}
    >>> request = UptrainRequest(demo_folder(), folder / "trained", folder / "words.txt", **sizes)
    >>> uptrain_checkpoint(request)
    Uptrained(1 steps, 1 rows of the log)
    """
    if find_spec("accelerate") is None:
        raise InputError("uptraining needs accelerate, which is not installed: pip install 'kvfold[train]'")
    source, locks = open_checkpoint(request.model), ExitStack()
    try:
        if source.made_of:
            raise InputError(
                f"{source.origin}: expected plain weights to train, found {source.made_of[0]}; convert it first, "
                f"without {opt('keep_quantized', True)}"
            )
        if (inner := text_type(source.config)) is not None:
            raise InputError(
                f"{source.origin}: expected a plain language model to train, found a {source.config['model_type']} "
                f"that wraps one ({inner}); train it with a trainer for multimodal models"
            )
        check_output(request.out, overwrite=request.overwrite, model=source.folder)
        request.work.parent.mkdir(parents=True, exist_ok=True)
        # No second run may write to the same folder meanwhile.
        if started_first():
            locks.enter_context(output_lock(request.work.absolute()))
        side_files = read_side_files(source)
        config = load_config(source, request.trust_remote_code)
        positions = getattr(config, "max_position_embeddings", None)
        check_seq_len(request.seq_len, positions or request.seq_len, source.origin)
        plan = _token_plan(request, source, config.vocab_size)
        return _train(request, source, side_files, config.hidden_size, plan)
    finally:
        locks.close()
        source.close()


def _train(
    request: UptrainRequest, source: Checkpoint, side_files: SideFiles, width: int, plan: TokenPlan
) -> Uptrained:
    from kvfold.convert.uptrain.trainer import Uptrainer, check_sharding, load_teacher, prepare_model

    checkpoint = last_checkpoint(request)
    arguments = training_arguments(request, width, checkpoint is not None)
    hide_bars(request.quiet)
    teacher = None if request.teacher is None else load_teacher(request, source, arguments.device)
    model = load_model(source, torch.float32, request.trust_remote_code)
    held = prepare_model(model, source, request)
    tokens = prepare(request, checkpoint, plan, arguments)
    order = TrainingOrder(tokens.training, plan.training, plan.seed)
    trainer = Uptrainer(model, arguments, request, order, tokens.held_out.long(), teacher, held)
    check_sharding(trainer)
    trainer.run(checkpoint)
    state = trainer.full_state()

    def write() -> Uptrained:
        if held:
            check_constant(state, source)
        return _write(request, source, side_files, trainer, state, plan)

    return run_on_first(write) or Uptrained({}, [])


def _write(
    request: UptrainRequest,
    source: Checkpoint,
    side_files: SideFiles,
    trainer: Any,
    state: dict[str, Tensor],
    plan: TokenPlan,
) -> Uptrained:
    rows = read_log(request.work / LOG)
    options = request.result_options()
    for name in options.keys() & {"model", "text", "eval_text", "teacher"}:
        # Files and folders are recorded by their names alone.
        if Path(options[name]).exists():
            options[name] = portable_name(Path(options[name]).resolve())
    record: dict[str, Any] = {"request": options, "text": plan.text.name, "teacher": options.get("teacher")}
    measured = [row for row in rows if "eval_loss" in row]
    if measured:
        ends = [{name: value for name, value in measured[i].items() if name.startswith("eval_")} for i in (0, -1)]
        counts = {"sequences": plan.held_out, "length": plan.length}
        record["held_out"] = {**counts, "before": ends[0], "after": ends[1]}
    write_trained(request, source, side_files, trainer.accelerator.unwrap_model(trainer.model), state, record)
    plot = request.plot or (str(request.work / "curve.png") if find_spec("matplotlib") else None)
    if plot is not None:
        title = f"{source.origin}: {request.steps} steps of {request.batch_tokens} tokens"
        uptraining_curve(rows).save(plot, title)
    finish(request)
    return Uptrained(record, rows)


def _token_plan(request: UptrainRequest, source: Checkpoint, vocabulary: int) -> TokenPlan:
    tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")

    def corpus(spec: str, option: str) -> Corpus:
        return open_corpus(spec, partial(render, tokenizer), request.seed, option=option)

    text, eval_text = corpus(request.text, "text"), None
    if request.eval_text is not None and request.eval_every:
        eval_text = corpus(request.eval_text, "eval_text")
        paths = [Path(request.text), Path(request.eval_text)]
        same = all(path.exists() for path in paths) and paths[0].samefile(paths[1])
        if same or request.text == request.eval_text:
            raise InputError(
                f"{opt('eval_text')}: expected another text than {opt('text')}; without it some of {opt('text')} is "
                "held out"
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


def summary(request: UptrainRequest, done: Uptrained) -> str:
    """The result for users, on one to three lines."""
    drift = done.record.get("held_out")
    tokens = request.steps * request.batch_tokens
    lines = [f"wrote {request.out}: {request.steps} steps, {tokens} tokens; log and curve in {request.work}"]
    if drift:
        name = "eval_excess" if "eval_excess" in drift["after"] else "eval_loss"
        what = "excess loss over the teacher's" if name == "eval_excess" else "loss"
        lines.append(f"held-out {what}: {drift['before'][name]:.4f} -> {drift['after'][name]:.4f} nats per token")
        # Distillation lowers the KL; the loss of few sequences says less.
        if "eval_kl" in drift["after"]:
            both = (drift[when]["eval_kl"] for when in ("before", "after"))
            lines.append("held-out KL from the teacher: {:.4f} -> {:.4f} nats per token".format(*both))
    return "\n".join(lines)
