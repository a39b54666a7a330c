"""The subclass of ``transformers.Trainer`` for uptraining: arguments, models, losses, held-out
drift and the log.

Steps are relative to each tensor's size as in polishing (`scale_steps`), but not to its rows and
columns.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from kvfold.attention.drift.recording import attention_name
from kvfold.attention.drift.report import perplexity
from kvfold.attention.drift.streams import layer_list
from kvfold.convert.checkpoint.files import replacing
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, training_autocast
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.processes import launched_as_rank0
from kvfold.convert.progress import Stages
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import attend_in_blocks
from kvfold.convert.targets.mla.encode import ConstantSlice
from kvfold.convert.text.tokenizer import check_teacher, load_tokenizer
from kvfold.convert.training.budget import batch_size
from kvfold.convert.training.fit import BETAS, distillation_loss, next_token_loss
from kvfold.convert.training.steps import (
    has_constant,
    hold_constant,
    scale_gradients,
    scale_steps,
    tensor_sizes,
)
from kvfold.convert.uptrain.request import WARMUP_STEPS, UptrainRequest
from kvfold.convert.uptrain.work import BEST, LogRow, TrainingOrder, mark_complete

# A sixteenth of refinement's: all layers move at once, and the steps of all inputs add up. KL after
# 40 steps, MLA 24+8 of the model that ships: 0.0125 0.231, 0.05 0.165, 0.2 0.172 nats
# (bench_refine_constants.py --uptrain, 2026-11-22)
_AT_WIDTH_ONE = 0.05
# Tokens per step from which on the rate no longer grows: the default of ``--batch-tokens``.
_FULL_BATCH = 65536
# Sequences per GPU at a time. Chosen, not tuned.
_GPU_SEQUENCES = 4
_LOSS_NAMES = {"loss": "loss", "learning_rate": "lr", "eval_loss": "held-out loss"}
_LOSS_NAMES |= {"eval_perplexity": "perplexity", "eval_kl": "KL", "eval_excess": "excess"}


def training_arguments(
    request: UptrainRequest, width: int, precision: torch.dtype, resumed: bool
) -> TrainingArguments:
    """The trainer's arguments for hidden size ``width``; in distributed runs, also creates the
    process group.

    Raises InputError if the device or the number of processes cannot be used.
    """
    device = choose_device(request.device)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # A single process uses all GPUs that it sees: transformers divides each of its batches among
    # them.
    replicas = torch.cuda.device_count() if processes == 1 and device.type == "cuda" else processes
    # On a CPU a thousand tokens keep the products busy, and more take memory: SmolLM2-135M with its
    # teacher 5.5 GB for 1 x 1024 tokens, 7.9 GB for 2 (peaks of `kvfold uptrain --steps 1`,
    # 2026-11-26).
    most = request.micro_batch or (
        batch_size(request.seq_len) if device.type == "cpu" else _GPU_SEQUENCES
    )
    micro, accumulation = divide_batch(request.sequences, most, replicas)
    # More steps than a short run has: it ends on the way to the peak.
    warmup = (
        max(WARMUP_STEPS, request.steps // 20)
        if request.warmup is None
        else int(request.warmup * request.steps)
    )
    evaluated = bool(request.eval_every)
    saved = bool(request.save_every)
    return TrainingArguments(
        output_dir=str(request.work),
        max_steps=request.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=most,
        gradient_accumulation_steps=accumulation,
        learning_rate=request.relative_lr or default_rate(width, request.batch_tokens),
        lr_scheduler_type=(
            request.schedule if request.schedule != "constant" else "constant_with_warmup"
        ),
        warmup_steps=warmup,
        weight_decay=request.weight_decay,
        max_grad_norm=request.clip,
        adam_beta2=BETAS[1],
        optim="adamw_torch",
        seed=request.seed,
        bf16=precision == torch.bfloat16,
        fp16=precision == torch.float16,
        use_cpu=device.type == "cpu",
        ddp_backend="gloo" if device.type == "cpu" and processes > 1 else None,
        ddp_find_unused_parameters=False,
        logging_steps=request.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=request.eval_every if evaluated else None,
        eval_on_start=evaluated and not resumed,
        save_strategy="steps" if saved else "no",
        save_steps=request.save_every if saved else 500,
        save_total_limit=2,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )


def default_rate(width: int, batch_tokens: int) -> float:
    """The peak learning rate for hidden size ``width``, relative to each tensor's size."""
    # The noise of Adam's steps falls with the root of the batch; above the largest the rate is
    # limited by curvature.
    return _AT_WIDTH_ONE / math.sqrt(width) * min(1.0, math.sqrt(batch_tokens / _FULL_BATCH))


def divide_batch(sequences: int, micro_batch: int, replicas: int) -> tuple[int, int]:
    """Split a global batch of ``sequences``; returns the micro-batch size per replica and the
    accumulation steps.

    The micro-batch size is at most ``micro_batch``. Raises InputError if ``replicas`` does not
    divide ``sequences``.
    """
    if sequences % replicas:
        raise InputError(
            f"--batch-tokens: {sequences} sequences per step cannot be divided evenly among"
            f" {replicas} processes or GPUs; use a multiple of {replicas} x --seq-len"
        )
    each = sequences // replicas
    micro = max(n for n in range(1, min(micro_batch, each) + 1) if each % n == 0)
    return micro, each // micro


def forward_dtype(request: UptrainRequest, source: Checkpoint) -> torch.dtype:
    """The dtype of forward passes; ``auto`` is bfloat16 if supported on GPUs, else float16, and on
    CPUs if it pays.

    Raises InputError if the device cannot compute in the requested one.
    """
    device = choose_device(request.device)
    if request.precision == "float16" and device.type == "cpu":
        raise option_error(
            "precision", "float16", "requires a GPU; on a CPU, use bfloat16 or float32"
        )
    if request.precision != "auto":
        precision: torch.dtype = getattr(torch, request.precision)
        return precision
    if device.type == "cpu":
        return training_autocast(source, device) or torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def prepare_model(
    model: Any, source: Checkpoint, request: UptrainRequest
) -> dict[str, ConstantSlice]:
    """Freeze the parameters that are not trained; returns the constant channel's slices by name, if
    there are any.
    """
    model.config.use_cache = False
    attend_in_blocks(model, choose_device(request.device))
    if request.gradient_checkpointing:
        # The first name is that of transformers 6.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    if request.train == "attention":
        inside = f".{attention_name(layer_list(model)[1][0])}."
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(inside in name)
    return hold_constant(dict(model.named_parameters())) if has_constant(source) else {}


def load_teacher(
    name: str,
    request: UptrainRequest,
    source: Checkpoint,
    precision: torch.dtype,
    device: torch.device,
) -> Any:
    """Load the model to distill from: frozen, in the training's compute dtype, and unsharded on
    every device.
    """
    from accelerate.utils import patch_environment

    with closing(open_checkpoint(name)) as opened:
        tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
        check_teacher(opened, source, tokenizer, request.trust_remote_code)
        # Under FSDP transformers loads weights on the first process only; a teacher is not sharded.
        with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            teacher = load_model(opened, precision, request.trust_remote_code)
    return teacher.to(device).eval().requires_grad_(False)


class Uptrainer(Trainer):  # type: ignore[misc]
    """A trainer for the sequences in ``order``, with distillation from ``teacher`` unless it is
    None.

    The teacher must be frozen and on the same device. Drift is measured on ``held_out [M, T]`` if M
    is not 0. ``held`` are the slices of the constant channel.
    """

    # Every micro-batch's loss is a mean over equally many tokens.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        request: UptrainRequest,
        order: TrainingOrder,
        held_out: Tensor,
        teacher: Any,
        held: Mapping[str, ConstantSlice],
    ) -> None:
        self.run_log = log = RunLog(request)
        sequences = [{"input_ids": tokens} for tokens in held_out]
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=order,
            eval_dataset=sequences,
            callbacks=[log],
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False
        self._request = request
        self._teacher = teacher
        self._held = held
        sizes = [tensor_sizes(dict(model.named_parameters()), held)]
        # A sharded model may have been loaded by the first process only.
        if dist.is_initialized():
            dist.broadcast_object_list(sizes, src=0)
        self._sizes = sizes[0]
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
            raise InputError(
                "FSDP version 1 flattens weights, but uptraining needs separate tensors for their"
                " learning rates and the constant channel; set fsdp_version: 2, as in"
                " convert/data/fsdp.yaml"
            )

    def run(self, checkpoint: Path | None) -> dict[str, Tensor]:
        """Train from ``checkpoint`` or from the start; returns the whole tensors on the CPU, on the
        first process.

        They are those of the evaluation with the lowest error, which may be the one before
        training.
        """
        with self.run_log.open:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        *earlier, last = self._errors() or [0.0]
        if last < min(earlier, default=math.inf):
            return self._state()
        saved: dict[str, Tensor] = (
            torch.load(self._request.work / BEST, weights_only=True) if launched_as_rank0() else {}
        )
        return saved

    def _state(self) -> dict[str, Tensor]:
        state = self.accelerator.get_state_dict(
            self.model_wrapped if self.is_fsdp_enabled else self.model
        )
        return {name: value.detach().cpu() for name, value in (state or {}).items()}

    def _errors(self) -> list[float]:
        """The errors of all evaluations so far, in order."""
        return [
            row.error for row in self.run_log.rows(self.state.log_history) if row.error is not None
        ]

    def _keep_best(self) -> None:
        """Save the weights if all evaluations so far had larger errors; the last step's weights
        stay in memory.
        """
        *earlier, last = self._errors()
        if last < min(earlier, default=math.inf) and self.state.global_step < self.state.max_steps:
            state = self._state()
            if launched_as_rank0():
                with replacing(self._request.work / BEST) as new:
                    torch.save(state, new)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        """A sequential sampler, as ``order`` is already shuffled (no argument selects it before
        transformers 5.2).
        """
        return SequentialSampler(self.train_dataset)

    def create_optimizer(self, *arguments: Any) -> Any:
        if self.optimizer is None:
            made = super().create_optimizer(*arguments)
            scale_steps(made, lambda: dict(self.model.named_parameters()), self._sizes, self._held)
        return self.optimizer

    def _get_learning_rate(self) -> float:
        """The learning rate for the log, before it is multiplied by a tensor's size."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["size"])

    def training_step(self, *arguments: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments)
        # The gradients of all micro-batches are there: what comes next is clipping.
        if self.accelerator.sync_gradients:
            scale_gradients(dict(self.model.named_parameters()), self._held)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        tokens = inputs["input_ids"]
        weight = self._request.distilled
        logits = model(input_ids=tokens, use_cache=False).logits
        loss: Tensor = logits.new_zeros((), dtype=torch.float32)
        if weight < 1:
            loss = loss + (1 - weight) * next_token_loss(logits, tokens)
        if weight > 0:
            with torch.no_grad():
                teacher = teacher_logits(self._teacher, tokens, logits.shape[-1])
            loss = loss + weight * distillation_loss(logits, teacher, self._request.temperature)
        return loss

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Loss and perplexity on held-out text; with a teacher, also the KL from it and the excess
        loss over it.
        """
        self.model.eval()
        batches = self.get_eval_dataloader()
        found = []
        with self.run_log.stages("evaluate", len(batches), "batch") as advance:
            for inputs in batches:
                tokens = inputs["input_ids"]
                logits = self.model(input_ids=tokens, use_cache=False).logits.split(1)
                losses = [
                    [next_token_loss(*each) for each in zip(logits, tokens.split(1), strict=True)]
                ]
                if self._teacher is not None:
                    teacher = teacher_logits(self._teacher, tokens, logits[0].shape[-1]).split(1)
                    losses.append(
                        [
                            distillation_loss(*each, 1.0)
                            for each in zip(logits, teacher, strict=True)
                        ]
                    )
                    losses.append(
                        [
                            next_token_loss(*each)
                            for each in zip(teacher, tokens.split(1), strict=True)
                        ]
                    )
                # Of the sequences of all processes, without those that only fill up their last
                # batch. On the CPU, so that progress tells the time of a batch.
                by_sequence = torch.stack([torch.stack(each) for each in losses], dim=1)
                found.append(self.accelerator.gather_for_metrics(by_sequence).cpu())
                advance(1)
        loss, *others = torch.cat(found).double().mean(0).tolist()
        metrics = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
        if others:
            metrics |= {"eval_kl": others[0], "eval_excess": loss - others[1]}
        # The log adds the epoch to what it is given.
        self.log(dict(metrics))
        self._keep_best()
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def teacher_logits(teacher: Any, tokens: Tensor, vocabulary: int) -> Any:
    """The ``teacher``'s logits for the student's ``vocabulary``; a larger sibling may pad its own
    further.
    """
    return teacher(input_ids=tokens, use_cache=False).logits[..., :vocabulary]


class RunLog(TrainerCallback):  # type: ignore[misc]
    """A callback that writes ``log.jsonl``, prints progress and log rows to stderr, and marks
    checkpoints complete.

    The caller must close ``open``, the stack with the progress bar, even if training fails.
    """

    def __init__(self, request: UptrainRequest) -> None:
        self._request, self.open = request, ExitStack()
        self.stages = Stages(quiet=request.quiet or not launched_as_rank0())
        self._advance: Callable[[int], None] | None = None

    def rows(self, history: list[dict[str, Any]]) -> list[LogRow]:
        """Convert the trainer's log ``history`` to the rows of our log."""
        names = [field.name for field in fields(LogRow)]
        rows = []
        for logged in history:
            # The last has figures of the whole run.
            if "train_runtime" not in logged:
                figures = {name: value for name, value in logged.items() if name in names}
                rows.append(LogRow(tokens=logged["step"] * self._request.batch_tokens, **figures))
        return rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A resumed run has the rows up to its checkpoint, and writes those after it again.
        if state.is_world_process_zero:
            rows = self.rows(state.log_history)
            (self._request.work / "log.jsonl").write_text(
                "".join(json.dumps(row.to_dict()) + "\n" for row in rows)
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Not before: the measurement ahead of the first step would count as a part of it.
        if self._advance is None:
            stage = self.stages("train", self._request.steps, "step", state.global_step)
            self._advance = self.open.enter_context(stage)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._advance is not None:
            self._advance(1)
        if state.global_step >= state.max_steps:
            # What fails after the last step must not cost the training.
            control.should_save = bool(self._request.save_every)
            control.should_evaluate = bool(self._request.eval_every)
            control.should_log = True
        if control.should_save:
            # A resumed run then averages losses over the same steps.
            control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for row in map(LogRow.to_dict, self.rows(state.log_history[-1:])):
            if not all(
                math.isfinite(value) for name, value in row.items() if name.endswith("loss")
            ):
                advice = "lower --relative-lr or raise --warmup"
                if state.global_step <= 1:
                    advice += "; if that does not help, the model is damaged: use another copy"
                raise InputError(f"step {state.global_step}: the loss is NaN or infinite; {advice}")
            if state.is_world_process_zero:
                with (self._request.work / "log.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                if not self._request.quiet:
                    shown = ", ".join(
                        f"{_LOSS_NAMES[name]} {row[name]:.4g}"
                        for name in row
                        if name in _LOSS_NAMES
                    )
                    tqdm.write(
                        f"step {row['step']}/{self._request.steps}: {shown}", file=sys.stderr
                    )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.is_initialized():
            # Each process writes its random state before the checkpoint is complete.
            dist.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")
