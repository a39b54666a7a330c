"""``transformers.Trainer`` for uptraining: its models, its losses, drift on held-out text, and the log.

The steps are those of polishing (`scale_steps`), but for those relative to rows and columns.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from kvfold.attention.drift.frame import attention_name, layer_list
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, KvfoldError, opt
from kvfold.convert.processes import started_first
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stock import load_model
from kvfold.convert.targets.mla.tensors import HeldSlice
from kvfold.convert.training.fit import distillation_loss, next_token_loss
from kvfold.convert.training.steps import has_constant, hold_constant, scale_gradients, scale_steps, tensor_sizes
from kvfold.convert.uptrain.arguments import compute_dtype
from kvfold.convert.uptrain.data import TrainingOrder
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.resume import LOG, mark_complete


def prepare_model(model: Any, source: Checkpoint, request: UptrainRequest) -> dict[str, HeldSlice]:
    """Freeze the parameters that are not trained; returns the slices of the constant channel, where there is one."""
    model.config.use_cache = False
    if request.gradient_checkpointing:
        # The first name is that of transformers 6.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if request.train == "attention":
        inside = f".{attention_name(layer_list(model)[1][0])}."
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(inside in name)
    return hold_constant(dict(model.named_parameters())) if has_constant(source) else {}


def check_sharding(trainer: Any) -> None:
    """Raise InputError when sharding flattens the single tensors away."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise InputError(
            "FSDP version 1 flattens weights, but each tensor has its own learning rate and the constant channel of "
            "layout free is held; set fsdp_version: 2, as in recipes/fsdp.yaml"
        )


def load_teacher(request: UptrainRequest, source: Checkpoint, device: torch.device) -> Any:
    """The model to distill from: frozen, in the precision of the training, and whole on every device."""
    from accelerate.utils import patch_environment

    assert request.teacher is not None
    opened = open_checkpoint(request.teacher)
    try:
        expected, tokens = source.config.get("vocab_size"), opened.config.get("vocab_size")
        if expected != tokens:
            raise InputError(
                f"{opt('teacher', request.teacher)}: its vocabulary has {tokens} tokens, that of {request.model} "
                f"{expected}; expected the checkpoint that it was converted from"
            )
        # under FSDP transformers loads weights on the first process only; a teacher is not sharded
        with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            teacher = load_model(opened, compute_dtype(request), request.trust_remote_code)
    finally:
        opened.close()
    return teacher.to(device).eval().requires_grad_(False)


class Uptrainer(Trainer):  # type: ignore[misc]
    """Trains on ``order``; ``teacher`` is None, or a frozen model on the same device.

    Drift is measured on ``held_out [M, T]``, if M is not 0. ``held`` are the slices of the constant channel.
    """

    # Every micro-batch's loss is a mean over equally many tokens.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: Any,
        arguments: Any,
        request: UptrainRequest,
        order: TrainingOrder,
        held_out: Tensor,
        teacher: Any = None,
        held: Mapping[str, HeldSlice] | None = None,
    ) -> None:
        self._run_log = log = RunLog(request, arguments.world_size)
        super().__init__(model=model, args=arguments, train_dataset=order, eval_dataset=list(held_out), callbacks=[log])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False
        self._request, self._held_out = request, held_out
        self._teacher = teacher
        self._held = held or {}
        sizes = [tensor_sizes(dict(model.named_parameters()), self._held)]
        # A sharded model may have been loaded by the first process only.
        if dist.is_initialized():
            dist.broadcast_object_list(sizes, src=0)
        self._sizes = sizes[0]

    def run(self, checkpoint: Path | None) -> None:
        """Train from ``checkpoint``, or from the start."""
        with self._run_log.open:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        """The dataset is in order already (``train_sampling_strategy`` says so only since transformers 5.2)."""
        return SequentialSampler(self.train_dataset)

    def create_optimizer(self, *arguments: Any) -> Any:
        if self.optimizer is not None:
            return self.optimizer
        made: torch.optim.Optimizer = super().create_optimizer(*arguments)
        scale_steps(made, lambda: dict(self.model.named_parameters()), self._sizes, self._held)
        return made

    def training_step(self, *arguments: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments)
        # The gradients of all micro-batches are there: what comes next is clipping.
        if self.accelerator.sync_gradients:
            scale_gradients(dict(self.model.named_parameters()), self._held)
        return loss

    def _get_learning_rate(self) -> float:
        """The common learning rate, for the log."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["size"])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        tokens = inputs["input_ids"]
        outputs = model(input_ids=tokens, use_cache=False)
        weight = self._request.distilled
        loss = outputs.logits.new_zeros((), dtype=torch.float32)
        if weight < 1:
            loss = loss + (1 - weight) * next_token_loss(outputs.logits, tokens)
        if weight > 0:
            teacher = self._teacher_logits(tokens)
            loss = loss + weight * distillation_loss(outputs.logits, teacher, self._request.temperature)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _teacher_logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._teacher(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Loss and perplexity on the held-out text; with a teacher also the KL from it and the excess over its loss."""
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.args.device)
        batches = self._evaluation_batches()
        with self._run_log.measuring(len(batches)) as advance:
            for tokens, weight in batches:
                logits = self.model(input_ids=tokens, use_cache=False).logits
                losses = [next_token_loss(logits, tokens)]
                if self._teacher is not None:
                    teacher = self._teacher_logits(tokens)
                    losses += [distillation_loss(logits, teacher, 1.0), next_token_loss(teacher, tokens)]
                sums[: len(losses)] += torch.stack(losses).double() * weight
                sums[3] += weight
                # Waits for the device, so that progress tells the time of a batch.
                float(sums[3])
                advance()
        self.model.train()
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, kl, teacher = (sums[:3] / sums[3]).tolist()
        metrics = {"eval_loss": loss, "eval_perplexity": math.exp(loss)}
        if self._teacher is not None:
            metrics |= {"eval_kl": kl, "eval_excess": loss - teacher}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluation_batches(self) -> list[tuple[Tensor, int]]:
        """This process's held-out batches on its device and their numbers of sequences, 0 for those that only fill up.

        All processes have equally many batches, as sharded models need.
        """
        batches = torch.split(self._held_out, self._request.micro_batch)
        world, rank = self.args.world_size, self.args.process_index
        own = [
            (batches[min(number, len(batches) - 1)], number < len(batches))
            for number in range(rank, math.ceil(len(batches) / world) * world, world)
        ]
        return [(batch.to(self.args.device), len(batch) if counted else 0) for batch, counted in own]

    def full_state(self) -> dict[str, Tensor]:
        """Every tensor of the trained model on the CPU; whole on the first process, called by all."""
        wrapped = self.model_wrapped if self.is_fsdp_enabled else self.model
        state = self.accelerator.get_state_dict(wrapped)
        return {name: value.detach().cpu() for name, value in (state or {}).items()}


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes ``log.jsonl``, shows steps, measurements and rows on stderr, and marks complete checkpoints."""

    def __init__(self, request: UptrainRequest, processes: int = 1) -> None:
        self._request, self._processes = request, processes
        self._stages = Stages(quiet=request.quiet or not started_first())
        self.open = ExitStack()  # closed after the training, however it ends
        self._advance: Callable[[int], None] | None = None  # of the stage of training, once it begins

    @contextmanager
    def measuring(self, batches: int) -> Iterator[Callable[[], None]]:
        """A measurement of ``batches`` on held-out text; call it after each."""
        with self._stages("measuring on held-out text,", batches, "batch") as advance:
            yield lambda: advance(1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._advance is None:
            steps = self._request.steps
            self._advance = self.open.enter_context(self._stages("training", steps, "step", state.global_step))

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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        row = {name: value for name, value in (logs or {}).items() if name not in ("epoch", "total_flos")}
        if "train_runtime" in row:
            return
        if not all(math.isfinite(value) for name, value in row.items() if name.endswith("loss")):
            raise KvfoldError(
                f"step {state.global_step}: the loss is no longer a finite number; lower {opt('relative_lr')}, or "
                f"raise {opt('warmup')}"
            )
        if state.is_world_process_zero:
            row = {"step": state.global_step, "tokens": state.global_step * self._request.batch_tokens, **row}
            with (self._request.work / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if not self._request.quiet:
                tqdm.write(log_line(row, self._request.steps), file=sys.stderr)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.is_initialized():
            # Each process writes its random state before the checkpoint is complete.
            dist.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def log_line(row: dict[str, Any], steps: int) -> str:
    """A row of the log as a line for users."""
    names = {"loss": "loss", "learning_rate": "lr", "eval_loss": "held-out loss"}
    names |= {"eval_perplexity": "perplexity", "eval_kl": "KL", "eval_excess": "excess"}
    numbers = ", ".join(f"{names[name]} {value:.4g}" for name, value in row.items() if name in names)
    return f"step {row['step']}/{steps}: {numbers}"
