"""The subclass of ``transformers.Trainer`` for uptraining: its arguments, the loss, the relative
step sizes and the best weights on held-out text.

Steps are relative to each tensor's size as in polishing (`scale_adam_steps`), but not to its rows
and columns.
"""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import patch_environment
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from kvfold.attention.drift.compare import (
    PredictionFigures,
    measure_prediction_drift,
    split_logits,
)
from kvfold.convert.checkpoint.atomic import replace_file
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device
from kvfold.convert.errors import InputError, KvfoldError, summarize_error
from kvfold.convert.processes import LONGEST_WORK, count_launched, launched_as_rank0
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import ModelHead, use_blockwise_attention
from kvfold.convert.text.tokenizer import check_teacher_tokenizer
from kvfold.convert.training.budget import choose_batch_size
from kvfold.convert.training.loop import BETAS, sum_loss
from kvfold.convert.training.steps import (
    freeze_constant_channel,
    has_constant_channel,
    measure_tensor_rms,
    scale_adam_steps,
    scale_gradients,
)
from kvfold.convert.uptrain.uptrain_request import FULL_BATCH, UptrainRequest

# A sixteenth of refinement's: all layers move at once, and the steps of all inputs add up. KL after
# 40 steps, MLA 24+8 of the model that ships: 0.0125 0.231, 0.05 0.165, 0.2 0.172 nats (by a script
# in git history, 2026-11-22)
_AT_WIDTH_ONE = 0.05
# Steps, or a twentieth of the run if that is more. Adam's first steps are of full size whatever the
# gradient is. Without warmup 3 steps of 16,384 tokens took SmolLM2-135M, MLA 128+64 as fitted, from
# KL 0.158 to 0.175 (recipes/real_models.py, 2026-11-26).
_WARMUP = 10
# Sequences per GPU at a time. Chosen, not tuned.
_GPU_SEQUENCES = 4
# The weights of the best evaluation so far, in ``OUT.training``.
_BEST = "best.pt"


def make_training_arguments(
    request: UptrainRequest, width: int, precision: torch.dtype
) -> TrainingArguments:
    """Return the arguments of transformers' Trainer for hidden size ``width``; in distributed runs,
    also create the process group.

    Raises InputError if the device or the number of processes cannot be used.
    """
    device = choose_device(request.device)
    replicas = count_launched()
    share, rest = divmod(request.sequences_per_step, replicas)
    if rest:
        raise InputError(
            f"--batch-tokens: {request.sequences_per_step} sequences per step cannot be divided"
            f" evenly among {replicas} processes; use a multiple of {replicas} x --seq-len"
        )
    # On a CPU a thousand tokens keep the products busy, and more take memory: SmolLM2-135M with its
    # teacher 5.5 GB for 1 x 1024 tokens, 7.9 GB for 2 (peaks of `kvfold uptrain --steps 1`,
    # 2026-11-26).
    limit = choose_batch_size(request.seq_len) if device.type == "cpu" else _GPU_SEQUENCES
    limit = min(share, request.micro_batch or limit)
    micro_batch = max(size for size in range(1, limit + 1) if share % size == 0)
    # The noise of Adam's steps falls with the root of the batch; above the largest the rate is
    # limited by curvature.
    batch = min(1.0, request.sequences_per_step * request.seq_len / FULL_BATCH)
    rate = _AT_WIDTH_ONE / math.sqrt(width) * math.sqrt(batch)
    arguments = TrainingArguments(
        output_dir=str(request.training_folder),
        max_steps=request.steps,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=choose_batch_size(request.seq_len),
        gradient_accumulation_steps=share // micro_batch,
        train_sampling_strategy="sequential",
        learning_rate=request.relative_lr or rate,
        lr_scheduler_type="cosine",
        # More steps than a short run has: it ends on the way to the peak.
        warmup_steps=max(_WARMUP, request.steps // 20),
        weight_decay=request.weight_decay,
        max_grad_norm=request.clip,
        adam_beta2=BETAS[1],
        optim="adamw_torch",
        seed=request.seed,
        bf16=precision == torch.bfloat16,
        use_cpu=device.type == "cpu",
        ddp_find_unused_parameters=False,
        ddp_timeout=int(LONGEST_WORK.total_seconds()),
        logging_steps=request.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if request.eval_every else "no",
        eval_steps=request.eval_every or None,
        save_strategy="steps" if request.save_every else "no",
        save_steps=request.save_every or 1,
        save_total_limit=2,
        disable_tqdm=True,
    )
    if arguments.n_gpu > 1:
        # Else transformers would divide each batch among copies of the model.
        arguments._n_gpu = 1
    return arguments


def load_teacher(request: UptrainRequest, source: Checkpoint, dtype: torch.dtype) -> Any:
    """Load the teacher to distill from: frozen, in ``dtype``, and unsharded. None if the request
    names no teacher.
    """
    if request.teacher is None:
        return None
    opened = open_checkpoint(request.teacher)
    check_teacher_tokenizer(opened, source, request.trust_remote_code)
    # Under FSDP transformers loads weights on the first process only; a teacher is not sharded.
    with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
        teacher = load_model(opened, dtype, request.trust_remote_code)
    return teacher.eval().requires_grad_(False)


class Uptrainer(Trainer):  # type: ignore[misc]
    """A transformers Trainer that trains the checkpoint ``source`` on the sequences ``tokens [n,
    T]`` in their order, and measures drift on ``held_out [m, T]``.
    """

    # Every micro-batch's loss is a mean over equally many tokens.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        request: UptrainRequest,
        source: Checkpoint,
        arguments: TrainingArguments,
        teacher: Any,
        tokens: Tensor,
        held_out: Tensor,
    ) -> None:
        self._best = request.training_folder / _BEST
        self._teacher_head = None if teacher is None else ModelHead(teacher.to(arguments.device))
        model = load_model(source, torch.float32, request.trust_remote_code)
        use_blockwise_attention(model, choose_device(request.device))
        if request.gradient_checkpointing:
            # The first name is that of transformers 6.
            enable = getattr(
                model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        self._head = ModelHead(model)
        # Not a bound method, which accelerate would bind to the model.
        model.forward = partial(self._forward)
        parameters = dict(model.named_parameters())
        self.constant = freeze_constant_channel(parameters) if has_constant_channel(source) else {}
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row} for row in tokens],
            eval_dataset=[{"input_ids": row} for row in held_out],
            callbacks=[PrintAndCheckLossCallback(request.quiet)],
        )
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if getattr(plugin, "fsdp_version", 2) != 2:
            raise InputError(
                "FSDP version 1 flattens weights, but uptraining needs separate tensors for their"
                " learning rates; set fsdp_version: 2, as in convert/data/fsdp.yaml"
            )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False
        sizes = [measure_tensor_rms(parameters, self.constant)]
        # A sharded model may have been loaded by the first process only.
        if dist.is_initialized():
            dist.broadcast_object_list(sizes, src=0)
        self._sizes = sizes[0]

    def train_and_gather_state(self, checkpoint: Path | None) -> dict[str, Tensor]:
        """Train from ``checkpoint`` or from the start; return the whole tensors by name on the CPU,
        on the first process.

        They are those of the evaluation with the lowest error, which may be the one before
        training.
        """
        try:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if not self.eval_dataset:
                return self._gather_state()
            if not launched_as_rank0():
                return {}
            return dict(torch.load(self._best, weights_only=True))
        except (KvfoldError, OSError):
            raise
        except Exception as error:  # whatever the readers of Trainer's files raise
            if checkpoint is None or self.state.global_step > int(checkpoint.name.split("-")[1]):
                raise
            raise InputError(
                f"{checkpoint} cannot be read ({summarize_error(error)}); remove it to continue"
                " from the previous checkpoint, or use --fresh to start over"
            ) from error

    def _gather_state(self) -> dict[str, Tensor]:
        """Return the model's whole tensors by name on the CPU, gathered from all shards; empty on
        other processes than the first.
        """
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        state = self.accelerator.get_state_dict(model)
        return {name: value.detach().cpu() for name, value in (state or {}).items()}

    def create_optimizer(self, *arguments: Any) -> Any:
        """Create Trainer's optimizer with steps relative to each tensor's size."""
        if self.optimizer is None:
            optimizer = super().create_optimizer(*arguments)
            parameters = dict(self.model.named_parameters())
            scale_adam_steps(optimizer, parameters, self._sizes, self.constant, {})
        return self.optimizer

    def _get_learning_rate(self) -> float:
        """Return the learning rate for the log, relative to the root mean square of a tensor's
        weights.
        """
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["size"])

    def training_step(self, *arguments: Any) -> Tensor:
        """Run one micro-batch, and scale the gradients of the constant channel once all of a step
        are there; returns the loss.
        """
        loss: Tensor = super().training_step(*arguments)
        # The gradients of all micro-batches are there: what comes next is clipping.
        if self.accelerator.sync_gradients:
            scale_gradients(dict(self.model.named_parameters()), self.constant)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Return the KL from the teacher, or the next-token loss without one, in nats per token."""
        tokens = inputs["input_ids"].long()
        loss: Tensor = model(input_ids=tokens, teacher_states=self._compute_teacher_states(tokens))
        return loss.div(tokens[:, 1:].numel())

    def _forward(self, input_ids: Tensor, teacher_states: Tensor | None) -> Tensor:
        """The forward pass of the trained model instead of its class's, which returns all logits:
        return the summed loss of ``input_ids [B, T]`` in training, and else the sums of
        `measure_prediction_drift` by sequence, ``[B, figures]`` in float64; without a teacher, the
        model is compared with itself.
        """
        # Autocast would keep 16-bit copies of all weights until the end of this pass.
        torch.set_autocast_cache_enabled(False)
        # The last position has no next token and does not count.
        states = self._head.compute_states(input_ids)[:, :-1]
        torch.set_autocast_cache_enabled(True)
        labels = input_ids[:, 1:]
        if self.model.training:
            target = labels if teacher_states is None else teacher_states
            weights = self._list_trained_head_weights()
            return sum_loss(self._head, states, target, self._teacher_head, weights)
        sums = states.new_zeros(len(states), len(PredictionFigures._fields), dtype=torch.float64)
        for block in split_logits(states, self._head.vocabulary, states.device):
            logits = self._head.compute_logits(states[block])
            expected = logits
            if self._teacher_head is not None and teacher_states is not None:
                expected = self._teacher_head.compute_logits(teacher_states[block])
                expected = expected[..., : logits.shape[-1]]
            drift = measure_prediction_drift(expected, logits, labels[block])
            sums[block[0]] += drift.sum(-1).T
        return sums

    def _list_trained_head_weights(self) -> list[Tensor]:
        """Return the model's parameters outside of its decoder, and tied ones, without frozen ones.
        Call this in each pass, because sharding replaces the parameters.
        """
        inside = set(self.model.get_decoder().modules())
        return [
            weight
            for module in self.model.modules()
            if module not in inside
            for weight in module.parameters(recurse=False)
            if weight.requires_grad
        ]

    @torch.no_grad()
    def _compute_teacher_states(self, tokens: Tensor) -> Tensor | None:
        """Return the teacher's states ``[B, T - 1, E]`` for ``tokens [B, T]``; None without a
        teacher.
        """
        if self._teacher_head is None:
            return None
        return self._teacher_head.compute_states(tokens)[:, :-1]

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the loss on held-out text and, with a teacher, the KL from it and the excess over
        its loss, in nats per token. Saves the weights if they are the best so far.
        """
        self.model.eval()
        rows = []
        for inputs in self.get_eval_dataloader():
            tokens = inputs["input_ids"].long()
            sums = self.model(input_ids=tokens, teacher_states=self._compute_teacher_states(tokens))
            # Of the sequences of all processes, without those that only fill up their last batch.
            rows.append(self.accelerator.gather_for_metrics(sums / tokens[0, 1:].numel()).cpu())
        figures = PredictionFigures(*torch.cat(rows).mean(0).tolist())
        metrics = {"eval_loss": figures.student_loss}
        if self._teacher_head is not None:
            metrics |= {"eval_kl": figures.kl, "eval_excess": figures.excess}
        errors = [get_held_out_error(row) for row in self.state.log_history if "eval_loss" in row]
        if get_held_out_error(metrics) < min(errors, default=math.inf):
            state = self._gather_state()
            if launched_as_rank0():
                with replace_file(self._best) as new:
                    torch.save(state, new)
        # The log adds the epoch to what it is given.
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def get_held_out_error(row: dict[str, float]) -> float:
    """Return the figure of a logged evaluation that the best weights minimize: the KL from the
    teacher, or the loss without a teacher.
    """
    return row.get("eval_kl", row["eval_loss"])


class PrintAndCheckLossCallback(TrainerCallback):  # type: ignore[misc]
    """Prints each row of Trainer's log to stderr, and ends a run whose loss is not finite."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet or not launched_as_rank0()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate after the last step, and write a log row before each checkpoint."""
        ends = state.global_step >= state.max_steps
        if ends:
            control.should_evaluate = args.eval_strategy != "no"
        # A run resumed from what is saved now averages losses over the same steps.
        control.should_log |= ends or control.should_save
        return control

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the newest log row. Raises InputError if its loss is NaN or infinite."""
        row = state.log_history[-1]
        if not math.isfinite(row.get("loss", 0.0) + row.get("eval_loss", 0.0)):
            raise InputError(
                f"step {state.global_step}: the loss is NaN or infinite; lower --relative-lr; if"
                " that does not help, the model is damaged: use another copy"
            )
        if not self._quiet and "train_runtime" not in row:
            figures = [f"{name} {row[name]:.4g}" for name in row if name not in ("epoch", "step")]
            print(f"step {row['step']}/{state.max_steps}: {', '.join(figures)}", file=sys.stderr)
