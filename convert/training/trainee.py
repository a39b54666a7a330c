"""Tensors in training: float32 masters, and how far each of their elements moves in a step.

Adam moves every element by about the learning rate, whatever its size. The tensors of a converted attention differ in
size far more than those of a trained model: a channel of a latent may be written small and read large, and one rate for
all would leave some tensors unchanged and destroy others. So steps are relative, on three levels:

    tensors             the learning rate is multiplied by the root mean square of the tensor's elements
    rows and columns    where asked for, an element's step is multiplied by the relative sizes of its row and its column
    constant channel    the slices of layout ``free`` that hold it are frozen, or move 1 / CONSTANT as far as the others

The first is a learning rate for each tensor. Adam undoes any scale of a gradient, so the other two shorten the step
itself, by one mechanism (`RelativeSteps`), whichever loop drives the optimizer: `fit` or ``transformers.Trainer``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.convert.targets.mla.constant import HeldSlice, held_slices, latent_norms

# The model that ships. Second moment 0.95, 0.98 and 0.999, refined: MQA +0.0341 three times; MLA 24+8 +0.0718, +0.0731,
# +0.0738 nats per token (bench_refine_constants.py). Polished: 0.95 KL 0.1045, 0.99 0.1059 (bench_polish_constants.py).
BETAS = (0.9, 0.95)
# Gradients of a relative error over many tokens are small; Adam's default of 1e-8 would shorten their steps.
_EPS = 1e-12
# The least size of a tensor, so that one of zeros can learn at all.
_LEAST_SIZE = 1e-6

Named = Mapping[str, Tensor]


class Trainee:
    """Float32 masters of stored tensors, trained by Adam with relative steps.

    ``tensors`` have the names of the checkpoint's files, ``stored`` the dtypes that the files will hold. ``constant``:
    the tensors are of layout ``free``, whose constant channel is kept. ``by_channel``: steps are relative to rows and
    columns too.
    """

    def __init__(
        self,
        tensors: Named,
        stored: Mapping[str, torch.dtype],
        device: torch.device,
        *,
        constant: bool = False,
        by_channel: bool = False,
    ) -> None:
        self.stored = {name: stored[name] for name in tensors}
        self.masters = {
            name: nn.Parameter(tensor.detach().to(device, torch.float32, copy=True)) for name, tensor in tensors.items()
        }
        for name in latent_norms(self.masters) if constant else ():
            self.masters[name].requires_grad_(False)
        self.learning = {name: master for name, master in self.masters.items() if master.requires_grad}
        self.optimizer = torch.optim.Adam(list(self.learning.values()), lr=1.0, betas=BETAS, eps=_EPS, fused=True)
        held = held_slices(self.masters) if constant else {}
        RelativeSteps(lambda: self.learning, held, by_channel=by_channel).watch(self.optimizer)

    def rounded(self) -> dict[str, Tensor]:
        """The masters as they will be stored, on the CPU."""
        return {name: master.detach().to("cpu", self.stored[name], copy=True) for name, master in self.masters.items()}

    @torch.no_grad()
    def put(self, tensors: Named) -> None:
        """Set masters."""
        for name, tensor in tensors.items():
            self.masters[name].copy_(tensor)

    def step(self, rate: float, backward: Callable[[], None]) -> None:
        """One step at the learning rate ``rate``, relative to the size of each tensor."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["size"]
        self.optimizer.zero_grad(set_to_none=True)
        backward()
        self.optimizer.step()


class RelativeSteps:
    """Makes the steps of an optimizer relative to the tensors, and to channels within them.

    ``parameters()`` gives the trained tensors by name. It is asked at every step, because sharding replaces them.
    ``held`` are the slices of the constant channel. With ``by_channel`` an element of a matrix moves in proportion to
    its row and to its column, whatever the basis; a matrix is held in memory twice during a step then.
    """

    def __init__(
        self, parameters: Callable[[], Named], held: Mapping[str, HeldSlice], *, by_channel: bool = False
    ) -> None:
        self._parameters = parameters
        named = parameters()
        self._held = {name: part for name, part in held.items() if name in named}
        self.sizes = tensor_sizes(named, self._held)
        self._channels = channel_scales(named, self._held) if by_channel else {}
        self._before: list[Tensor] = []

    def watch(self, optimizer: torch.optim.Optimizer, parameters: Named | None = None) -> None:
        """Scale every step of a new ``optimizer`` over ``parameters`` (default: all of them), by name.

        Each tensor gets its own group, with the learning rate times its size; the group keeps the ``size``. Weight
        decay stays the common learning rate times the decay.
        """
        names = {id(tensor): name for name, tensor in (parameters or self._parameters()).items()}
        groups = []
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                size = self.sizes[names[id(tensor)]]
                changed = {"lr": group["lr"] * size, "weight_decay": group["weight_decay"] / size, "size": size}
                groups.append({**group, "params": [tensor], **changed})
        optimizer.param_groups = groups
        optimizer.register_step_pre_hook(lambda *_: self._remember())
        optimizer.register_step_post_hook(lambda *_: self._shorten())

    @torch.no_grad()
    def _remember(self) -> None:
        self._before = [part.clone() for part, *_ in self._parts()]

    @torch.no_grad()
    def _shorten(self) -> None:
        for (part, rows, columns), before in zip(self._parts(), self._before, strict=True):
            # Never further than in a tensor whose elements are all alike: moved in proportion to more than that, the
            # few largest channels shake what every token reads.
            scale = (part.new_ones(()) * rows * columns).clamp_max(1)
            part.copy_(before.lerp(part, scale))
        self._before = []

    def _parts(self) -> Iterator[tuple[Tensor, Tensor | float, Tensor | float]]:
        """Views of all elements that do not take the whole step, with the two factors of theirs."""
        named = self._parameters()
        for name, held in self._held.items():
            yield _local_slice(named[name].data, held), held.pace, 1.0
        for name, (rows, columns) in self._channels.items():
            yield named[name].data, rows, columns


def _local_slice(tensor: Any, held: HeldSlice) -> Tensor:
    """The slice of this process's part of ``tensor``, as a view; empty where another process has it."""
    if not hasattr(tensor, "to_local"):
        whole: Tensor = tensor.narrow(held.axis, held.index, 1)
        return whole
    local: Tensor = tensor.to_local()
    if held.axis != 0:  # sharded along its first axis: every process has a part of the slice
        return local.narrow(held.axis, held.index, 1)
    from torch.distributed.tensor import distribute_tensor

    rows = torch.arange(tensor.shape[0], device=tensor.device)
    mine = distribute_tensor(rows, tensor.device_mesh, tensor.placements).to_local()
    where = (mine == held.index).nonzero()[:, 0]
    return local.narrow(0, int(where[0]) if len(where) else 0, len(where))


def tensor_sizes(named: Named, held: Mapping[str, HeldSlice]) -> dict[str, float]:
    """Root mean square of every tensor, without its held slice and without zeros; a bias has its weight's.

    The constant channel is large and hardly moves, and the zeros of padded heads never do.
    """
    sizes: dict[str, float] = {}
    for name, tensor in named.items():
        free = tensor.detach()
        if name in held:
            others = torch.arange(free.shape[held[name].axis], device=free.device) != held[name].index
            free = free.index_select(held[name].axis, others.nonzero()[:, 0])
        filled = free if free.all() else free[free != 0]
        sizes[name] = float(filled.float().square().mean().sqrt()) if filled.numel() else 0.0
    weights = {name: name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name for name in sizes}
    return {name: max(_LEAST_SIZE, sizes.get(weights[name], size)) for name, size in sizes.items()}


def channel_scales(named: Named, held: Mapping[str, HeldSlice]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each matrix ``[m, n]`` the relative sizes ``r [m, 1]`` and ``c [n]`` of its channels; for its bias ``r [m]``.

    A converted attention is a product of factors, and how the size of a channel is shared between them is arbitrary.
    Within one tensor rows or columns differ by a factor of a hundred (SmolLM2-135M, MLA 128+64): a step that is right
    for the large ones throws the small ones away. The sizes are root mean squares over that of the tensor, without the
    zeros of padded heads. A column that reads the constant channel is a bias divided by it, often zero: it counts as 1.
    """
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weight in named.items():
        if weight.dim() != 2:
            continue
        energy, filled = weight.detach().float().square(), weight.detach() != 0
        mean = (energy.sum() / filled.sum().clamp_min(1)).clamp_min(torch.finfo(energy.dtype).tiny)
        rows, columns = ((energy.sum(axis) / filled.sum(axis).clamp_min(1) / mean).sqrt() for axis in (1, 0))
        if name in held and held[name].axis == 1:
            columns[held[name].index] = 1
        scales[name] = rows[:, None], columns
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in named:
            scales[bias] = rows, torch.ones_like(rows)
    return scales
