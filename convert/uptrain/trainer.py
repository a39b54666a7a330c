"""The subclass of ``transformers.Trainer`` for uptraining: its arguments, the losses, the relative
step sizes and the best weights on held-out text.

Steps are relative to each tensor's size as in polishing (`scale_steps`), but not to its rows and
columns.
"""

import math
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from kvfold.attention.drift.recording import attention_name
from kvfold.attention.drift.report import perplexity
from kvfold.attention.drift.streams import layer_list
from kvfold.convert.checkpoint.atomic import replacing
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, training_autocast
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.processes import launched_as_rank0
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import attend_in_blocks
from kvfold.convert.text.tokenizer import check_teacher, load_tokenizer
from kvfold.convert.training.budget import batch_size
from kvfold.convert.training.loop import BETAS, distillation_loss, next_token_loss
from kvfold.convert.training.steps import (
    has_constant,
    hold_constant,
    scale_gradients,
    scale_steps,
    tensor_sizes,
)
from kvfold.convert.uptrain.uptrain_request import WARMUP_STEPS, UptrainRequest

# A sixteenth of refinement's: all layers move at once, and the steps of all inputs add up. KL after
# 40 steps, MLA 24+8 of the model that ships: 0.0125 0.231, 0.05 0.165, 0.2 0.172 nats
# (bench_refine_constants.py --uptrain, 2026-11-22)
_AT_WIDTH_ONE = 0.05
# Tokens per step from which on the rate no longer grows: the default of ``--batch-tokens``.
_FULL_BATCH = 65536
# Sequences per GPU at a time. Chosen, not tuned.
_GPU_SEQUENCES = 4
# The weights of the best evaluation so far, in ``OUT.training``.
_BEST = "best.pt"


def training_arguments(
    request: UptrainRequest, width: int, precision: torch.dtype
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
    most = batch_size(request.seq_len) if device.type == "cpu" else _GPU_SEQUENCES
    most = request.micro_batch or most
    micro, accumulation = divide_batch(request.sequences, most, replicas)
    # More steps than a short run has: it ends on the way to the peak.
    warmup = max(WARMUP_STEPS, request.steps // 20)
    if request.warmup is not None:
        warmup = int(request.warmup * request.steps)
    # The noise of Adam's steps falls with the root of the batch; above the largest the rate is
    # limited by curvature.
    rate = (
        _AT_WIDTH_ONE / math.sqrt(width) * min(1.0, math.sqrt(request.batch_tokens / _FULL_BATCH))
    )
    constant = request.schedule == "constant"
    return TrainingArguments(
        output_dir=str(request.work),
        max_steps=request.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=most,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        learning_rate=request.relative_lr or rate,
        lr_scheduler_type="constant_with_warmup" if constant else request.schedule,
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
        eval_strategy="steps" if request.eval_every else "no",
        eval_steps=request.eval_every or None,
        save_strategy="steps" if request.save_every else "no",
        save_steps=request.save_every or 1,
        save_total_limit=2,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )


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
    share = sequences // replicas
    micro = max(n for n in range(1, min(micro_batch, share) + 1) if share % n == 0)
    return micro, share // micro


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


def load_student(request: UptrainRequest, source: Checkpoint) -> Any:
    """Load the model to train in float32, with the parameters that are not trained frozen."""
    model = load_model(source, torch.float32, request.trust_remote_code)
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
    return model


def load_teacher(request: UptrainRequest, source: Checkpoint, arguments: TrainingArguments) -> Any:
    """Load the model to distill from: frozen, in the training's compute dtype, and unsharded on
    every device. None without one.
    """
    from accelerate.utils import patch_environment

    if request.teacher is None:
        return None
    precision = forward_dtype(request, source)
    with closing(open_checkpoint(request.teacher)) as opened:
        tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
        check_teacher(opened, source, tokenizer, request.trust_remote_code)
        # Under FSDP transformers loads weights on the first process only; a teacher is not sharded.
        with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            teacher = load_model(opened, precision, request.trust_remote_code)
    return teacher.to(arguments.device).eval().requires_grad_(False)


class Uptrainer(Trainer):  # type: ignore[misc]
    """A trainer of the checkpoint ``source`` for the ``tokens``: ``train``, in their order, and
    ``held_out``, on which drift is measured unless it is empty.
    """

    # Every micro-batch's loss is a mean over equally many tokens.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        request: UptrainRequest,
        source: Checkpoint,
        arguments: TrainingArguments,
        tokens: dict[str, Tensor],
    ) -> None:
        self._request = request
        self._teacher = load_teacher(request, source, arguments)
        model = load_student(request, source)
        parameters = dict(model.named_parameters())
        self.constant = hold_constant(parameters) if has_constant(source) else {}
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row} for row in tokens["train"]],
            eval_dataset=[{"input_ids": row} for row in tokens["held_out"]],
            callbacks=[RunCallback(request)],
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False
        sizes = [tensor_sizes(parameters, self.constant)]
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
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if self._last_is_best():
            return self._state()
        if not launched_as_rank0():
            return {}
        state: dict[str, Tensor] = torch.load(self._request.work / _BEST, weights_only=True)
        return state

    def rows(self) -> list[dict[str, Any]]:
        """The rows logged so far, in order, without that of the whole run."""
        # Trainer sorts the keys of rows that it saves: a resumed run must write the same bytes.
        history = self.state.log_history
        return [dict(sorted(row.items())) for row in history if "train_runtime" not in row]

    def _last_is_best(self) -> bool:
        """True if all evaluations before the last had larger errors: the KL, or without a teacher
        the loss.
        """
        rows = [row for row in self.rows() if "eval_loss" in row]
        errors = [row.get("eval_kl", row["eval_loss"]) for row in rows]
        return not errors or errors[-1] < min(errors[:-1], default=math.inf)

    def _state(self) -> dict[str, Tensor]:
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        state = self.accelerator.get_state_dict(model)
        return {name: value.detach().cpu() for name, value in (state or {}).items()}

    def create_optimizer(self, *arguments: Any) -> Any:
        if self.optimizer is None:
            optimizer = super().create_optimizer(*arguments)
            parameters = dict(self.model.named_parameters())
            scale_steps(optimizer, parameters, self._sizes, self.constant)
        return self.optimizer

    def _get_learning_rate(self) -> float:
        """The learning rate for the log, before it is multiplied by a tensor's size."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["size"])

    def training_step(self, *arguments: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments)
        # The gradients of all micro-batches are there: what comes next is clipping.
        if self.accelerator.sync_gradients:
            scale_gradients(dict(self.model.named_parameters()), self.constant)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        tokens = inputs["input_ids"].long()
        weight = self._request.distilled
        logits = model(input_ids=tokens, use_cache=False).logits
        loss: Tensor = logits.new_zeros((), dtype=torch.float32)
        if weight < 1:
            loss = loss + (1 - weight) * next_token_loss(logits, tokens)
        if weight > 0:
            teacher = self._teacher_logits(tokens, logits.shape[-1])
            loss = loss + weight * distillation_loss(logits, teacher, self._request.temperature)
        return loss

    @torch.no_grad()
    def _teacher_logits(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """The teacher's logits for the student's ``vocabulary``; a larger sibling may pad its own
        further.
        """
        logits: Tensor = self._teacher(input_ids=tokens, use_cache=False).logits
        return logits[..., :vocabulary]

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Loss and perplexity on held-out text; with a teacher, also the KL from it and the excess
        loss over it. Saves the weights if they are the best so far.
        """
        self.model.eval()
        rows = []
        for inputs in self.get_eval_dataloader():
            tokens = inputs["input_ids"].long()
            logits = self.model(input_ids=tokens, use_cache=False).logits
            teacher = logits
            if self._teacher is not None:
                teacher = self._teacher_logits(tokens, logits.shape[-1])
            figures = [
                torch.stack(
                    [next_token_loss(s, t), next_token_loss(e, t), distillation_loss(s, e, 1.0)]
                )
                for s, e, t in zip(logits.split(1), teacher.split(1), tokens.split(1), strict=True)
            ]
            # Of the sequences of all processes, without those that only fill up their last batch.
            rows.append(self.accelerator.gather_for_metrics(torch.stack(figures)).cpu())
        loss, teacher_loss, kl = torch.cat(rows).double().mean(0).tolist()
        metrics = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
        if self._teacher is not None:
            metrics |= {"eval_kl": kl, "eval_excess": loss - teacher_loss}
        # The log adds the epoch to what it is given.
        self.log(dict(metrics))
        # The last step's weights stay in memory.
        if self._last_is_best() and self.state.global_step < self.state.max_steps:
            state = self._state()
            if launched_as_rank0():
                with replacing(self._request.work / _BEST) as new:
                    torch.save(state, new)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Shows the progress and the rows of the log on stderr, and ends a run whose loss is not
    finite.
    """

    def __init__(self, request: UptrainRequest) -> None:
        self._quiet = request.quiet or not launched_as_rank0()
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = {"total": state.max_steps, "initial": state.global_step}
        self._bar = tqdm(**steps, desc="training", unit="step", disable=self._quiet or None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._bar.update(1)
        if state.global_step >= state.max_steps:
            control.should_evaluate = args.eval_strategy != "no"
            control.should_log = True
        if control.should_save:
            # A resumed run then averages losses over the same steps.
            control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        row = state.log_history[-1]
        if not math.isfinite(row.get("loss", 0.0) + row.get("eval_loss", 0.0)):
            raise InputError(
                f"step {state.global_step}: the loss is NaN or infinite; lower --relative-lr or"
                " raise --warmup; if neither helps, the model is damaged: use another copy"
            )
        if not self._quiet and "train_runtime" not in row:
            shown = [f"{name} {row[name]:.4g}" for name in row if name not in ("epoch", "step")]
            line = f"step {row['step']}/{state.max_steps}: {', '.join(shown)}"
            tqdm.write(line, file=sys.stderr)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()
