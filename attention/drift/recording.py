"""Run one decoder layer of a transformers model and keep what its attention did.

Queries and keys are taken where every transformers family hands them over, after rotary embedding and per-head norms:
an attention function of our own is named in the config for the length of one call; it notes its arguments and lets the
function that the model would have used compute the result. Nothing of the model is replaced.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kvfold.attention.drift.streams import LayerOutput

IMPLEMENTATION = "kvfold_capture"
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


class _Stop(Exception):
    """Leaves a layer once its attention has been seen."""


@dataclass(frozen=True)
class _Call:
    """The arguments of one attention call, and each head's result ``mixed [B, T, H, Dv]``."""

    query: Tensor
    key: Tensor
    mask: Any
    options: Mapping[str, Any]
    mixed: Tensor


@dataclass
class _Recording:
    """What is noted while one layer runs. ``implementation`` is the attention function the model really uses."""

    implementation: str
    input: Tensor | None = None
    output: Tensor | None = None
    call: _Call | None = None


_ACTIVE: list[_Recording] = []


def attention_of(layer: nn.Module) -> nn.Module:
    """The self-attention module of a decoder layer; ValueError when it has none of the usual names."""
    for name in _ATTENTION_NAMES:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    found = ", ".join(name for name, _ in layer.named_children()) or "no children"
    raise ValueError(f"layer: expected a child named {', '.join(_ATTENTION_NAMES)}, found {found}")


def run_layer(
    layer: nn.Module, hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], *, whole: bool = True
) -> LayerOutput:
    """Run ``layer(hidden, *args, **kwargs)`` as the stock model would, or only as far as its attention's output.

    ``query`` and ``key`` of the result are ``None`` for models whose attention does not go through transformers'
    attention interface, or whose mask is neither causal nor a causal sliding window. Raises ValueError for a layer
    that never calls its attention module.
    """
    attention = attention_of(layer)
    with _recording(attention, whole) as recording:
        try:
            result = layer(hidden, *args, **kwargs)
        except _Stop:
            result = None
    if recording.output is None or recording.input is None:
        raise ValueError(f"layer: expected {type(layer).__name__} to call its attention module, which it did not")
    after = result[0] if isinstance(result, tuple) else result
    details = {} if recording.call is None else _details(attention, recording.call, recording.output.shape[-1])
    return LayerOutput(after, recording.output, recording.input, **details)


@contextmanager
def _recording(attention: nn.Module, whole: bool) -> Iterator[_Recording]:
    config = getattr(attention, "config", None)
    own = getattr(config, "_attn_implementation", None) or "eager"
    recording = _Recording(own)

    def note_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.input = args[0] if args else kwargs["hidden_states"]

    def note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recording.output = output[0] if isinstance(output, tuple) else output
        if not whole:
            raise _Stop

    hooks = (
        attention.register_forward_pre_hook(note_input, with_kwargs=True),
        attention.register_forward_hook(note_output),
    )
    _ACTIVE.append(recording)
    _name_implementation(config, IMPLEMENTATION)
    try:
        yield recording
    finally:
        _name_implementation(config, own)
        _ACTIVE.pop()
        for hook in hooks:
            hook.remove()


def _name_implementation(config: Any, name: str) -> None:
    if config is not None and hasattr(config, "_attn_implementation"):
        config._attn_implementation_internal = name  # the public setter also rewrites every sub-config


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: notes the call and computes it as the model would have."""
    recording = _ACTIVE[-1]
    compute = _implementation(module, recording.implementation)
    result: tuple[Tensor, Tensor | None] = compute(module, query, key, value, attention_mask, **options)
    recording.call = _Call(query, key, attention_mask, {"is_causal": _is_causal(module), **options}, result[0])
    return result


AttentionInterface.register(IMPLEMENTATION, _capture)


def _implementation(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function called ``name``; "eager" is each modelling file's own."""
    if name != "eager":
        found: Callable[..., Any] = AttentionInterface()[name]
        return found
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    raise ValueError(f"layer: expected the modelling file of {type(module).__name__} to have eager_attention_forward")


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True))


def _details(attention: nn.Module, call: _Call, model_dim: int) -> dict[str, Any]:
    """The fields of ``LayerOutput`` that one recorded call gives."""
    length, heads = call.query.shape[2], call.query.shape[1]
    window = call.options.get("sliding_window")
    window = window if isinstance(window, int) and window < length else None
    causal = call.options.get("is_causal") is not False
    scale = call.options.get("scaling")
    details: dict[str, Any] = {
        "scale": call.query.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": window,
        "softcap": call.options.get("softcap"),
        "causal": causal,
    }
    if _expressible(call, window, causal):
        details |= {"query": call.query, "key": call.key}
    weight = _output_weight(attention, model_dim)
    if weight is not None and weight.shape[1] == heads * call.mixed.shape[-1]:
        details |= {"mixed": call.mixed, "output_weight": weight.view(model_dim, heads, -1)}
    return details


def _expressible(call: _Call, window: int | None, causal: bool) -> bool:
    """Whether scale, window, softcap and causality say all there is to say about the attention weights."""
    if call.options.get("position_bias") is not None or call.options.get("s_aux") is not None:
        return False
    length = call.query.shape[2]
    if not isinstance(call.mask, Tensor) or call.mask.dim() != 4:
        return call.key.shape[2] == length
    last = call.mask[..., -1, :]
    seen = (last if last.dtype.is_floating_point is False else last == 0).sum(-1)
    expected = length if window is None or not causal else window
    return call.key.shape[2] == length and bool((seen == expected).all())


def _output_weight(attention: nn.Module, model_dim: int) -> Tensor | None:
    """The output projection's weight as ``[E, H * Dv]``, whichever way round it is stored."""
    for name in _OUTPUT_NAMES:
        projection = getattr(attention, name, None)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            stored = weight.T if type(projection).__name__ == "Conv1D" else weight
            return stored.detach() if stored.shape[0] == model_dim else None
    return None
