"""The constant channel of layout ``free`` in training: it keeps the latent's norm a known factor.

``targets/mla/constant.py`` has the learning-rate multipliers of its elements: 0 (frozen) or 1 / CONSTANT. Here
gradients are scaled in the forward pass, so that clipping sees the scaled ones and sharding does not matter, and each
step of the optimizer is scaled, because Adam undoes any scale of a gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.mla.constant import CONSTANT, lr_multipliers

_DOWN = {"kv_a_proj_with_mqa": "kv_lora_rank", "q_a_proj": "q_lora_rank"}


def has_constant(checkpoint: Checkpoint) -> bool:
    """Whether every latent of the checkpoint has the constant channel: its bias is there, and large."""
    if not is_latent(checkpoint.config) or not checkpoint.config.get("attention_bias"):
        return False
    names = [name for name in checkpoint.tensors if name.split(".")[-2] in _DOWN and name.endswith(".bias")]
    rank = {name: checkpoint.config[_DOWN[name.split(".")[-2]]] for name in names}
    return bool(names) and all(checkpoint.read(name)[rank[name] - 1] == CONSTANT for name in names)


@dataclass(frozen=True)
class ScaledSlice:
    """Slice ``index`` along ``axis`` of the tensor ``kind`` of ``module``: its learning rate is ``multiplier`` times.

    A multiplier of 0 freezes it.
    """

    module: nn.Module
    kind: str
    axis: int
    index: int
    multiplier: float

    def local(self) -> tuple[Tensor, Tensor]:
        """This process's part of the tensor, and the indices of the slice in it (none, or one)."""
        tensor = getattr(self.module, self.kind).data
        mask = torch.zeros(tensor.shape[self.axis], dtype=torch.bool)
        mask[self.index] = True
        if hasattr(tensor, "to_local"):  # sharded along its first axis
            if self.axis == 0:
                from torch.distributed.tensor import distribute_tensor

                mask = distribute_tensor(mask.to(tensor.device), tensor.device_mesh, tensor.placements).to_local()
            tensor = tensor.to_local()
        return tensor, mask.nonzero()[:, 0].to(tensor.device)


class ConstantChannel:
    """Keeps the constant channel of a model's latents; freezes the latents' norms.

    ``install`` before the model is wrapped, ``watch`` the optimizer when it is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slices = _scaled_slices(model)
        self._before: list[Tensor] = []

    def install(self) -> None:
        """Scale the gradients of the slices."""
        for module in {id(part.module): part.module for part in self.slices}.values():
            parts = [part for part in self.slices if part.module is module]
            module.forward = partial(_scaled_linear, cast(nn.Linear, module), parts)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale each step that ``optimizer`` takes."""
        optimizer.register_step_pre_hook(lambda *_: self._remember())
        optimizer.register_step_post_hook(lambda *_: self._scale_step())

    @torch.no_grad()
    def _remember(self) -> None:
        self._before = []
        for part in self.slices:
            tensor, where = part.local()
            self._before.append(tensor.index_select(part.axis, where))

    @torch.no_grad()
    def _scale_step(self) -> None:
        for part, before in zip(self.slices, self._before, strict=True):
            tensor, where = part.local()
            after = (
                before if part.multiplier == 0 else before.lerp(tensor.index_select(part.axis, where), part.multiplier)
            )
            tensor.index_copy_(part.axis, where, after)


def _scaled_slices(model: nn.Module) -> list[ScaledSlice]:
    attention = {name: value for name, value in model.named_parameters() if ".self_attn." in name}
    parts: list[ScaledSlice] = []
    for layer in sorted({name.split(".self_attn.")[0] for name in attention}):
        tensors = {name: value for name, value in attention.items() if name.startswith(f"{layer}.self_attn.")}
        shapes = {name: torch.empty(value.shape, device="meta") for name, value in tensors.items()}
        for name in lr_multipliers(shapes):
            path, kind = name.rsplit(".", 1)
            module = model.get_submodule(path)
            if path.endswith("layernorm"):
                tensors[name].requires_grad_(False)
            elif path.rsplit(".", 1)[1] in _DOWN:
                rank = getattr(cast(Any, model.config).get_text_config(), _DOWN[path.rsplit(".", 1)[1]])
                parts.append(ScaledSlice(module, kind, 0, rank - 1, 0.0))
            else:
                parts.append(ScaledSlice(module, kind, 1, tensors[name].shape[1] - 1, 1 / CONSTANT))
    return parts


class _ScaledGradient(torch.autograd.Function):
    """The tensor unchanged; its gradient multiplied at ``index`` along ``axis``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, index: int, multiplier: float) -> Tensor:
        ctx.where = (axis, index, multiplier)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        axis, index, multiplier = ctx.where
        gradient = gradients[0].clone()
        gradient.select(axis, index).mul_(multiplier)
        return gradient, None, None, None


def _scaled_linear(module: nn.Linear, parts: list[ScaledSlice], inputs: Tensor) -> Tensor:
    """``module(inputs)``; its tensors are looked up at every call, because sharding replaces them."""
    tensors: dict[str, Tensor | None] = {"weight": module.weight, "bias": module.bias}
    for part in parts:
        tensors[part.kind] = _ScaledGradient.apply(  # type: ignore[no-untyped-call]
            tensors[part.kind], part.axis, part.index, part.multiplier
        )
    return nn.functional.linear(inputs, tensors["weight"], tensors["bias"])  # type: ignore[arg-type]


def check_constant(state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises KvfoldError unless the constant channel of ``state`` is that of ``checkpoint``."""
    for name, value in state.items():
        kind = name.split(".")[-2]
        if kind.removesuffix("_layernorm") in ("kv_a", "q_a"):
            same = torch.equal(value, checkpoint.read(name).to(value.dtype))
        elif kind in _DOWN:
            row = checkpoint.config[_DOWN[kind]] - 1
            same = torch.equal(value[row], checkpoint.read(name)[row].to(value.dtype))
        else:
            continue
        if not same:
            raise KvfoldError(f"{name}: expected the constant channel as it was, found it moved; please report it")
