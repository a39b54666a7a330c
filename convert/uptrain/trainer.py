"""``transformers.Trainer`` for uptraining: losses, and drift on held-out text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from kvfold.convert.targets.mla.constant import HeldSlice
from kvfold.convert.training.loss import distillation_loss, next_token_loss
from kvfold.convert.training.trainee import RelativeSteps
from kvfold.convert.uptrain.data import TrainingOrder
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.run_log import RunLog


class Uptrainer(Trainer):  # type: ignore[misc]
    """Trains on ``order``; ``teacher`` is None, or a frozen model on the same device.

    Drift is measured on ``held_out [M, T]``, if M is not 0. ``held`` are the slices of the constant channel.
    """

    loss_is_scaled_for_ga = False  # every micro-batch's loss is a mean over equally many tokens

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
        self._steps = RelativeSteps(lambda: dict(model.named_parameters()), held or {})
        if dist.is_initialized():  # a sharded model may have been loaded by the first process only
            shared = [self._steps.sizes]
            dist.broadcast_object_list(shared, src=0)
            self._steps.sizes = shared[0]

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
        self._steps.watch(made, dict((arguments[0] if arguments else self.model).named_parameters()))
        return made

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
        batches = self._own_evaluation()
        with self._run_log.measuring(len(batches)) as advance:
            for tokens, weight in batches:
                logits = self.model(input_ids=tokens, use_cache=False).logits
                losses = [next_token_loss(logits, tokens)]
                if self._teacher is not None:
                    teacher = self._teacher_logits(tokens)
                    losses += [distillation_loss(logits, teacher, 1.0), next_token_loss(teacher, tokens)]
                sums[: len(losses)] += torch.stack(losses).double() * weight
                sums[3] += weight
                float(sums[3])  # waits for the device: the time of a batch is told
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

    def _own_evaluation(self) -> list[tuple[Tensor, int]]:
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
