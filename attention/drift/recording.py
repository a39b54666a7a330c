"""Run one decoder layer of a transformers model and record what its attention did.

Queries and keys are taken where every transformers family hands them over, after rotary embedding and per-head norms:
the recorder is named in the config as the attention function for the length of one call; it notes its arguments and
lets the function that the model would have used compute the result. Nothing of the model is replaced. Shapes: ``B``
sequences, ``T`` positions, ``E`` model dim, ``H`` query heads, ``G`` key/value heads, ``D`` query/key dim of a head,
``Dv`` value dim of a head.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface

from kvfold.attention.drift.frame import Arguments, Stop, attention_name

RECORDER = "kvfold_recorder"
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


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


@dataclass
class _Recording:
    """The record of one layer's run. ``compute`` is the attention function that the model really uses."""

    compute: Callable[..., Any] | None
    input: Tensor | None = None
    output: Tensor | None = None
    # fields of ``LayerOutput``; none in families whose attention does not go through transformers' interface
    call: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[_Recording] = ContextVar("kvfold_recording")


@dataclass(frozen=True)
class OpenLayer:
    """One layer of a stream, in memory.

    ``arguments`` gives what the stock model passes the layer in addition to a residual stream ``[B, T, E]``.
    ``tensors`` take the place of the module's own parameters, under the same names; None runs the module as it is.
    """

    index: int
    module: nn.Module
    arguments: Callable[[Tensor], Arguments]
    tensors: dict[str, Tensor] | None = None

    def __call__(self, hidden: Tensor) -> LayerOutput:
        """Run the whole layer on ``hidden [B, T, E]``."""
        return run_layer(self.module, hidden, self.arguments(hidden), self.tensors)

    def attend(self, hidden: Tensor) -> LayerOutput:
        """Run the layer up to its attention's output only: ``hidden`` of the result is None."""
        return run_layer(self.module, hidden, self.arguments(hidden), self.tensors, whole=False)

    def run_submodule(self, name: str, inputs: Tensor) -> Tensor:
        """The output of the layer's module ``name`` for ``inputs``."""
        module = self.module.get_submodule(name)
        prefix = f"{name}."
        tensors = {
            key.removeprefix(prefix): value for key, value in (self.tensors or {}).items() if key.startswith(prefix)
        }
        result: Tensor = functional_call(module, tensors, (inputs,))
        return result


def run_layer(
    layer: nn.Module,
    hidden: Tensor,
    arguments: Arguments,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    whole: bool = True,
) -> LayerOutput:
    """Run ``layer`` on ``hidden [B, T, E]`` as the stock model would, or only as far as its attention's output.

    ``tensors`` are used for the layer's parameters of those names; gradients flow to them. ``query`` and ``key`` of the
    result are None for models whose attention does not go through transformers' attention interface, or whose mask
    says more than causality and a window. Raises ValueError for a layer that never calls its attention module.
    """
    with _recording(layer.get_submodule(attention_name(layer)), whole) as recording:
        try:
            result = functional_call(layer, dict(tensors or {}), (hidden, *arguments.args), arguments.kwargs)
        except Stop:
            result = None
    if recording.output is None or recording.input is None:
        raise ValueError(f"{type(layer).__name__} never called its attention module, so nothing of it was recorded")
    after = result[0] if isinstance(result, tuple) else result
    return LayerOutput(after, recording.output, recording.input, **recording.call)


@contextmanager
def _recording(attention: nn.Module, whole: bool) -> Iterator[_Recording]:
    """Record what ``attention`` is given and what it returns."""
    config = getattr(attention, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    files = [sys.modules.get(kind.__module__) for kind in type(attention).__mro__]
    # "eager" is each modeling file's own function
    eagers = [getattr(file, "eager_attention_forward", None) for file in files]
    recording = _Recording(AttentionInterface().get(implementation, next(filter(None, eagers), None)))

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        recording.input = args[0] if args else kwargs["hidden_states"]
        found: Tensor = output[0] if isinstance(output, tuple) else output
        # the attention of some families (Bloom) adds the residual stream itself
        adds = len(args) > 1 and "residual" in signature(module.forward).parameters
        recording.output = found - args[1] if adds else found
        # read within the call, where it may be one of ``tensors``
        weight = _output_weight(module)
        context = recording.call.pop("context", None)
        if context is not None and weight is not None and weight.shape == (found.shape[-1], context[0, 0].numel()):
            recording.call |= {"context": context, "output_weight": weight.view(len(weight), *context.shape[2:])}
        if not whole:
            raise Stop

    hook = attention.register_forward_hook(note, with_kwargs=True)
    token = _current.set(recording)
    # families outside of the interface may read the name of the function for rules of theirs
    dispatches = hasattr(config, "_attn_implementation") and any(
        hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files
    )
    try:
        if dispatches:
            # the public setter also rewrites every sub-config
            config._attn_implementation_internal = RECORDER  # type: ignore[union-attr]
        yield recording
    finally:
        if dispatches:
            config._attn_implementation_internal = implementation  # type: ignore[union-attr]
        _current.reset(token)
        hook.remove()


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: notes the call and computes it as the model would have."""
    recording = _current.get()
    assert recording.compute is not None
    result: tuple[Tensor, Tensor | None] = recording.compute(module, query, key, value, attention_mask, **options)
    length, window, scale = query.shape[2], options.get("sliding_window"), options.get("scaling")
    window = window if isinstance(window, int) and window < length else None
    # without a mask, attention functions go by what the call says, then by what the module says
    causal = options.get("is_causal", bool(getattr(module, "is_causal", True))) is not False
    # with a cache or another sequence as keys, positions do not match rows
    plain = key.shape[2] == length
    # flash attention and flex attention have no dense mask
    if plain and isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        reach = length if window is None else window
        # a mask outweighs ``is_causal``. Its first and last row tell causality and window without a reading of the
        # whole matrix: the first query of a causal mask sees itself alone, the last one ``window`` keys
        ends = attention_mask[..., [0, -1], :]
        first, last = (ends if not ends.dtype.is_floating_point else ends == 0).sum(-1).unbind(-1)
        causal = bool((first == 1).all())
        plain = bool((last == reach).all()) and (causal or bool((first == reach).all()))
    recording.call = {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": window,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "causal": causal,
        "context": result[0],
    }
    if plain and options.get("position_bias") is None:
        recording.call |= {"query": query, "key": key}
    return result


AttentionInterface.register(RECORDER, _record)


def _output_weight(attention: nn.Module) -> Tensor | None:
    """The weight of the output projection in ``attention`` as ``[E, H * Dv]``, stored either way."""
    for projection in (getattr(attention, name, None) for name in _OUTPUT_NAMES):
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return (weight.T if type(projection).__name__ == "Conv1D" else weight).detach()
    return None
