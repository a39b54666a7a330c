"""Run one decoder layer of a transformers model and record what its attention did.

Queries and keys are taken where every transformers family hands them over, after rotary embedding and per-head norms:
the recorder is named in the config as the attention function for the length of one call; it notes its arguments and
lets the function that the model would have used compute the result. Nothing of the model is replaced.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface

from kvfold.attention.drift.frame import Arguments, Stop, attention_of
from kvfold.attention.drift.streams import LayerOutput

RECORDER = "kvfold_recorder"
_RESIDUAL = "residual"
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


@dataclass(frozen=True)
class _Call:
    """The arguments of one attention call, and each head's result ``context [B, T, H, Dv]``."""

    query: Tensor
    key: Tensor
    mask: Any
    options: Mapping[str, Any]
    context: Tensor


@dataclass
class _Recording:
    """The record of one layer's run. ``implementation`` is the attention function that the model really uses."""

    implementation: str
    input: Tensor | None = None
    residual: Tensor | None = None  # what the module itself adds its output to (bloom)
    output: Tensor | None = None
    output_weight: Tensor | None = None
    call: _Call | None = None


_current: ContextVar[_Recording] = ContextVar("kvfold_recording")


@dataclass(frozen=True)
class OpenLayer:
    """One layer of a stream, in memory.

    ``arguments`` gives what the stock model passes the layer beside a residual stream ``[B, T, E]``. ``tensors`` take
    the place of the module's own parameters, under the same names; None runs the module as it is.
    """

    index: int
    module: nn.Module
    arguments: Callable[[Tensor], Arguments]
    tensors: dict[str, Tensor] | None = None

    def __call__(self, hidden: Tensor) -> LayerOutput:
        """Run the whole layer on ``hidden [B, T, E]``."""
        arguments = self.arguments(hidden)
        return run_layer(self.module, hidden, arguments.args, arguments.kwargs, self.tensors)

    def attend(self, hidden: Tensor) -> LayerOutput:
        """Run the layer up to its attention's output only: ``hidden`` of the result is None."""
        arguments = self.arguments(hidden)
        return run_layer(self.module, hidden, arguments.args, arguments.kwargs, self.tensors, whole=False)

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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    whole: bool = True,
) -> LayerOutput:
    """Run ``layer(hidden, *args, **kwargs)`` as the stock model would, or only as far as its attention's output.

    ``tensors`` are used for the layer's parameters of those names; gradients flow to them. ``query`` and ``key`` of the
    result are None for models whose attention does not go through transformers' attention interface, or whose mask
    says more than causality and a window. Raises ValueError for a layer that never calls its attention module.
    """
    with _recording(attention_of(layer), whole) as recording:
        try:
            if tensors is None:
                result = layer(hidden, *args, **kwargs)
            else:
                result = functional_call(layer, dict(tensors), (hidden, *args), dict(kwargs))
        except Stop:
            result = None
    if recording.output is None or recording.input is None:
        raise ValueError(f"layer: expected {type(layer).__name__} to call its attention module, which it did not")
    after = result[0] if isinstance(result, tuple) else result
    return LayerOutput(after, recording.output, recording.input, **_details(recording))


@contextmanager
def _recording(attention: nn.Module, whole: bool) -> Iterator[_Recording]:
    """Record what ``attention`` is given and what it returns."""
    config = getattr(attention, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    recording = _Recording(implementation)

    def note_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.input = args[0] if args else kwargs["hidden_states"]
        recording.residual = args[1] if len(args) > 1 and _RESIDUAL in signature(module.forward).parameters else None

    def note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recording.output = output[0] if isinstance(output, tuple) else output
        if recording.residual is not None:
            recording.output = recording.output - recording.residual
        # within the call: it may be one of ``tensors``
        recording.output_weight = _output_weight(module)
        if not whole:
            raise Stop

    hooks = (
        attention.register_forward_pre_hook(note_input, with_kwargs=True),
        attention.register_forward_hook(note_output),
    )
    token = _current.set(recording)
    files = (sys.modules.get(kind.__module__) for kind in type(attention).__mro__)
    # others may read the name of the function for rules of theirs
    dispatches = any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)
    if config is not None and dispatches and hasattr(config, "_attn_implementation"):
        # the public setter also rewrites every sub-config
        config._attn_implementation_internal = RECORDER
    try:
        yield recording
    finally:
        if config is not None and dispatches and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = implementation
        _current.reset(token)
        for hook in hooks:
            hook.remove()


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: notes the call and computes it as the model would have."""
    recording = _current.get()
    # the name in the config is the recorder's own while it runs
    compute = _implementation(module, recording.implementation)
    result: tuple[Tensor, Tensor | None] = compute(module, query, key, value, attention_mask, **options)
    options = {"is_causal": bool(getattr(module, "is_causal", True)), **options}
    recording.call = _Call(query, key, attention_mask, options, result[0])
    return result


AttentionInterface.register(RECORDER, _record)


def _implementation(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function called ``name``; "eager" is each modeling file's own."""
    if name != "eager":
        function: Callable[..., Any] = AttentionInterface()[name]
        return function
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    raise ValueError(f"layer: expected the modeling file of {type(module).__name__} to have eager_attention_forward")


def _details(recording: _Recording) -> dict[str, Any]:
    """The fields of ``LayerOutput`` that the recorded attention call gives; none without a call."""
    call, weight = recording.call, recording.output_weight
    if call is None or recording.output is None:
        return {}
    length, heads = call.query.shape[2], call.query.shape[1]
    window = call.options.get("sliding_window")
    window = window if isinstance(window, int) and window < length else None
    causal, plain = _mask_rule(call, window)
    scale = call.options.get("scaling")
    details: dict[str, Any] = {
        "scale": call.query.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": window,
        "softcap": call.options.get("softcap"),
        "sinks": call.options.get("s_aux"),
        "causal": causal,
    }
    if plain and call.options.get("position_bias") is None:
        details |= {"query": call.query, "key": call.key}
    model_dim = recording.output.shape[-1]
    if weight is not None and weight.shape == (model_dim, heads * call.context.shape[-1]):
        details |= {"context": call.context, "output_weight": weight.view(model_dim, heads, -1)}
    return details


def _mask_rule(call: _Call, window: int | None) -> tuple[bool, bool]:
    """True if queries see only the keys before them, and True if that and ``window`` are all that the mask says.

    Without a mask the attention function goes by ``is_causal``; a mask outweighs it: the first query of a causal mask
    sees itself alone, and every query that has ``window`` keys behind it sees those.
    """
    length = call.query.shape[2]
    causal = call.options.get("is_causal") is not False
    # with a cache or another sequence as keys, positions do not match rows
    if call.key.shape[2] != length:
        return causal, False
    # flash attention and flex attention have no dense mask
    if not isinstance(call.mask, Tensor) or call.mask.dim() != 4:
        return causal, True
    reach = length if window is None else window
    # the first and the last row tell causality and window without a reading of the whole matrix
    ends = call.mask[..., [0, -1], :]
    first, last = (ends if not ends.dtype.is_floating_point else ends == 0).sum(-1).unbind(-1)
    causal = bool((first == 1).all())
    return causal, bool((last == reach).all()) and (causal or bool((first == reach).all()))


def _output_weight(attention: nn.Module) -> Tensor | None:
    """The weight of the output projection in ``attention`` as ``[E, H * Dv]``, stored either way."""
    for projection in (getattr(attention, name, None) for name in _OUTPUT_NAMES):
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return (weight.T if type(projection).__name__ == "Conv1D" else weight).detach()
    return None
