"""A stock model on the meta device, where it has shapes and weighs nothing, ready to be run with tensors from files."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.attention.checkpoints.registered import register_model
from kvfold.attention.interface import BLOCKWISE
from kvfold.convert.errors import InputError, one_line
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.stream.auto import AutoModelForCausalLM

Built = TypeVar("Built")
_LONGEST = 200  # characters of another library's error text


def empty_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The stock causal language model of ``config``, or its wrapper; on the meta device but for what no file holds.

    Raises InputError that names the key of config.json for which transformers cannot build it.
    """
    return build_checked(config, lambda values: _build(values, dtype, torch.device(device)))


def auto_class(config: dict[str, Any]) -> Any:
    """The Auto class of transformers that loads a model of ``config``: a language model's or a wrapper's."""
    register_model(str(config.get("model_type")))
    return AutoModelForImageTextToText if config.get("model_type") in WRAPPERS else AutoModelForCausalLM


def _build(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    model_type, auto = config.get("model_type"), auto_class(config)
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"config.json: model_type {model_type!r} is not one that this transformers knows")
    hf_config = CONFIG_MAPPING[model_type].from_dict({key: value for key, value in config.items() if key != "auto_map"})
    if getattr(hf_config, "output_router_logits", False):
        hf_config.output_router_logits = False  # a training loss, computed from what all layers return
    with torch.device("meta"):
        # torch's grouped matrix product, which experts use by default, has no float64
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = auto.from_config(hf_config, dtype=dtype, attn_implementation=_attention(auto, hf_config), **experts)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # it only concerns gradients, and must lie inside a table of which few rows are loaded
    materialize_buffers(model, device)
    return model.eval().requires_grad_(False)


def _attention(auto: Any, config: Any) -> str:
    """The attention function for a model of ``config``: one of its own where its class takes no others (bloom)."""
    made = auto._model_mapping[type(config)]
    own = getattr(made, "__mro__", ())
    if any(getattr(kind, "_supports_attention_backend", False) for kind in own):
        return BLOCKWISE
    return "sdpa" if getattr(made, "_supports_sdpa", False) else "eager"


def materialize_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies, embedding scales) their values, as loading does.

    ``accelerate.init_empty_weights(include_buffers=False)`` makes the same values, but allocates every parameter before
    it drops it: an embedding table of 4 GB, or all experts of a layer, must then fit in memory.
    """
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        pending = [name for name, _ in module.named_buffers(recurse=False) if prefix + name not in stored]
        for name in pending:
            setattr(module, name, torch.empty_like(getattr(module, name), device=device))
        if pending:
            model._init_weights(module)


def build_checked(config: dict[str, Any], build: Callable[[dict[str, Any]], Built]) -> Built:
    """``build(config)``. Raises InputError that names the key at fault when transformers' classes refuse it.

    Some of their errors name the key ("Validation error for field 'vocab_size'"), many only the value (KeyError 'x').
    So it is found by trial: the key without which, with the class's default in its place, a model can be built.
    """
    try:
        return build(config)
    except InputError:
        raise
    except Exception as error:
        key = next((key for key in config if key != "model_type" and _builds_without(key, config, build)), None)
        if key is None and isinstance(error, RuntimeError):  # of torch itself, such as no memory on a device
            raise
        raise InputError(_fault(config, key, error)) from error


def unusable(error: Exception) -> str:
    """The message for an ``error`` that no single key of config.json explains."""
    return f"config.json: expected one that transformers can build and run a model of, found: {_reason(error)}"


def _builds_without(key: str, config: dict[str, Any], build: Callable[[dict[str, Any]], object]) -> bool:
    try:
        build({name: value for name, value in config.items() if name != key})
    except Exception:
        return False
    return True


def _fault(config: dict[str, Any], key: str | None, error: Exception) -> str:
    if key is None:
        return unusable(error)
    expected = _activations() if "act" in key.split("_") else f"a value that a {config.get('model_type')} model takes"
    return f"config.json: {key} must be {expected}, found {config[key]!r} ({_reason(error)})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"[:_LONGEST]


def _activations() -> str:
    from transformers.activations import ACT2FN

    known = [name for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2") if name in ACT2FN]
    return f"an activation that transformers knows, such as {', '.join(known)}"
