"""The models of a run: the one that is trained, and the one it is distilled from."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from kvfold.convert.errors import InputError, one_line
from kvfold.convert.io.checkpoint import Checkpoint, open_checkpoint
from kvfold.convert.uptrain.constant import ConstantChannel, has_constant
from kvfold.convert.uptrain.request import UptrainRequest


def load_model(model: str, checkpoint: Checkpoint, dtype: torch.dtype, request: UptrainRequest) -> Any:
    """A causal language model in ``dtype``. InputError when transformers cannot load it."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=dtype, trust_remote_code=request.trust_remote_code
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = one_line(error)[:200]
        raise InputError(f"{model}: expected a model that transformers can load, found: {reason}") from error


def prepare_model(model: Any, source: Checkpoint, request: UptrainRequest) -> ConstantChannel | None:
    """Set what is trained, and hold what must not move."""
    model.config.use_cache = False
    if request.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})  # the first name is that of transformers 6
    if request.train == "attention":
        names = [name for name, _ in model.named_parameters() if ".self_attn." in name]
        if not names:
            raise InputError(f"--train attention: {source.origin} has no tensors under `self_attn`; use --train all")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".self_attn." in name)
    if not has_constant(source):
        return None
    channel = ConstantChannel(model)
    channel.install()
    return channel


def check_sharding(trainer: Any) -> None:
    """Raises InputError when the way weights are sharded leaves nothing of the single tensors."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise InputError(
            "FSDP version 1 flattens weights, but tensors learn at rates of their own and the constant channel of "
            "layout deepseek is held; set fsdp_version: 2, as in recipes/fsdp.yaml"
        )


def load_teacher(request: UptrainRequest, source: Checkpoint, device: torch.device, precision: torch.dtype) -> Any:
    """The model to distil from: whole on every device, frozen, in the precision of the training."""
    assert request.teacher is not None
    opened = open_checkpoint(request.teacher)
    try:
        before, after = opened.config.get("vocab_size"), source.config.get("vocab_size")
        if before != after:
            raise InputError(
                f"--teacher {request.teacher}: its vocabulary has {before} tokens, that of {request.model} {after}; "
                "expected the checkpoint that it was converted from"
            )
        with _whole_on_every_process():
            teacher = load_model(request.teacher, opened, precision, request)
    finally:
        opened.close()
    return teacher.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def _whole_on_every_process() -> Iterator[None]:
    """Under FSDP transformers loads weights on the first process only; a teacher is not sharded and needs its own."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
