"""Models as streams of layers that are opened one at a time, used for drift, calibration and
profiles.

Two models can process the same tokens side by side with only one layer of each in memory.
``as_stream`` wraps loaded models; checkpoints on disk have their own streams. Shapes: ``B``
sequences, ``T`` positions, ``E`` model dim, ``V`` vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvfold.attention.drift.frame import Arguments, Frame, cache_bytes_per_token, layer_list
from kvfold.attention.drift.recording import LayerOutput, OpenLayer

# One layer, in memory: takes the residual stream before it, ``[B, T, E]``, at a text's positions 0
# .. T-1.
StreamLayer = Callable[[Tensor], LayerOutput]


@runtime_checkable
class LayerStream(Protocol):
    """A model as a sequence of layers, computed on ``device`` and in ``dtype``."""

    layers: int
    device: torch.device
    dtype: torch.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens [B, T]``: the residual stream before the first layer, ``[B, T, E]``."""

    def open_layer(self, index: int) -> AbstractContextManager[StreamLayer]:
        """Load layer ``index`` into memory; it is freed when the context exits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head to the residual stream after the last layer: ``[B, T, E]`` ->
        ``[B, T, V]``.
        """

    def cache_bytes_per_token(self) -> int:
        """Bytes that each token adds to the cache object that generation uses, summed over all
        layers.
        """

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LayerStream":
        """The same model, computed on another device or in another dtype."""


class LoadedStream:
    """The layer stream of a causal language model in memory. The model itself is never changed.

    If ``device`` or ``dtype`` differs from the model's, layers are copied and converted one at a
    time. transformers computes norms and rotary angles in float32 for any dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = next(model.parameters())
        self.model = model
        # of a tensor: "cuda" is "cuda:0" then
        self.device = first.device if device is None else torch.empty(0, device=device).device
        self.dtype = first.dtype if dtype is None else dtype
        self._layers = list(layer_list(model)[1])
        self.layers = len(self._layers)
        # the arguments of every layer, by the shape of the tokens that were embedded last
        self._recorded: dict[tuple[int, ...], list[Arguments]] = {}

    @cached_property
    def _frame(self) -> Frame:
        """A copy of the model without layers, on the stream's device and in its dtype; shares
        tensors if possible.
        """
        # deepcopy takes what its memo holds: layers are shared, not copied
        memo: dict[int, Any] = {id(layer): layer for layer in self._layers}
        if not _differs(self.model, self.device, self.dtype):
            memo |= {
                id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())
            }
        frame = Frame(copy.deepcopy(self.model, memo))
        _convert(frame.model, self.device, self.dtype).eval()
        return frame

    def embed(self, tokens: Tensor) -> Tensor:
        hidden, arguments = self._frame.enter(input_ids=tokens.to(self.device))
        self._recorded = {tuple(tokens.shape): arguments}
        return hidden

    @contextmanager
    def open_layer(self, index: int) -> Iterator[OpenLayer]:
        def arguments(hidden: Tensor) -> Arguments:
            shape = tuple(hidden.shape[:2])
            if shape not in self._recorded:
                self.embed(torch.zeros(shape, dtype=torch.long))
            return self._recorded[shape][index]

        layer = self._layers[index]
        if _differs(layer, self.device, self.dtype):
            layer = _convert(copy.deepcopy(layer), self.device, self.dtype)
        with evaluating(layer):
            yield OpenLayer(index, layer, arguments)

    def logits(self, hidden: Tensor) -> Tensor:
        blank = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        return self._frame.logits(hidden, input_ids=blank)

    @torch.no_grad()
    def cache_bytes_per_token(self) -> int:
        # generation runs in the dtype of the model itself, whatever the stream computes in
        if _differs(self.model, self.device, self.dtype):
            return LoadedStream(self.model).cache_bytes_per_token()

        def enter(tokens: int) -> tuple[Tensor, list[Arguments]]:
            blank = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
            return self._frame.enter(input_ids=blank, use_cache=True)

        with evaluating(self.model):
            return cache_bytes_per_token(self._layers, enter)

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LoadedStream":
        return LoadedStream(
            self.model, self.device if device is None else device, dtype or self.dtype
        )


def as_stream(
    model: nn.Module | LayerStream,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerStream:
    """A stream on ``device`` and in ``dtype`` for a loaded transformers causal language model or an
    existing stream.

    None keeps the model's own. Raises ValueError for other types, or if the model's decoder layers
    cannot be found.
    """
    if isinstance(model, nn.Module):
        return LoadedStream(model, device, dtype)
    if not isinstance(model, LayerStream):
        raise ValueError(
            f"the model has type {type(model).__name__!r}; it must be a transformers model or a"
            " LayerStream"
        )
    unchanged = (device is None or torch.device(device) == model.device) and dtype in (
        None,
        model.dtype,
    )
    return model if unchanged else model.to(device=device, dtype=dtype)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Turn dropout off inside the context, then restore the training flag of each submodule."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _differs(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    first = next(module.parameters())
    return first.device != device or first.dtype != dtype


def _convert(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move and cast ``module`` in place. Buffers, and parameters in another dtype than the first,
    keep their dtype.
    """
    first = next(module.parameters(), None)
    main = None if first is None else first.dtype
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype if parameter.dtype == main else None)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if dtype == torch.float64 and config is not None:
            # grouped matmuls have no float64
            config._experts_implementation_internal = "eager"
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module
