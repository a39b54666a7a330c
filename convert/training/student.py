"""A converted model in memory: its attention as float32 masters, everything else frozen.

A forward pass runs the stock modules with the masters rounded to the dtype in which they will be stored, so that what
is trained and judged is what a reader of the checkpoint will load. The decoder layers and the head are run apart: the
logits of a few positions at a time are all that is ever in memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvfold.attention.drift.frame import Arguments, Frame, Stop, attention_name, layer_list
from kvfold.convert.errors import InputError
from kvfold.convert.stream.skeleton import empty_model
from kvfold.convert.stream.weight_map import Read, WeightMap
from kvfold.convert.training.constant import ConstantChannel
from kvfold.convert.training.rates import tensor_sizes


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained: its ``master``, the model's name for it, its layer's, and its stored dtype."""

    master: nn.Parameter
    target: str
    layer: int
    name: str
    stored: torch.dtype


class Student:
    """The model of ``config`` (config.json's content) from the stored tensors ``names``, which ``read`` gives.

    Those in ``trained``, with the dtypes that they are stored in, become masters. ``autocast`` is the dtype of matrix
    products, None for float32 everywhere. ``constant``: the latents have the constant channel, which is kept.
    """

    def __init__(
        self,
        config: dict[str, Any],
        read: Read,
        names: Mapping[str, object],
        trained: Mapping[str, torch.dtype],
        device: torch.device,
        autocast: torch.dtype | None = None,
        constant: bool = False,
    ) -> None:
        self.device, self._autocast = device, autocast
        self.model = empty_model(config, torch.float32, device)
        self.trained = _load(self.model, read, names, trained, device, autocast)
        self.channel = ConstantChannel(self.model) if constant else None
        if self.channel is not None:
            self.channel.install()
        self.vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        self.sizes = tensor_sizes(self.model, self.channel)
        self._frame = Frame(self.model)
        self.layers = len(self._frame.layers)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The masters that learn, by the names of ``sizes``."""
        return [(part.target, part.master) for part in self.trained.values() if part.master.requires_grad]

    def rounded(self) -> dict[str, Tensor]:
        """The trained tensors as they will be stored, on the CPU."""
        return {name: part.master.detach().to("cpu", part.stored, copy=True) for name, part in self.trained.items()}

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Set masters."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.trained[name].master.copy_(tensor)

    def hidden(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` -> the residual stream after the last layer, ``[B, T, E]``."""
        after: list[Tensor] = []
        weights = self._weights()

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            layer = self._frame.layers[index]
            output = functional_call(layer, weights[index], (hidden, *arguments.args), arguments.kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if index == len(self._frame.layers) - 1:
                after.append(hidden)
                raise Stop
            return hidden

        with self.precision():
            self._frame.run(visit, input_ids=tokens.to(self.device))
        return after[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer, ``[B, T, E]`` -> logits ``[B, T, V]``."""
        with self.precision():
            return self._frame.logits(hidden, inputs_embeds=hidden.detach())

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Matrix products in the dtype of the computation."""
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            yield

    def _weights(self) -> list[dict[str, Tensor]]:
        """The masters of every layer, rounded; gradients pass."""
        weights: list[dict[str, Tensor]] = [{} for _ in self._frame.layers]
        for part in self.trained.values():
            weights[part.layer][part.name] = part.master.to(part.stored).to(self._autocast or part.master.dtype)
        return weights


def _load(
    model: nn.Module,
    read: Read,
    names: Mapping[str, object],
    trained: Mapping[str, torch.dtype],
    device: torch.device,
    autocast: torch.dtype | None,
) -> dict[str, Trained]:
    """Give ``model`` its tensors; frozen matrices are kept in the dtype of matrix products."""
    weights = WeightMap(model, names)
    place = _places(model)
    masters: dict[str, Trained] = {}
    made: dict[str, Tensor] = {}
    for source in weights.sources.values():
        loaded = weights.load(source, read, torch.float32, device)
        chosen = [name for name in source.names if name in trained]
        if chosen and (source.converter is not None or source.target not in place):
            raise InputError(
                f"--polish: expected {chosen[0]} to be a parameter of a layer's attention, found it to be a part of "
                f"{source.target}; convert without --polish"
            )
        made.update(loaded)
        for name, tensor in loaded.items():
            _assign(model, name, tensor, bool(chosen), autocast)
        if chosen:
            layer, inside = place[source.target]
            master, stored = model.get_parameter(source.target), trained[chosen[0]]
            masters[chosen[0]] = Trained(master, source.target, layer, inside, stored)
    for name, other in weights.tied.items():
        if name not in made and other in made:
            _assign(model, name, made[other], False, autocast)
    return {name: masters[name] for name in trained}


def _assign(model: nn.Module, name: str, tensor: Tensor, trained: bool, autocast: torch.dtype | None) -> None:
    path, _, kind = name.rpartition(".")
    module = model.get_submodule(path)
    if kind not in module._parameters:
        module._buffers[kind] = tensor
        return
    if autocast is not None and not trained and tensor.dim() > 1 and not isinstance(module, nn.Embedding):
        tensor = tensor.to(autocast)
    module._parameters[kind] = nn.Parameter(tensor, requires_grad=trained)


def _places(model: nn.Module) -> dict[str, tuple[int, str]]:
    """The layer of every attention parameter, and its name in there."""
    path, layers = layer_list(model)
    return {
        f"{path}.{index}.{name}": (index, name)
        for index, layer in enumerate(layers)
        for name, _ in layer.named_parameters()
        if name.startswith(f"{attention_name(layer)}.")
    }
