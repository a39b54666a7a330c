"""Steps of an optimizer in proportion to the channels that they change.

A converted attention is a product of factors, and how a channel's size is shared between them is arbitrary: a channel
of a latent may be written small and read large, a query's paired with a key's of any size. Within one tensor such rows
or columns differ by a factor of a hundred (SmolLM2-135M, MLA 128+64), while Adam moves all elements alike: what is
right for the large ones throws the small ones away. So an element moves in proportion to its row and to its column,
whatever the basis, but never further than in a tensor whose elements are all alike: moved in proportion, the few
largest channels shake what every token reads.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kvfold.convert.training.constant import ScaledSlice


class RelativeSteps:
    """Multiplies each element's step by the relative sizes of its row and column, as they are now, or by 1 if less.

    ``slices`` are those of the constant channel.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], slices: Iterable[ScaledSlice] = ()) -> None:
        self._scales = step_scales(named, slices)
        self._before: dict[nn.Parameter, Tensor] = {}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale each step that ``optimizer`` takes; for its time a copy of the parameters is held."""
        optimizer.register_step_pre_hook(lambda *_: self._remember())
        optimizer.register_step_post_hook(lambda *_: self._scale())

    @torch.no_grad()
    def _remember(self) -> None:
        self._before = {parameter: parameter.detach().clone() for parameter in self._scales}

    @torch.no_grad()
    def _scale(self) -> None:
        for parameter, (rows, columns) in self._scales.items():
            parameter.copy_(self._before.pop(parameter).lerp(parameter, (rows * columns).clamp_max(1)))


def step_scales(
    named: Iterable[tuple[str, nn.Parameter]], slices: Iterable[ScaledSlice] = ()
) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
    """For each matrix ``[m, n]`` of named parameters ``r [m, 1]`` and ``c [n]``; for its bias ``r [m]`` and ones.

    They are the root mean squares of rows and columns over that of the tensor; as for the sizes of tensors the zeros of
    padded heads do not count. The columns in ``slices``, which read the constant channel, are biases divided by it,
    often zero; `ConstantChannel` scales their steps, and only rows count here.
    """
    parameters = dict(named)
    constant = {getattr(part.module, part.kind): part.index for part in slices if part.axis == 1}
    scales: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
    for name, weight in parameters.items():
        if weight.dim() != 2:
            continue
        rows, columns = _relative_sizes(weight.detach())
        if weight in constant:
            columns[constant[weight]] = 1
        scales[weight] = rows[:, None], columns
        bias = parameters.get(f"{name.removesuffix('.weight')}.bias")
        if bias is not None:
            scales[bias] = rows, torch.ones_like(rows)
    return scales


def _relative_sizes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows and of the columns of ``weight [m, n]``: ``[m]`` and ``[n]``."""
    energy, filled = weight.float().square(), weight != 0
    mean = (energy.sum() / filled.sum().clamp_min(1)).clamp_min(torch.finfo(energy.dtype).tiny)
    rows, columns = ((energy.sum(axis) / filled.sum(axis).clamp_min(1) / mean).sqrt() for axis in (1, 0))
    return rows, columns
