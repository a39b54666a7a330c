"""A loaded transformers model as a stream of layers.

What surrounds the layers (embeddings, rotary tables, masks, final norm, head) is never written anew: the stock model's
own forward runs on a *frame*, a copy of the model that shares its parameters and has a stand-in for every layer. These
note what the stock model passes to each layer, and let a residual stream of ours reach the head.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.drift.recording import attention_of, run_layer
from kvfold.attention.drift.streams import LayerOutput, LayerStream


class _Stop(Exception):
    """Leaves the frame's forward before its head."""


@dataclass(frozen=True)
class _Arguments:
    """What the stock model passes a layer beside the residual stream."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Visit = Callable[[int, Tensor, _Arguments], Tensor]


def _pass_on(index: int, hidden: Tensor, arguments: _Arguments) -> Tensor:
    return hidden


class _StandIn(nn.Module):
    """Takes a decoder layer's place: looks like it from outside, and calls ``frame.visit`` instead."""

    def __init__(self, index: int, layer: nn.Module, frame: "_Frame") -> None:
        super().__init__()
        self.index = index
        self._behind = (layer, frame)  # in a tuple, so that neither becomes a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_behind")[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        frame = self._behind[1]
        after = frame.visit(self.index, hidden_states, _Arguments(args, kwargs))
        return (after,) if frame.tuples else after


class _Frame:
    """All of a model but its layers, computed on ``device`` in ``dtype``."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, device: torch.device, dtype: torch.dtype) -> None:
        self.visit: Visit = _pass_on
        self.device = device
        stand_ins = {id(layer): _StandIn(index, layer, self) for index, layer in enumerate(layers)}
        memo: dict[int, Any] = dict(stand_ins)
        if not _differs(model, device, dtype):
            memo |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model = _converted(copy.deepcopy(model, memo), device, dtype).eval()
        self.tuples = False
        self.tuples = self._takes_tuples(len(layers))

    def _takes_tuples(self, layers: int) -> bool:
        """Whether the model expects a tuple from its layers (some families do): it then unpacks our tensor instead."""
        dims: list[int] = []

        def visit(index: int, hidden: Tensor, arguments: _Arguments) -> Tensor:
            dims.append(hidden.dim())
            if index > 0 or layers == 1:
                raise _Stop
            return hidden

        self.run(torch.zeros(1, 2, dtype=torch.long), visit)
        return dims[-1] < dims[0]

    def run(self, tokens: Tensor, visit: Visit) -> Tensor | None:
        """The model's logits for ``tokens [B, T]``, or ``None`` when ``visit`` stopped before the head."""
        self.visit = visit
        try:
            return self.model(input_ids=tokens.to(self.device), use_cache=False).logits  # type: ignore[no-any-return]
        except _Stop:
            return None
        finally:
            self.visit = _pass_on


@dataclass(frozen=True)
class LoadedLayer:
    """One layer of a loaded model, with the arguments that the stock model would pass it."""

    layer: nn.Module
    arguments: Callable[[Tensor], _Arguments]

    def __call__(self, hidden: Tensor) -> LayerOutput:
        return self._run(hidden, whole=True)

    def attend(self, hidden: Tensor) -> LayerOutput:
        return self._run(hidden, whole=False)

    def _run(self, hidden: Tensor, whole: bool) -> LayerOutput:
        given = self.arguments(hidden)
        return run_layer(self.layer, hidden, given.args, given.kwargs, whole=whole)


class LoadedStream:
    """The layer stream of a causal language model that is in memory. The model itself is never changed.

    With another ``device`` or ``dtype`` than the model's, layers are copied there one at a time. Norms and rotary
    angles are computed in float32 by transformers whatever the dtype.
    """

    def __init__(
        self, model: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        first = next(model.parameters())
        self.model = model
        self.device = first.device if device is None else torch.device(device)
        self.dtype = first.dtype if dtype is None else dtype
        self._layers = decoder_layers(model)
        self._made: _Frame | None = None
        self._known: tuple[tuple[int, int], list[_Arguments]] | None = None

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def _frame(self) -> _Frame:
        if self._made is None:
            self._made = _Frame(self.model, self._layers, self.device, self.dtype)
        return self._made

    def embed(self, tokens: Tensor) -> Tensor:
        noted: list[_Arguments] = []
        entered: list[Tensor] = []

        def visit(index: int, hidden: Tensor, arguments: _Arguments) -> Tensor:
            noted.append(arguments)
            entered.append(hidden)
            if index == self.layers - 1:
                raise _Stop
            return hidden

        self._frame.run(tokens, visit)
        self._known = ((tokens.shape[0], tokens.shape[1]), noted)
        return entered[0]

    @contextmanager
    def open_layer(self, index: int) -> Iterator[LoadedLayer]:
        layer = self._layers[index]
        if _differs(layer, self.device, self.dtype):
            layer = _converted(copy.deepcopy(layer), self.device, self.dtype)
        with evaluating(layer):
            yield LoadedLayer(layer, lambda hidden: self._arguments(hidden)[index])

    def logits(self, hidden: Tensor) -> Tensor:
        def visit(index: int, entering: Tensor, arguments: _Arguments) -> Tensor:
            return hidden if index == self.layers - 1 else entering

        logits = self._frame.run(hidden.new_zeros(hidden.shape[:2], dtype=torch.long), visit)
        assert logits is not None  # visit never stops
        return logits

    @torch.no_grad()
    def cache_bytes_per_token(self) -> int:
        """By how much the model's own cache object grows per token: two short forward passes, in its own dtype."""
        with evaluating(self.model):
            return (_cache_bytes(self.model, 4) - _cache_bytes(self.model, 2)) // 2

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LoadedStream":
        return LoadedStream(self.model, self.device if device is None else device, dtype or self.dtype)

    def _arguments(self, hidden: Tensor) -> list[_Arguments]:
        shape = (hidden.shape[0], hidden.shape[1])
        if self._known is None or self._known[0] != shape:
            self.embed(torch.zeros(shape, dtype=torch.long))
        assert self._known is not None  # embed has just noted it
        return self._known[1]


def as_stream(
    model: nn.Module | LayerStream, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> LayerStream:
    """A loaded causal language model of transformers, or a stream, as a stream on ``device`` and in ``dtype``.

    ``None`` keeps the model's own. Raises ValueError for a model whose decoder layers cannot be found.
    """
    if isinstance(model, nn.Module):
        return LoadedStream(model, device, dtype)
    if not isinstance(model, LayerStream):
        raise ValueError(f"model: expected a transformers model or a LayerStream, found {type(model).__name__}")
    unchanged = device in (None, model.device) and dtype in (None, model.dtype)
    return model if unchanged else model.to(device=device, dtype=dtype)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of a model's decoder layers: as many as its config says, each with a self-attention."""
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    count = getattr(text, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            attention_of(module[0])
            return module
    raise ValueError(f"model: expected a list of {count} decoder layers in {type(model).__name__}, found none")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout off within, each submodule's training flag restored after."""
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


def _converted(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module`` moved and cast in place. Parameters kept in another dtype than the rest, and buffers, keep theirs."""
    first = next(module.parameters(), None)
    own = None if first is None else first.dtype
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype if parameter.dtype == own else None)
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if dtype == torch.float64 and config is not None:
            config._experts_implementation_internal = "eager"  # grouped matmuls have no float64
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


def _cache_bytes(model: nn.Module, tokens: int) -> int:
    device = next(model.parameters()).device
    cache = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=device), use_cache=True).past_key_values
    return tensor_bytes(cache)


def tensor_bytes(holder: Any) -> int:
    """Bytes of all tensors that an object holds in its attributes, lists and dicts, each counted once."""
    seen: set[int] = set()
    pending, total = [holder], 0
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, (type, nn.Module)):
            pending.extend(vars(item).values())
    return total
