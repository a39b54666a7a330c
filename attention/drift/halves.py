"""Decoder layers of encoder-decoders in two halves, each with one attention: to the text, then to the encoder.

A stock layer has both. A *half* is that layer run up to where the second attention begins, or from there on, so that
whatever measures layers with one attention measures these too::

    residual --> [ self-attention ] --> | --> [ attention to the encoder, MLP ] --> residual
                     first half         |          second half

The stock forward runs both: the first half leaves it early, the second has it skip the modules of the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.drift.frame import Arguments, Frame


@dataclass(frozen=True)
class _Places:
    """Modules of a stock layer: its attentions, those of the first half, and what the second half begins with.

    ``skipped`` has what each module of the first half gives when it is to change nothing.
    """

    text: str
    encoder: str
    skipped: dict[str, Callable[[Tensor], Any]]
    begins: tuple[str, ...]


_PLACES = (
    _Places(
        "layer.0.SelfAttention",
        "layer.1.EncDecAttention",
        {"layer.0": lambda hidden: (hidden, None, None)},
        ("layer.1",),
    ),
    _Places(
        "self_attn",
        "encoder_attn",
        {"self_attn": lambda hidden: (torch.zeros_like(hidden), None), "self_attn_layer_norm": lambda hidden: hidden},
        ("encoder_attn", "encoder_attn_layer_norm"),
    ),
)


class _Reached(Exception):
    """The second half begins, with this residual stream ``[B, T, E]``."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Half(nn.Module):
    """One half of the stock decoder layer ``layer``, whose modules and their names it has.

    ``attends_by`` is the name of its attention; ``crosses``: that is to the encoder's states. Raises ValueError for a
    layer of another kind than these.
    """

    def __init__(self, layer: nn.Module, crosses: bool) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self._behind = (layer,)  # in a tuple, so that it does not become a submodule
        names = {name for name, _ in layer.named_modules()}
        self._places = next((places for places in _PLACES if {places.text, places.encoder} <= names), None)
        if self._places is None:
            raise ValueError(f"layer: expected two attentions in {type(layer).__name__}, found none that are known")
        self.crosses, self.attends_by = crosses, self._places.encoder if crosses else self._places.text

    def owns(self, name: str) -> bool:
        """Whether the parameter ``name`` of the layer is one of this half."""
        first = name.startswith(tuple(f"{module}." for module in self._known.skipped))
        return first != self.crosses

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock layer's: the residual stream ``[B, T, E]`` after the half, or a tuple that begins with it."""
        layer = self._behind[0]
        if self.crosses:
            with self._skipping(layer):
                return layer(hidden, *args, **kwargs)
        with self._stopping(layer):
            try:
                layer(hidden, *args, **kwargs)
            except _Reached as reached:
                return reached.hidden
        raise ValueError(f"layer: expected {type(layer).__name__} to attend to the encoder, which it did not")

    @property
    def _known(self) -> _Places:
        assert self._places is not None  # as __init__ made sure
        return self._places

    @contextmanager
    def _skipping(self, layer: nn.Module) -> Iterator[None]:
        modules = {layer.get_submodule(name): given for name, given in self._known.skipped.items()}
        for module, given in modules.items():
            module.forward = lambda hidden, *args, given=given, **kwargs: given(hidden)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    @contextmanager
    def _stopping(self, layer: nn.Module) -> Iterator[None]:
        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            raise _Reached(args[0])

        hooks = [layer.get_submodule(name).register_forward_pre_hook(stop) for name in self._known.begins]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class HalvesFrame(Frame):
    """The frame of an encoder-decoder: its ``layers`` are the halves of the stock decoder's.

    T5's layers hand on a position bias, which the first makes: ``position_bias(tokens)`` gives it to all.
    """

    def __init__(self, model: Any, position_bias: Callable[[int], Tensor]) -> None:
        decoder = model.get_decoder()
        name, layers = next((n, m) for n, m in decoder.named_children() if isinstance(m, nn.ModuleList))
        decoder_path = next(path for path, module in model.named_modules() if module is decoder)
        self._position_bias, self._hands_on = position_bias, hasattr(layers[0], "layer")
        self.install(model, f"{decoder_path}.{name}", layers)
        self.encodes = False
        self.halves = [Half(layer, crosses) for layer in layers for crosses in (False, True)]

    def visited(self, index: int, hidden: Tensor, arguments: Arguments) -> Any:
        if not self._hands_on:
            return super().visited(index, hidden, arguments)
        mask, bias, *rest = arguments.args
        bias = self._position_bias(hidden.shape[1]) if bias is None else bias
        return super().visited(index, hidden, replace(arguments, args=(mask, bias, *rest))), bias, None
