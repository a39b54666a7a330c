"""The protocol that drift, calibration and profiles run models by: a stream of layers, opened one at a time.

A *layer stream* runs a decoder layer by layer, so that two models can go through the same tokens side by side with only
one layer of each in memory. Loaded models are wrapped by ``as_stream`` (loaded.py); checkpoints on disk have streams
of their own. Shapes: ``B`` sequences, ``T`` positions, ``E`` model dim, ``V`` vocabulary, ``H`` query heads, ``G``
key/value heads, ``D`` query/key dim of a head, ``Dv`` value dim of a head.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerOutput:
    """The residual stream after one layer, and what its attention did.

    ``hidden`` is the residual stream after the layer, ``None`` when only the attention was run. ``query`` and ``key``
    are what the scores are made of (after rotary embedding and per-head norms): the attention weights are
    ``softmax(softcap * tanh(scale * query . key / softcap))`` over the keys that the mask leaves, the softcap being
    absent for most models. ``sinks`` are the scores of one more key, whose value is zero. ``window`` is the number of
    keys a query sees, itself included; without ``causal`` it sees as many on its other side. ``context`` holds each
    head's weighted values before the output projection, whose weight is ``output_weight``: head ``h`` adds
    ``output_weight[:, h] @ context[b, t, h]`` to the attention's output. ``None`` is what a model does not show.
    """

    hidden: Tensor | None  # [B, T, E]
    attention: Tensor  # [B, T, E], after the output projection
    attention_input: Tensor  # [B, T, E], after the layer's norm
    query: Tensor | None = None  # [B, H, T, D]
    key: Tensor | None = None  # [B, G, T, D]
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]
    causal: bool = True
    context: Tensor | None = None  # [B, T, H, Dv]
    output_weight: Tensor | None = None  # [E, H, Dv]

    @property
    def states(self) -> Tensor:
        """``hidden`` of a whole layer."""
        # an attention run alone has none
        assert self.hidden is not None
        return self.hidden


# One layer, in memory: takes the residual stream before it, ``[B, T, E]``, at a text's positions 0 .. T-1.
StreamLayer = Callable[[Tensor], LayerOutput]


@runtime_checkable
class LayerStream(Protocol):
    """A model as a sequence of layers. ``device`` and ``dtype`` are those of the computation."""

    layers: int
    device: torch.device
    dtype: torch.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` to the residual stream before the first layer, ``[B, T, E]``."""
        ...

    def open_layer(self, index: int) -> AbstractContextManager[StreamLayer]:
        """Materialize layer ``index``; it is freed when the context ends."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer ``[B, T, E]`` to logits ``[B, T, V]``: final norm and head."""
        ...

    def cache_bytes_per_token(self) -> int:
        """Bytes that one more token takes in the cache object that generation really uses, all layers together."""
        ...

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LayerStream":
        """The same model, computed elsewhere or in another precision."""
        ...
