"""A learning rate for each tensor: in proportion to the size of its elements.

Adam moves every element by about the learning rate, whatever its size. The tensors of a converted attention differ
in size far more than those of a trained model (a latent may be scaled up and read scaled down), so that one rate for
all would leave some unchanged and destroy others. The constant channel is large and hardly moves, and the zeros of
padded heads never do: they do not count.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvfold.convert.training.constant import ConstantChannel

# A sixteenth of refinement's: all layers move at once. KL after 40 steps, MLA 24+8 of the model that ships:
# 0.0125 0.231, 0.05 0.165, 0.2 0.172 nats (recipes/benchmarks/bench_refine_constants.py --uptrain)
_AT_WIDTH_ONE = 0.05
_LEAST = 1e-6  # the least size: a tensor of zeros learns too


def default_lr(width: int) -> float:
    """Peak learning rate of a model of ``width``, relative to the tensors' size: the steps of all inputs add up."""
    return _AT_WIDTH_ONE / math.sqrt(width)


def _size(tensor: Tensor) -> float:
    """Root mean square of the elements that are not zero; 0 without any."""
    filled = tensor if tensor.all() else tensor[tensor != 0]
    return float(filled.float().square().mean().sqrt()) if filled.numel() else 0.0


def tensor_sizes(model: nn.Module, channel: ConstantChannel | None) -> dict[str, float]:
    """Root mean square of every tensor by name, the constant channel left out; a bias has its weight's."""
    slices = {} if channel is None else {(part.module, part.kind): part for part in channel.slices}
    sizes: dict[str, float] = {}
    for path, module in model.named_modules():
        for kind, tensor in module.named_parameters(recurse=False):
            free = tensor.detach()
            part = slices.get((module, kind))
            if part is not None:
                others = torch.arange(free.shape[part.axis], device=free.device) != part.index
                free = free.index_select(part.axis, others.nonzero()[:, 0])
            sizes[f"{path}.{kind}" if path else kind] = _size(free)
    relative = {
        name: max(_LEAST, sizes.get(name.removesuffix(".bias") + ".weight", size) if name.endswith(".bias") else size)
        for name, size in sizes.items()
    }
    if dist.is_initialized():  # a sharded model may have been loaded by the first process only
        shared = [relative]
        dist.broadcast_object_list(shared, src=0)
        relative = shared[0]
    return relative


def relative_groups(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], sizes: Mapping[str, float]
) -> None:
    """Give each tensor of a new ``optimizer`` its own group, with the learning rate times the tensor's size.

    ``named`` are the parameters with their names in ``sizes``. Weight decay stays the common learning rate times the
    decay. ``size`` is kept in the group.
    """
    names = {parameter: name for name, parameter in named}

    def groups() -> Iterator[dict[str, object]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                size = sizes[names[parameter]]
                changed = {"lr": group["lr"] * size, "weight_decay": group["weight_decay"] / size, "size": size}
                yield {**group, "params": [parameter], **changed}

    optimizer.param_groups = list(groups())
