"""A run of uptraining, put together: checkpoint, text, teacher, trainer, and what is written at the end."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvfold.convert.device import choose_device
from kvfold.convert.errors import InputError
from kvfold.convert.io.atomic import check_output
from kvfold.convert.io.checkpoint import Checkpoint, open_checkpoint
from kvfold.convert.text.tokenizer import load_tokenizer, renderer
from kvfold.convert.text.windows import check_seq_len
from kvfold.convert.uptrain.constant import check_constant
from kvfold.convert.uptrain.data import PackedText, Place, held_out, share_of
from kvfold.convert.uptrain.models import check_sharding, load_model, load_teacher, prepare_model
from kvfold.convert.uptrain.plot import draw_curve, read_log
from kvfold.convert.uptrain.rates import usual_rate
from kvfold.convert.uptrain.request import UptrainRequest, changed
from kvfold.convert.uptrain.text import TrainingText, open_text
from kvfold.convert.uptrain.write import write_trained

_REQUEST = "request.json"
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Uptrained:
    """What a run did: what was recorded, and the log's rows."""

    record: Mapping[str, Any]
    rows: list[dict[str, Any]]


def uptrain(request: UptrainRequest) -> Uptrained:
    """Train ``request.model`` further and write it to ``request.out``; every process of a distributed run calls this.

    Raises InputError when the request, a checkpoint or a text is wrong: nothing is written then.
    """
    if find_spec("accelerate") is None:
        raise InputError("uptraining needs accelerate, which is not installed: pip install 'kvfold[train]'")
    source = open_checkpoint(request.model)
    try:
        check_output(request.out, overwrite=request.overwrite, model=source.folder)
        check_seq_len(request.seq_len, source.config.get("max_position_embeddings") or request.seq_len, source.origin)
        tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
        text, aside = _texts(request, tokenizer)
        return _train(request, source, tokenizer, text, aside)
    finally:
        source.close()


def _train(
    request: UptrainRequest, source: Checkpoint, tokenizer: Any, text: TrainingText, aside: Tensor | None
) -> Uptrained:
    from kvfold.convert.uptrain.trainer import Journal, Uptrainer, say

    device, precision = choose_device(request.device), _precision(request)
    arguments = _arguments(request, device, precision)
    first = arguments.process_index == 0
    _hide_bars(request)
    share = share_of(request.sequences, request.micro_batch, arguments.process_index, arguments.world_size)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = share.micro, share.accumulation
    teacher = None if request.teacher is None else load_teacher(request, source, arguments.device, precision)
    model = load_model(request.model, source, torch.float32, request)
    arguments.learning_rate = request.lr or usual_rate(model.config.hidden_size)
    channel = prepare_model(model, source, request)
    place, checkpoint = _begin(request, arguments.distributed_state)
    vocabulary = source.config.get("vocab_size")
    stream = PackedText(text, tokenizer, request.seq_len, request.seed, share, place, vocabulary)
    arguments.eval_on_start = aside is not None and checkpoint is None
    trainer = Uptrainer(model, arguments, request, stream, aside, teacher, channel)
    check_sharding(trainer)
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Journal(request, stream, (lambda _: None) if request.quiet else say))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.full_state()
    if first:
        if channel is not None:
            check_constant(state, source)
        done = _finish(request, source, trainer, state, text, aside)
    if dist.is_initialized():
        dist.barrier()
    return done if first else Uptrained({}, [])


def _finish(
    request: UptrainRequest, source: Checkpoint, trainer: Any, state: dict[str, Tensor], text: TrainingText, aside: Any
) -> Uptrained:
    rows = read_log(request.work / "log.jsonl")
    measured = [row for row in rows if "eval_loss" in row]
    found: dict[str, Any] = {"request": _portable(request), "text": text.name, "teacher": _origin(request.teacher)}
    if aside is not None and measured:
        ends = [{name: value for name, value in measured[i].items() if name.startswith("eval_")} for i in (0, -1)]
        counts = {"sequences": len(aside), "length": aside.shape[1]}
        found["held_out"] = {**counts, "before": ends[0], "after": ends[1]}
    write_trained(request, source, trainer.accelerator.unwrap_model(trainer.model), state, found)
    plot = request.plot or (str(request.work / "curve.png") if find_spec("matplotlib") else None)
    if plot is not None:
        draw_curve(rows, plot, f"{source.origin}: {request.steps} steps of {request.batch_tokens} tokens")
    for path in request.work.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    return Uptrained(found, rows)


def _portable(request: UptrainRequest) -> dict[str, Any]:
    """The request for ``kvfold.json``: files and folders by their names alone."""
    paths = ("model", "text", "eval_text", "teacher")
    found = request.result_options()
    return {name: _origin(value) if name in paths else value for name, value in found.items()}


def _origin(path: str | None) -> str | None:
    return Path(path).resolve().name if path is not None and Path(path).exists() else path


def _texts(request: UptrainRequest, tokenizer: Any) -> tuple[TrainingText, Tensor | None]:
    """What to train on, and the sequences to evaluate on, from another text or kept aside."""
    render = renderer(tokenizer)
    text = open_text(request.text, render, request.seed)
    if not request.eval_every:
        return text, None
    if request.eval_text is None:
        aside, rest = held_out(text, tokenizer, request.seq_len, request.eval_sequences)
        return rest, aside
    other = open_text(request.eval_text, render, request.seed, "--eval-text")
    if _same_text(request.text, request.eval_text):
        raise InputError("--eval-text: expected another text than --text; without it some of --text is kept aside")
    return text, held_out(other, tokenizer, request.seq_len, request.eval_sequences, whole=True)[0]


def _same_text(one: str, other: str) -> bool:
    return one == other or (Path(one).exists() and Path(other).exists() and Path(one).samefile(other))


def _precision(request: UptrainRequest) -> torch.dtype:
    device = choose_device(request.device)
    if request.precision == "float16" and device.type == "cpu":
        raise InputError("--precision float16: trains on a GPU only, found none in use; use bfloat16 or float32")
    if request.precision != "auto":
        return _PRECISIONS[request.precision]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _arguments(request: UptrainRequest, device: torch.device, precision: torch.dtype) -> Any:
    from transformers import TrainingArguments

    evaluated, saved = bool(request.eval_every), bool(request.save_every)
    return TrainingArguments(
        output_dir=str(request.work),
        max_steps=request.steps,
        lr_scheduler_type=request.schedule if request.schedule != "constant" else "constant_with_warmup",
        warmup_steps=int(request.warmup * request.steps),
        weight_decay=request.weight_decay,
        max_grad_norm=request.clip,
        adam_beta2=0.95,
        optim="adamw_torch",
        seed=request.seed,
        bf16=precision == torch.bfloat16,
        fp16=precision == torch.float16,
        use_cpu=device.type == "cpu",
        ddp_backend="gloo" if device.type == "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1 else None,
        ddp_find_unused_parameters=False,
        logging_steps=request.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=request.eval_every if evaluated else None,
        save_strategy="steps" if saved else "no",
        save_steps=request.save_every if saved else 500,
        save_total_limit=2,
        ignore_data_skip=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )


def _begin(request: UptrainRequest, state: Any) -> tuple[Place, Path | None]:
    """The place in the text to start from, and the checkpoint of a killed run; its later log is cut off."""
    from kvfold.convert.uptrain.trainer import PLACE

    work, last = request.work, _last_checkpoint(request)
    place = Place() if last is None else Place(**json.loads((last / PLACE).read_text(encoding="utf-8")))
    state.wait_for_everyone()  # all processes have looked
    if state.is_main_process and last is not None:
        _cut_log(work / "log.jsonl", _step(last))
    elif state.is_main_process:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        part = work / f"{_REQUEST}.part"
        part.write_text(json.dumps(request.result_options(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, work / _REQUEST)
    state.wait_for_everyone()
    return place, last


def _last_checkpoint(request: UptrainRequest) -> Path | None:
    """The newest whole checkpoint to go on from, if any. InputError when options have changed, or nobody asked to."""
    from kvfold.convert.uptrain.trainer import PLACE

    work = request.work
    if work.exists() and not (work.is_dir() and (not any(work.iterdir()) or any(work.glob(f"{_REQUEST}*")))):
        raise InputError(f"{work}: the run would write its log there, found something else; name another OUT")
    if request.resume and (work / _REQUEST).is_file():
        different = changed(json.loads((work / _REQUEST).read_text(encoding="utf-8")), request)
        if different is not None:
            raise InputError(f"--resume {work}: {different}; give the same options, or --overwrite to start anew")
        return max((path.parent for path in work.glob(f"checkpoint-*/{PLACE}")), key=_step, default=None)
    if not request.overwrite and any(work.glob("checkpoint-*")):
        raise InputError(f"{work}: found checkpoints of a killed run; continue it with --resume, or use --overwrite")
    return None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def _cut_log(path: Path, step: int) -> None:
    kept = [row for row in read_log(path) if row["step"] <= step] if path.is_file() else []
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def summary(request: UptrainRequest, done: Uptrained) -> str:
    """What to tell a person at the end."""
    drift = done.record.get("held_out")
    tokens = request.steps * request.batch_tokens
    lines = [f"wrote {request.out}: {request.steps} steps, {tokens} tokens; log and curve in {request.work}"]
    if drift:
        name = "eval_excess" if "eval_excess" in drift["after"] else "eval_loss"
        what = "excess loss over the teacher's" if name == "eval_excess" else "loss"
        lines.append(f"held-out {what}: {drift['before'][name]:.4f} -> {drift['after'][name]:.4f} nats per token")
    return "\n".join(lines)


def _hide_bars(request: UptrainRequest) -> None:
    """transformers' own bars only where a person watches."""
    if request.quiet or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
