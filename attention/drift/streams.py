"""Models as streams of layers that are opened one at a time, used for drift, calibration and
profiles.

Two models can process the same tokens side by side with only one layer of each in memory.
``make_layer_stream`` wraps loaded models; checkpoints on disk have their own streams. Shapes: ``B``
sequences, ``T`` positions, ``E`` model dim, ``V`` vocabulary.

Embeddings, rotary tables, masks, the final norm and the head are not reimplemented. The decoder
layers of a stock model are replaced by stand-ins. Its own forward then reveals the arguments of
each layer, and computes logits from any residual stream::

    tokens -> embedding -> [stand-in 0] -> ... -> [stand-in L-1] -> final norm -> head -> logits
                                 |   ^
              LayerArguments     v   |  hidden states to continue with, or StopForward
                           layer_function(index, hidden, arguments)
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache

from kvfold.attention.cache_rounding import RoundedCache
from kvfold.attention.drift.recording import (
    LayerArguments,
    LayerOutput,
    OpenLayer,
    StopForward,
    find_attention_name,
)

# One layer, in memory: takes the residual stream before it, ``[B, T, E]``, at a text's positions 0
# .. T-1.
StreamLayer = Callable[[Tensor], LayerOutput]


class LayerStream(Protocol):
    """A model whose layers are loaded and run one at a time, on ``device`` and in ``dtype``."""

    layers: int
    device: torch.device
    dtype: torch.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the residual stream before the first layer, ``[B, T, E]``, for
        ``tokens [B, T]``.
        """

    def open_layer(self, index: int) -> AbstractContextManager[StreamLayer]:
        """Load layer ``index`` into memory; it is freed when the context exits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` for the residual stream after the last layer, ``[B, T, E]``,
        by the final norm and head.
        """

    def measure_cache_bytes_per_token(self) -> int:
        """Return by how many bytes per token the model's generation cache grows, summed over all
        layers.
        """

    def to(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "LayerStream":
        """Return a stream of the same model on another device or in another dtype; None keeps the
        present one.
        """


def make_layer_stream(
    model: nn.Module | LayerStream,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerStream:
    """Return ``model`` as a layer stream, which runs it one layer at a time on ``device`` and in
    ``dtype``; ``model`` is a loaded transformers causal language model or a stream already.

    None keeps the model's own. Raises ValueError if the model's decoder layers cannot be found.
    """
    if isinstance(model, nn.Module):
        return LoadedStream(model, device, dtype)
    if device is None and dtype is None:
        return model
    return model.to(device=device, dtype=dtype)


class LoadedStream:
    """The layer stream of a causal language model that is loaded in memory. The model itself is
    never changed.

    If ``device`` or ``dtype`` differs from the model's, a layer is copied to that device and dtype
    when it is opened, one at a time. transformers computes norms and rotary angles in float32 for
    any dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        first = next(model.parameters())
        self.model = model
        self._stored = first.dtype
        # of a tensor: "cuda" is "cuda:0" then
        self.device = torch.empty(0, device=first.device if device is None else device).device
        self.dtype = dtype or first.dtype
        # deepcopy takes what its memo holds: modules are copied, for modes of their own, and
        # tensors are shared
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        copied = copy.deepcopy(model, memo).eval()
        for module in copied.modules():
            config: Any = getattr(module, "config", None)
            if self.dtype == torch.float64 and config is not None:
                # grouped matmuls have no float64
                config._experts_implementation_internal = "eager"
        self._frame = LayerlessModel(copied)
        self.layers = len(self._frame.layers)
        self._ends = self._collect_cast_tensors(copied)
        # the arguments of every layer, by the shape of the tokens that were embedded last
        self._recorded: dict[torch.Size, list[LayerArguments]] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the residual stream before the first layer, ``[B, T, E]``, for ``tokens [B, T]``;
        records the arguments of every layer.
        """
        hidden, arguments = self._frame.run_to_first_layer(
            self._ends, input_ids=tokens.to(self.device)
        )
        self._recorded = {tokens.shape: arguments}
        return hidden

    @contextmanager
    def open_layer(self, index: int) -> Iterator[OpenLayer]:
        """Yield layer ``index`` with its tensors on the stream's device and in its dtype."""

        def get_arguments(hidden: Tensor) -> LayerArguments:
            shape = hidden.shape[:2]
            if shape not in self._recorded:
                self.embed(torch.zeros(shape, dtype=torch.long))
            return self._recorded[shape][index]

        layer = self._frame.layers[index]
        yield OpenLayer(index, layer, get_arguments, self._collect_cast_tensors(layer))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` for ``hidden [B, T, E]``, the residual stream after the last
        layer.
        """
        blank = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        return self._frame.compute_logits(hidden, self._ends, input_ids=blank)

    @torch.no_grad()
    def measure_cache_bytes_per_token(self) -> int:
        """Return by how many bytes per token the model's generation cache grows, summed over all
        layers.
        """
        # generation runs in the dtype of the model itself, whatever the stream computes in
        device = next(self.model.parameters()).device

        def run_to_first_layer(count: int) -> tuple[Tensor, list[LayerArguments]]:
            blank = torch.zeros(1, count, dtype=torch.long, device=device)
            return self._frame.run_to_first_layer(input_ids=blank, use_cache=True)

        return measure_cache_bytes_per_token(self._frame.layers, run_to_first_layer)

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LoadedStream":
        """Return a stream of the same model on another device or in another dtype; None keeps the
        present one.
        """
        return LoadedStream(self.model, device or self.device, dtype or self.dtype)

    def _collect_cast_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of ``module`` by name on the stream's device, with parameters of the
        model's dtype cast to the stream's.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            dtype = self.dtype if parameter.dtype == self._stored else parameter.dtype
            tensors[name] = parameter.to(self.device, dtype)
        for name, buffer in module.named_buffers():
            tensors[name] = buffer.to(self.device)
        return tensors


LayerFunction = Callable[[int, Tensor, LayerArguments], Tensor]


class LayerlessModel:
    """A stock ``model`` without its decoder ``layers``: stand-ins in their place pass what they
    receive to ``layer_function``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.path, layers = find_decoder_layers(model)
        self.layers = list(layers)
        self.layer_function: LayerFunction
        # some families (bloom) unpack layer outputs; ``run_to_first_layer`` and ``compute_logits``
        # detect this from the tensor's shape
        self.returns_tuples = False
        parent, _, name = self.path.rpartition(".")
        stand_ins = (_LayerStandIn(index, layer, self) for index, layer in enumerate(layers))
        setattr(model.get_submodule(parent), name, nn.ModuleList(stand_ins))

    def run_model(
        self,
        layer_function: LayerFunction,
        tensors: Mapping[str, Tensor] | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the stock model's output for ``inputs``, or None if ``layer_function``, which
        every stand-in calls, raised ``StopForward``.

        ``tensors`` replace the parameters and buffers with the same names.
        """
        # stand-ins leave a cache unfilled, which stock models would then read
        inputs = {"use_cache": False, **inputs}
        self.layer_function = layer_function
        with suppress(StopForward):
            return functional_call(self.model, dict(tensors or {}), (), inputs, strict=False)

    def run_to_first_layer(
        self, tensors: Mapping[str, Tensor] | None = None, **inputs: Any
    ) -> tuple[Tensor, list[LayerArguments]]:
        """Return the residual stream before the first layer, ``[B, T, E]``, and the arguments that
        the stock model passes to each layer.
        """
        entered: list[Tensor] = []
        recorded: list[LayerArguments] = []

        def layer_function(index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
            entered.append(hidden)
            recorded.append(arguments)
            # the model took the first sequence for the whole batch
            self.returns_tuples |= hidden.dim() < entered[0].dim()
            if index == len(self.layers) - 1:
                raise StopForward
            return entered[0] if self.returns_tuples else hidden

        self.run_model(layer_function, tensors, **inputs)
        return entered[0], recorded

    def compute_logits(
        self,
        hidden: Tensor,
        tensors: Mapping[str, Tensor] | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return logits ``[B, T, V]`` for ``hidden [B, T, E]``, the residual stream after the last
        layer. Only the shape of ``inputs`` matters.
        """

        def layer_function(index: int, entering: Tensor, arguments: LayerArguments) -> Tensor:
            return hidden if index == len(self.layers) - 1 else entering

        logits: Tensor = self.run_model(layer_function, tensors, **inputs).logits
        if logits.dim() == hidden.dim():
            return logits
        # the model took the first row of a stand-in's tensor for the whole output
        self.returns_tuples = True
        return self.compute_logits(hidden, tensors, **inputs)


class _LayerStandIn(nn.Module):
    """A module in place of a decoder layer: has the layer's attributes, but its forward calls the
    model's ``layer_function`` instead of the layer.
    """

    def __init__(self, index: int, layer: nn.Module, frame: LayerlessModel) -> None:
        super().__init__()
        self.index = index
        # in a tuple, so that neither becomes a submodule
        self._layer_and_frame = (layer, frame)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced decoder layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_layer_and_frame")[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Return what the model's ``layer_function`` returns for this layer's inputs."""
        frame = self._layer_and_frame[1]
        hidden = frame.layer_function(self.index, hidden_states, LayerArguments(args, kwargs))
        return (hidden,) if frame.returns_tuples else hidden


def find_decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of a model's decoder layers: ``num_hidden_layers`` modules with
    self-attention.

    Raises ValueError if there is no such list.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    count = getattr(text, "num_hidden_layers", None)
    # a wrapper's vision tower may be as deep
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    decoder_modules = set(decoder.modules())
    for path, module in model.named_modules():
        if module in decoder_modules and isinstance(module, nn.ModuleList) and len(module) == count:
            find_attention_name(module[0])
            return path, module
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of decoder layers that matches num_hidden_layers"
        f" in its config ({count}); use a causal language model from transformers"
    )


def measure_cache_bytes_per_token(
    layers: Sequence[nn.Module],
    run_to_first_layer: Callable[[int], tuple[Tensor, Sequence[LayerArguments]]],
) -> int:
    """Return by how many bytes per token the generation cache grows, summed over all layers.

    ``run_to_first_layer(count)`` returns the result of ``LayerlessModel.run_to_first_layer(...,
    use_cache=True)`` for a sequence of ``count`` tokens; its arguments include the cache object
    that the stock model creates for generation. The model may be on the meta device.
    """

    def stop_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        raise StopForward

    sizes = []
    for count in (2, 4):
        hidden, arguments = run_to_first_layer(count)
        caches: set[Cache] = set()
        for layer, call in zip(layers, arguments, strict=True):
            attention = layer.get_submodule(find_attention_name(layer))
            # the cache is filled before the attention returns: the rest of the layer is not needed
            with suppress(StopForward), attention.register_forward_hook(stop_forward):
                layer(hidden, *call.args, **call.kwargs)
            # all layers are given the same object
            values = (*call.args, *call.kwargs.values())
            caches.update(value for value in values if isinstance(value, Cache))
        sizes.append(sum(map(_count_cache_bits, caches)))
    # the difference excludes tensors whose size does not depend on the length
    return (sizes[1] - sizes[0]) // 16


def _count_cache_bits(cache: Cache) -> int:
    """Return how many bits the tensors in ``cache`` take."""
    if isinstance(cache, RoundedCache):
        return cache.count_bits()
    tensors = [value for layer in cache.layers for value in vars(layer).values()]
    return 8 * sum(value.nbytes for value in tensors if isinstance(value, Tensor))
