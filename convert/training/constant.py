"""The constant channel of layout ``free`` in checkpoints that are trained: detection, gradients, and a last check.

The channel keeps the latent's norm a known factor (``targets/mla/constant.py``). `RelativeSteps` holds it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.mla.constant import CONSTANT, HeldSlice, held_slices, latent_norms

_DOWN = {"kv_a_proj_with_mqa": "kv_lora_rank", "q_a_proj": "q_lora_rank"}


def has_constant(checkpoint: Checkpoint) -> bool:
    """True if every latent of the checkpoint has the constant channel: its bias is there, and large."""
    if not is_latent(checkpoint.config) or not checkpoint.config.get("attention_bias"):
        return False
    names = [name for name in checkpoint.tensors if name.split(".")[-2] in _DOWN and name.endswith(".bias")]
    rank = {name: checkpoint.config[_DOWN[name.split(".")[-2]]] for name in names}
    return bool(names) and all(checkpoint.read(name)[rank[name] - 1] == CONSTANT for name in names)


def hold_constant(model: nn.Module) -> dict[str, HeldSlice]:
    """Freeze the latents' norms of ``model``, and scale the gradients of the channel as its steps are scaled.

    Returns the held slices by the names of the parameters. The gradients are scaled so that clipping sees what moves,
    and in the forward pass, before the model is wrapped, so that sharding does not matter.
    """
    named = dict(model.named_parameters())
    for name in latent_norms(named):
        named[name].requires_grad_(False)
    held = held_slices(named)
    for path in dict.fromkeys(name.rpartition(".")[0] for name in held):
        module: Any = model.get_submodule(path)
        parts = {kind: held[f"{path}.{kind}"] for kind in ("weight", "bias") if f"{path}.{kind}" in held}
        module.forward = partial(_scaled_linear, module, parts)
    return held


def check_constant(state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises KvfoldError unless the constant channel of ``state`` is that of ``checkpoint``."""
    frozen = {name: held for name, held in held_slices(state).items() if held.pace == 0}
    for name in [*latent_norms(state), *frozen]:
        after, before = state[name], checkpoint.read(name).to(state[name].dtype)
        if name in frozen:
            after, before = (tensor.select(frozen[name].axis, frozen[name].index) for tensor in (after, before))
        if not torch.equal(after, before):
            raise KvfoldError(f"{name}: expected the constant channel as it was, found it moved; please report it")


class _ScaledGradient(torch.autograd.Function):
    """The tensor unchanged; its gradient multiplied by the pace of the held slice there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, held: HeldSlice) -> Tensor:
        ctx.held = held
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        gradient.select(ctx.held.axis, ctx.held.index).mul_(ctx.held.pace)
        return gradient, None


def _scaled_linear(module: nn.Linear, parts: Mapping[str, HeldSlice], inputs: Tensor) -> Tensor:
    """``module(inputs)``; its tensors are looked up at every call, because sharding replaces them."""
    tensors: dict[str, Tensor | None] = {"weight": module.weight, "bias": module.bias}
    for kind, held in parts.items():
        tensors[kind] = _ScaledGradient.apply(tensors[kind], held)  # type: ignore[no-untyped-call]
    return nn.functional.linear(inputs, tensors["weight"], tensors["bias"])  # type: ignore[arg-type]
