"""Training step sizes in proportion to tensors, rows and columns, with smaller steps for the
constant channel.

Each step of Adam changes every element, large or small, by about the learning rate. The tensors of
a converted attention differ in size far more than those of a trained model: a latent channel may be
small in the tensor that writes it and large in the tensor that reads it. A single rate would leave
some tensors unchanged and destroy others, so steps are scaled for

    tensors             the learning rate is multiplied by the root mean square of the elements
    rows and columns    in polishing, an element's step is multiplied by the relative sizes of its
                        row and its column
    constant channel    in layout ``free``, its slices are frozen, or their steps are multiplied by
                        1 / CONSTANT

The first is a learning rate per tensor. Adam's steps do not depend on the scale of the gradient, so
the other two shorten the steps themselves (`scale_adam_steps`), whether the optimizer is run by
`loop.train` or by ``transformers.Trainer``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.targets.mla.encode import (
    CONSTANT,
    ConstantSlice,
    find_constant_slices,
    list_latent_norms,
)
from kvfold.convert.targets.mla.spec import is_mla_config

# The minimum size of a tensor, so that one of zeros can learn at all. Chosen, not tuned.
_MIN_SIZE = 1e-6

NamedTensors = Mapping[str, Tensor]
ConstantSlices = Mapping[str, ConstantSlice]
ChannelScales = Mapping[str, tuple[Tensor, Tensor]]


def scale_adam_steps(
    optimizer: torch.optim.Optimizer,
    named: NamedTensors,
    sizes: Mapping[str, float],
    slices: ConstantSlices,
    channels: ChannelScales,
) -> None:
    """Make the steps of a new ``optimizer`` relative to the tensors ``named``: the size of each in
    ``sizes``, by name, multiplies its learning rate.

    Each tensor gets its own parameter group, which records its ``size``; weight decay still uses
    the learning rate before scaling. Steps of ``slices`` of the constant channel are multiplied by
    their pace; steps of tensors in ``channels``, by the relative sizes of their rows and columns,
    which keeps a copy of each such tensor during a step.
    """
    names = {id(tensor): name for name, tensor in named.items()}
    groups = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            name = names[id(tensor)]
            scaled = {
                "lr": group["lr"] * sizes[name],
                "weight_decay": group["weight_decay"] / sizes[name],
            }
            groups.append(
                {**group, **scaled, "params": [tensor], "name": name, "size": sizes[name]}
            )
    optimizer.param_groups = groups
    # Views of all elements that do not take the whole step, the factors of theirs, and copies from
    # before it.
    shortened: list[tuple[Tensor, tuple[Tensor | float, ...], Tensor]] = []

    @torch.no_grad()
    def copy_tensors(*_: Any) -> None:
        """Before a step, copy the tensors whose steps are shortened."""
        # Looked up at every step, because sharding replaces the tensors in the groups.
        for group in optimizer.param_groups:
            name = group["name"]
            tensor = group["params"][0].data
            if name in slices:
                view = _select_local_slice(tensor, slices[name])
                shortened.append((view, (slices[name].pace,), view.clone()))
            if name in channels:
                shortened.append((tensor, channels[name], tensor.clone()))

    @torch.no_grad()
    def shorten_steps(*_: Any) -> None:
        """After a step, move each copied tensor only a part of the way."""
        for view, factors, before in shortened:
            # At most the step of a tensor with equally large elements: larger steps of the few
            # largest channels, which every token reads, would disturb the outputs for all tokens.
            scale: Any = math.prod(factors, start=view.new_ones(()))
            view.copy_(before.lerp(view, scale.clamp_max(1)))
        shortened.clear()

    optimizer.register_step_pre_hook(copy_tensors)
    optimizer.register_step_post_hook(shorten_steps)


def _select_local_slice(tensor: Any, constant: ConstantSlice) -> Tensor:
    """Return a view of the constant channel's slice in this process's shard of ``tensor``; empty if
    another process has it.
    """
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # Tensors are sharded along their first axis: every process has a part of a slice along another
    # one.
    if local is tensor or constant.axis != 0:
        return local.narrow(constant.axis, constant.index, 1)
    from torch.distributed.tensor import distribute_tensor

    rows = torch.arange(tensor.shape[0], device=tensor.device)
    mine = distribute_tensor(rows, tensor.device_mesh, tensor.placements).to_local()
    where = (mine == constant.index).nonzero()[:, 0]
    return local.narrow(0, int(where[0]) if len(where) else 0, len(where))


def measure_tensor_rms(named: NamedTensors, slices: ConstantSlices) -> dict[str, float]:
    """Return the root mean square of every tensor by name, which scales its training steps; a bias
    gets that of its weight.

    The constant channel is ignored because it is large but hardly moves, and zeros because those of
    padded heads never move.
    """
    sizes: dict[str, float] = {}
    for name, tensor in named.items():
        free = tensor.detach().float()
        if name in slices:
            free = free.clone()
            free.select(slices[name].axis, slices[name].index).zero_()
        sizes[name] = max(_MIN_SIZE, float(_compute_mean_square(free).sqrt()))
    weights = {name: name.removesuffix(".bias") + ".weight" for name in sizes if ".bias" in name}
    return {name: sizes.get(weights.get(name, name), size) for name, size in sizes.items()}


def _compute_mean_square(tensor: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean square of all elements that are not zero, or of those along ``axis``."""
    return tensor.square().sum(axis) / (tensor != 0).sum(axis).clamp_min(1)


def measure_channel_scales(
    named: NamedTensors, slices: ConstantSlices
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by the name of each matrix ``[m, n]`` the relative sizes of its rows, ``[m, 1]``, and
    of its columns, ``[n]``; by the name of its bias those of its rows, ``[m]``, and ones.

    A relative size is the row's or column's root mean square divided by the matrix's; the zeros of
    padded heads do not count.
    """
    # A converted attention is a product of factors, and how the size of a channel is shared between
    # them is arbitrary. Within one tensor rows or columns differ by a factor of a hundred
    # (SmolLM2-135M, MLA 128+64): a step that is right for the large ones throws the small ones
    # away.
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weight in named.items():
        if weight.dim() != 2:
            continue
        values = weight.detach().float()
        mean = _compute_mean_square(values).clamp_min(torch.finfo(values.dtype).tiny)
        rows, columns = ((_compute_mean_square(values, axis) / mean).sqrt() for axis in (1, 0))
        # A column that reads the constant channel is a bias divided by the constant, often zero.
        if name in slices and slices[name].axis == 1:
            columns[slices[name].index] = 1
        scales[name] = rows[:, None], columns
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in named:
            scales[bias] = rows, torch.ones_like(rows)
    return scales


def freeze_constant_channel(named: NamedTensors) -> dict[str, ConstantSlice]:
    """Freeze the latents' norms among the parameters ``named``; return the slices of the latents'
    constant channel by tensor name.
    """
    for name in list_latent_norms(named):
        named[name].requires_grad_(False)
    return find_constant_slices(named)


def scale_gradients(named: NamedTensors, slices: ConstantSlices) -> None:
    """Multiply the gradients of the constant channel's ``slices`` by the factors of their steps, so
    that gradient clipping counts them correctly.
    """
    with torch.no_grad():
        for name, part in slices.items():
            if named[name].grad is not None:
                _select_local_slice(named[name].grad, part).mul_(part.pace)


def has_constant_channel(checkpoint: Checkpoint) -> bool:
    """True if every latent in the checkpoint has a channel that is constant, as layout ``free``
    writes it.
    """
    if not is_mla_config(checkpoint.config) or not checkpoint.config.get("attention_bias"):
        return False
    shapes = {
        name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()
    }
    biases = {name: s for name, s in find_constant_slices(shapes).items() if name.endswith(".bias")}
    # Other latent models with biases have the tensors too, but no such value in them.
    return bool(biases) and all(
        checkpoint.read_tensor(name)[bias.index] == CONSTANT for name, bias in biases.items()
    )


def check_constant_channel(state: NamedTensors, checkpoint: Checkpoint) -> None:
    """Raise KvfoldError if training changed the latents' constant channel (the slice that carries
    biases) or the latents' norms: only there must ``state`` equal ``checkpoint``.
    """
    frozen = {name: s for name, s in find_constant_slices(state).items() if s.pace == 0}
    for name in [*list_latent_norms(state), *frozen]:
        values = [checkpoint.read_tensor(name).to(state[name].dtype), state[name]]
        if name in frozen:
            values = [value.select(frozen[name].axis, frozen[name].index) for value in values]
        if not torch.equal(*values):
            raise KvfoldError(
                f"tensor {name!r}: training changed the latent's constant channel, which must stay"
                " fixed; please report it"
            )
