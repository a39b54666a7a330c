"""A stock model without its decoder layers; everything around them runs as in transformers.

Embeddings, rotary tables, masks, the final norm and the head are not reimplemented. A *frame* is a
stock model whose decoder layers are replaced by stand-ins. Its own forward then reveals the
arguments of each layer, and computes logits from any residual stream::

    tokens -> embedding -> [stand-in 0] -> ... -> [stand-in L-1] -> final norm -> head -> logits
                                 |   ^
              hidden, Arguments  v   |  hidden states to continue with, or Stop
                           visit(index, hidden, arguments)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")


class Stop(Exception):
    """Raised to leave the forward of a stock module early."""


@dataclass(frozen=True)
class Arguments:
    """Arguments passed to a stock decoder layer in addition to the residual stream."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Visit = Callable[[int, Tensor, Arguments], Tensor]


class StandIn(nn.Module):
    """Replaces a decoder layer in the stock forward: has the layer's attributes, but calls the
    frame's ``visit``.
    """

    def __init__(self, index: int, layer: nn.Module, frame: "Frame") -> None:
        super().__init__()
        self.index = index
        # in a tuple, so that neither becomes a submodule
        self._behind = (layer, frame)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_behind")[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        frame = self._behind[1]
        after: Tensor = frame.visit(self.index, hidden_states, Arguments(args, kwargs))
        return (after,) if frame.returns_tuples else after


class Frame:
    """``model`` with its decoder ``layers`` replaced by stand-ins, in place."""

    def __init__(self, model: nn.Module) -> None:
        path, layers = layer_list(model)
        self.model, self.path, self.layers = model, path, list(layers)
        self.visit: Visit
        # some families (bloom) unpack layer outputs; ``enter`` and ``logits`` detect this from the
        # tensor's shape
        self.returns_tuples = False
        parent, _, name = path.rpartition(".")
        stand_ins = nn.ModuleList(
            StandIn(index, layer, self) for index, layer in enumerate(self.layers)
        )
        setattr(model.get_submodule(parent), name, stand_ins)

    def run(self, visit: Visit, tensors: Mapping[str, Tensor] | None = None, **inputs: Any) -> Any:
        """The stock forward's output for ``inputs``, or None if ``visit`` raised ``Stop``.

        ``tensors`` replace the parameters and buffers with the same names.
        """
        # stand-ins leave a cache unfilled, which stock models would then read
        inputs = {"use_cache": False, **inputs}
        self.visit = visit
        try:
            return functional_call(self.model, dict(tensors or {}), (), inputs, strict=False)
        except Stop:
            return None

    def enter(
        self, tensors: Mapping[str, Tensor] | None = None, **inputs: Any
    ) -> tuple[Tensor, list[Arguments]]:
        """The residual stream before the first layer, ``[B, T, E]``, and the arguments of every
        layer.
        """
        entered: list[Tensor] = []
        recorded: list[Arguments] = []

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            entered.append(hidden)
            recorded.append(arguments)
            self.returns_tuples |= hidden.dim() < entered[0].dim()
            # the model took the first sequence for the whole batch
            if index and self.returns_tuples:
                hidden = entered[0]
            if index == len(self.layers) - 1:
                raise Stop
            return hidden

        self.run(visit, tensors, **inputs)
        return entered[0], recorded

    def logits(
        self, hidden: Tensor, tensors: Mapping[str, Tensor] | None = None, **inputs: Any
    ) -> Tensor:
        """Logits ``[B, T, V]`` for the residual stream after the last layer; only the shape of
        ``inputs`` matters.
        """

        def visit(index: int, entering: Tensor, arguments: Arguments) -> Tensor:
            return hidden if index == len(self.layers) - 1 else entering

        logits: Tensor = self.run(visit, tensors, **inputs).logits
        if logits.dim() == hidden.dim():
            return logits
        # the model took the first row of a stand-in's tensor for the whole output
        self.returns_tuples = True
        return self.logits(hidden, tensors, **inputs)


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of a model's decoder layers: ``num_hidden_layers`` modules with
    self-attention.

    Raises ValueError if there is no such list.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    count = getattr(text, "num_hidden_layers", None)
    # a wrapper's vision tower may be as deep
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    inside = {id(module) for module in decoder.modules()}
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and count
            and id(module) in inside
        ):
            attention_name(module[0])
            return path, module
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of decoder layers that matches num_hidden_layers"
        f" in its config ({count}); use a causal language model from transformers"
    )


def attention_name(layer: nn.Module) -> str:
    """The name of a decoder layer's self-attention module. Raises ValueError if it has none of the
    usual names.
    """
    for name in _ATTENTION_NAMES:
        if isinstance(getattr(layer, name, None), nn.Module):
            return name
    children = ", ".join(name for name, _ in layer.named_children()) or "none"
    names = " or ".join(_ATTENTION_NAMES)
    raise ValueError(
        f"the self-attention of a decoder layer must be named {names}; this layer has: {children}"
    )


def cache_bytes_per_token(
    layers: Sequence[nn.Module], enter: Callable[[int], tuple[Tensor, Sequence[Arguments]]]
) -> int:
    """Growth of the generation cache in bytes per token, summed over all layers.

    ``enter(tokens)`` returns the result of ``Frame.enter(..., use_cache=True)`` for one sequence;
    its arguments include the cache object that the stock model creates for generation. The model
    may be on the meta device.
    """

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        raise Stop

    sizes = []
    for tokens in (2, 4):
        hidden, arguments = enter(tokens)
        for layer, call in zip(layers, arguments, strict=True):
            # the cache is filled before the attention returns: the rest of the layer is not needed
            with (
                suppress(Stop),
                layer.get_submodule(attention_name(layer)).register_forward_hook(stop),
            ):
                layer(hidden, *call.args, **call.kwargs)
        passed = [value for call in arguments for value in (*call.args, *call.kwargs.values())]
        # all layers are given the same object
        caches = {id(value): value for value in passed if isinstance(value, Cache)}.values()
        held = [
            value for cache in caches for layer in cache.layers for value in vars(layer).values()
        ]
        sizes.append(sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor)))
    # the difference excludes tensors whose size does not depend on the length
    return (sizes[1] - sizes[0]) // 2
