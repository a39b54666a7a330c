"""A stock model on the meta device, its decoder layers taken out, ready to be run with tensors that come and go."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.convert.errors import InputError
from kvfold.convert.stream.config_faults import build_checked
from kvfold.convert.stream.recorder import ATTENTION

_ATTENTION_NAMES = ("self_attn", "attention", "attn")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Visit = Callable[[int, Tensor, Arguments], Tensor]


class Stop(Exception):
    """Carries a result out of a stock forward."""


class StandIn(nn.Module):
    """Takes a decoder layer's place in the stock forward and hands what it is called with to ``visit``."""

    def __init__(self, visit: Visit, index: int, block: nn.Module) -> None:
        super().__init__()
        self.index = index
        # past nn.Module's bookkeeping: the layer is not a child of this module
        self.__dict__["visit"] = visit
        self.__dict__["block"] = block

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        visit: Visit = self.__dict__["visit"]
        return visit(self.index, hidden_states, (args, kwargs))

    def __getattr__(self, name: str) -> Any:
        """Model code may ask a layer for its type: the layer itself answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


def empty_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The stock causal language model of ``config``, in eval mode, with recording attention: all of it on the meta
    device but for what no checkpoint holds. Raises InputError that names the key for which it cannot be built."""
    return build_checked(config, lambda values: _built(values, dtype, torch.device(device)))


def _built(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"config.json: model_type {model_type!r} is not one that this transformers knows")
    hf_config = CONFIG_MAPPING[model_type].from_dict({key: value for key, value in config.items() if key != "auto_map"})
    if getattr(hf_config, "output_router_logits", False):
        hf_config.output_router_logits = False  # it asks for a loss of training, made of what all layers tell
    with torch.device("meta"):
        # torch's grouped matrix product, which experts use by default, knows no float64
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION, **experts)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # it only concerns gradients, and must lie inside a table of which few rows are loaded
    materialise_buffers(model, device)
    return model.eval().requires_grad_(False)


def materialise_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies, embedding scales) their values, as loading does."""
    for module in model.modules():
        pending = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        pending = [name for name in pending if name in module._non_persistent_buffers_set]
        for name in pending:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if pending:
            model._init_weights(module)


def attention_of(block: nn.Module) -> nn.Module:
    """The attention module of a decoder layer."""
    for name in _ATTENTION_NAMES:
        module = getattr(block, name, None)
        if isinstance(module, nn.Module):
            return module
    raise InputError(f"{type(block).__name__} has no attention module named {', '.join(_ATTENTION_NAMES)}")


def layer_list(model: Any) -> tuple[str, nn.ModuleList]:
    """The path of the model's list of decoder layers and the list."""
    decoder = model.base_model
    count = model.config.num_hidden_layers
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            path = f"{model.base_model_prefix}.{name}" if decoder is not model else name
            return path, child
    raise InputError(f"{type(decoder).__name__} has no list of {count} decoder layers")


def cached_bytes(config: Any, blocks: list[nn.Module], arguments: list[Arguments], hidden: Tensor) -> int:
    """Bytes in transformers' cache after ``hidden [1, T, E]`` (on the meta device) went through the attention modules.

    The cache object is the one that generation fills; on the meta device its tensors have shapes and no data.
    """
    cache = DynamicCache(config=config)

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        raise Stop

    for block, (args, kwargs) in zip(blocks, arguments, strict=True):
        handle = attention_of(block).register_forward_hook(stop)
        try:
            block(hidden, *_to_meta(args), **{**_to_meta(kwargs), "past_key_values": cache})
        except Stop:
            pass
        finally:
            handle.remove()
    return sum(_bytes(layer.keys) + _bytes(layer.values) for layer in cache.layers)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
