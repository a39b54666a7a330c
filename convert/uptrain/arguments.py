"""``transformers.TrainingArguments`` of a run: precision, device, learning rate, and the division of a batch."""

import math
import os
from typing import Any

import torch

from kvfold.convert.device import choose_device
from kvfold.convert.errors import InputError, opt
from kvfold.convert.training.fit import BETAS
from kvfold.convert.uptrain.request import UptrainRequest

# A sixteenth of refinement's: all layers move at once. KL after 40 steps, MLA 24+8 of the model that ships:
# 0.0125 0.231, 0.05 0.165, 0.2 0.172 nats (recipes/benchmarks/bench_refine_constants.py --uptrain)
_AT_WIDTH_ONE = 0.05


def uptraining_rate(width: int) -> float:
    """Peak learning rate of a model of ``width``, relative to the tensors' size: the steps of all inputs add up."""
    return _AT_WIDTH_ONE / math.sqrt(width)


def training_arguments(request: UptrainRequest, width: int, resumed: bool) -> Any:
    """The arguments of a run of a model of ``width``; makes the process group of a distributed run.

    Raises InputError when the device, the precision or the number of processes cannot be.
    """
    from transformers import TrainingArguments

    device, precision = choose_device(request.device), compute_dtype(request)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # a single process uses all GPUs that it sees: transformers divides each of its batches among them
    replicas = torch.cuda.device_count() if processes == 1 and device.type == "cuda" else processes
    micro, accumulation = divide_batch(request.sequences, request.micro_batch, replicas)
    evaluated, saved = bool(request.eval_every), bool(request.save_every)
    return TrainingArguments(
        output_dir=str(request.work),
        max_steps=request.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=request.relative_lr or uptraining_rate(width),
        lr_scheduler_type=request.schedule if request.schedule != "constant" else "constant_with_warmup",
        warmup_steps=int(request.warmup * request.steps),
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


def divide_batch(sequences: int, micro_batch: int, replicas: int) -> tuple[int, int]:
    """A global batch as (sequences at once on each of ``replicas``, at most ``micro_batch``; accumulated batches).

    Raises InputError when ``sequences`` cannot be divided.
    """
    if sequences % replicas:
        raise InputError(
            f"{opt('batch_tokens')}: {sequences} sequences per step do not divide over {replicas} processes; use a "
            f"multiple of {replicas} x {opt('seq_len')}"
        )
    each = sequences // replicas
    micro = max(n for n in range(1, min(micro_batch, each) + 1) if each % n == 0)
    return micro, each // micro


def compute_dtype(request: UptrainRequest) -> torch.dtype:
    """The dtype of forward passes. ``auto``: float32 on a CPU, bfloat16 on a GPU that has it."""
    device = choose_device(request.device)
    if request.precision == "float16" and device.type == "cpu":
        raise InputError(f"{opt('precision', 'float16')} trains on a GPU only; use bfloat16 or float32")
    if request.precision != "auto":
        precision: torch.dtype = getattr(torch, request.precision)
        return precision
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
