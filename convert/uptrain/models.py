"""The models of a run: the student, which is trained, and the teacher."""

from typing import Any

import torch

from kvfold.attention.drift.frame import attention_name, layer_list
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, opt
from kvfold.convert.stream.stock import load_model
from kvfold.convert.targets.mla.constant import HeldSlice
from kvfold.convert.training.constant import has_constant, hold_constant
from kvfold.convert.uptrain.arguments import compute_dtype
from kvfold.convert.uptrain.request import UptrainRequest


def prepare_model(model: Any, source: Checkpoint, request: UptrainRequest) -> dict[str, HeldSlice]:
    """Freeze the parameters that are not trained; returns the slices of the constant channel, where there is one."""
    model.config.use_cache = False
    if request.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})  # the first name is that of transformers 6
    if request.train == "attention":
        inside = f".{attention_name(layer_list(model)[1][0])}."
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(inside in name)
    return hold_constant(model) if has_constant(source) else {}


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
                f"{expected}; "
                "expected the checkpoint that it was converted from"
            )
        # under FSDP transformers loads weights on the first process only; a teacher is not sharded
        with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            teacher = load_model(opened, compute_dtype(request), request.trust_remote_code)
    finally:
        opened.close()
    return teacher.to(device).eval().requires_grad_(False)
