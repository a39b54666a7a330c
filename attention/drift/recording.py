"""Runs one decoder layer of a transformers model and records the inputs and outputs of its
attention.

Every transformers family passes queries and keys, after rotary embedding and per-head norms, to an
attention function named in the config. For one call, that name is replaced with the recorder's,
which stores its arguments and calls the model's original function. The model's modules stay as they
are. Shapes: ``B`` sequences, ``T`` positions, ``E`` model dim, ``H`` query heads, ``G`` key/value
heads, ``D`` query/key dim of a head, ``Dv`` value dim of a head.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, Cache

RECORDER = "kvfold_recorder"
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")


class StopForward(Exception):
    """Raised in a hook to leave the forward pass of a stock module early."""


@dataclass(frozen=True)
class LayerArguments:
    """The arguments that a stock model passes to a decoder layer in addition to the residual
    stream, such as masks and rotary tables.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class LayerOutput:
    """The residual stream after one decoder layer, and the recorded inputs and outputs of the
    layer's attention.

    ``hidden`` is the residual stream after the layer, None if only the attention was run. ``query``
    and ``key`` are the inputs to the scores (after rotary embedding and per-head norms): the
    attention weights are ``softmax(softcap * tanh(scale * query . key / softcap))`` over the
    visible keys; most models have no softcap. ``sinks`` are the scores of an additional key whose
    value is zero. ``window`` is the number of keys that a query sees, including its own.
    ``context`` contains each head's weighted values before the output projection. A field is None
    if the model does not expose it.
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
    context: Tensor | None = None  # [B, T, H, Dv]

    @property
    def states(self) -> Tensor:
        """The residual stream ``[B, T, E]`` after the layer; only valid if the whole
        layer was run.
        """
        # None only if the attention was run alone
        assert self.hidden is not None
        return self.hidden


@dataclass
class _AttentionRecording:
    """What is recorded while one decoder layer runs; ``compute`` is the model's own attention
    function.
    """

    compute: Callable[..., Any] | None
    input: Tensor | None = None
    output: Tensor | None = None
    # fields of ``LayerOutput``; empty in families whose attention does not use transformers'
    # attention interface
    call: dict[str, Any] = field(default_factory=dict)


_current_recording: ContextVar[_AttentionRecording] = ContextVar("kvfold_recording")


@dataclass(frozen=True)
class OpenLayer:
    """One decoder layer that is loaded in memory and can be run alone.

    ``arguments`` returns the arguments that the stock model passes to the layer with a residual
    stream ``[B, T, E]``. ``tensors`` replace the module's parameters with the same names. ``guard``
    makes the context in which the module runs, which may explain its errors. ``dtype`` is that in
    which the layer runs if ``tensors`` are stored in others: each is cast for one call.
    """

    index: int
    module: nn.Module
    arguments: Callable[[Tensor], LayerArguments]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    dtype: torch.dtype | None = None

    def __call__(self, hidden: Tensor, whole: bool = True) -> LayerOutput:
        """Run the layer on the residual stream ``hidden [B, T, E]`` as the stock model would;
        ``whole=False`` stops after the attention.

        Gradients flow to ``tensors``. ``query`` and ``key`` of the result are None if the model's
        attention does not use transformers' attention interface, or if its mask contains more than
        causality and a window. Raises ValueError if the layer never calls its attention module.
        """
        layer = self.module
        tensors = {name: self._cast(tensor) for name, tensor in self.tensors.items()}
        hidden = hidden.to(next(iter(tensors.values()), hidden).device)
        arguments = self.arguments(hidden)
        args = (hidden, *map(_copy_cache, arguments.args))
        kwargs = {name: _copy_cache(value) for name, value in arguments.kwargs.items()}
        result = None
        attention = layer.get_submodule(find_attention_name(layer))
        with self.guard(), _record_attention(attention, whole) as recording, suppress(StopForward):
            result = functional_call(layer, tensors, args, kwargs)
        if recording.output is None or recording.input is None:
            raise ValueError(
                f"{type(layer).__name__} never called its attention module, so its attention"
                " cannot be measured; use a decoder layer that attends in every forward pass"
            )
        after = result[0] if isinstance(result, tuple) else result
        return LayerOutput(after, recording.output, recording.input, **recording.call)

    def attend(self, hidden: Tensor) -> LayerOutput:
        """Run the layer on ``hidden [B, T, E]`` up to its attention output; the residual stream
        after the layer is then None.
        """
        return self(hidden, whole=False)

    def run_submodule(self, name: str, inputs: Tensor) -> Tensor:
        """Return the output of the layer's submodule ``name`` for ``inputs``."""
        module = self.module.get_submodule(name)
        tensors = {
            key.removeprefix(f"{name}."): self._cast(tensor)
            for key, tensor in self.tensors.items()
            if key.startswith(f"{name}.")
        }
        result: Tensor = functional_call(module, tensors, (inputs,))
        return result

    def _cast(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the dtype of the layer; matrices that autocast would cast back are
        returned as they are.
        """
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        kind = tensor.device.type
        cast_back = torch.is_autocast_enabled(kind) and tensor.dim() == 2
        if cast_back and tensor.dtype == torch.get_autocast_dtype(kind):
            return tensor
        return tensor.to(self.dtype)


def _copy_cache(value: Any) -> Any:
    """Return a copy of an argument that is a cache, so that no call sees the tokens of another."""
    return copy.deepcopy(value) if isinstance(value, Cache) else value


def find_attention_name(layer: nn.Module) -> str:
    """Return the name of a decoder layer's self-attention module. Raises ValueError if it has none
    of the usual names.
    """
    for name in _ATTENTION_NAMES:
        if isinstance(getattr(layer, name, None), nn.Module):
            return name
    children = ", ".join(name for name, _ in layer.named_children()) or "none"
    known_names = " or ".join(_ATTENTION_NAMES)
    raise ValueError(
        f"the self-attention of a decoder layer must be named {known_names}; this layer has:"
        f" {children}"
    )


@contextmanager
def _record_attention(attention: nn.Module, whole: bool) -> Iterator[_AttentionRecording]:
    """Record the inputs and the output of the module ``attention`` that runs inside the context;
    unless ``whole``, stop the forward pass after it.
    """
    config: Any = getattr(attention, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    files = [sys.modules.get(kind.__module__) for kind in type(attention).__mro__]
    # "eager" is each modeling file's own function
    eagers = [getattr(file, "eager_attention_forward", None) for file in files]
    eager = next(filter(None, eagers), None)
    recording = _AttentionRecording(AttentionInterface().get(implementation, eager))

    def record_output(
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        recording.input = args[0] if args else kwargs["hidden_states"]
        result: Tensor = output[0] if isinstance(output, tuple) else output
        # the attention of some families (Bloom) adds the residual stream itself
        if len(args) > 1 and "residual" in signature(module.forward).parameters:
            result = result - args[1]
        recording.output = result
        if not whole:
            raise StopForward

    hook = attention.register_forward_hook(record_output, with_kwargs=True)
    token = _current_recording.set(recording)
    # families outside the attention interface may use the function's name for other purposes
    dispatches = hasattr(config, "_attn_implementation") and any(
        hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files
    )
    try:
        if dispatches:
            # the public setter also rewrites every sub-config
            config._attn_implementation_internal = RECORDER
        yield recording
    finally:
        if dispatches:
            config._attn_implementation_internal = implementation
        _current_recording.reset(token)
        hook.remove()


def _record_attention_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers that stores its arguments in the current recording and
    returns the result of the model's own function.
    """
    recording = _current_recording.get()
    assert recording.compute is not None
    result: tuple[Tensor, Tensor | None] = recording.compute(
        module, query, key, value, attention_mask, **options
    )
    length = query.shape[2]
    window = options.get("sliding_window")
    window = window if isinstance(window, int) and window < length else None
    scale = options.get("scaling")
    # with a cache or another sequence as keys, positions do not match rows
    plain = key.shape[2] == length
    # flash attention and flex attention have no dense mask
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        # a mask outweighs ``is_causal``. Its first and last row tell causality and window without a
        # reading of the whole matrix
        ends = attention_mask[..., [0, -1], :]
        seen = (ends if not ends.dtype.is_floating_point else ends == 0).sum(-1)
        reach = length if window is None else window
        plain = plain and bool((seen == torch.tensor([1, reach], device=seen.device)).all())
    else:
        # attention functions go by what the call says, then by what the module says
        causal = options.get("is_causal", getattr(module, "is_causal", True))
        plain = plain and causal is not False
    recording.call = {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": window,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "context": result[0],
    }
    if plain and options.get("position_bias") is None:
        recording.call |= {"query": query, "key": key}
    return result


AttentionInterface.register(RECORDER, _record_attention_call)
