"""Stock encoder-decoders of transformers whose decoder caches less. kvfold puts this file beside weights that need it.

``KvfoldT5ForConditionalGeneration`` is transformers' ``T5ForConditionalGeneration`` whose decoder, in its attention to
itself and to the encoder, has fewer key/value heads than query heads; and so on for any ``KvfoldX``. ``config.json`` is
that of the source model with a block ``kvfold`` that says how many. The stock attention computes everything, position
biases, scales and caches too: its key and value projections are narrower here, and its heads share what they give. The
file needs torch and transformers; it reads and writes nothing.

Shapes: ``B`` texts, ``T`` queries, ``S`` keys, ``H`` query heads, ``G`` key/value heads, ``D`` head dim.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import eager_mask

EAGER = "kvfold_shared_eager"


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, with its weights ``[B, H, T, S]``: a key and a value for several query heads."""
    repeats = query.shape[1] // key.shape[1]
    scores = scaling * query @ key.repeat_interleave(repeats, 1).transpose(2, 3)
    for added in (position_bias, attention_mask):
        scores = scores if added is None else scores + added
    weights = nn.functional.dropout(torch.softmax(scores, -1), dropout, module.training)
    return (weights @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), weights


AttentionInterface.register(EAGER, eager_attention_forward)
AttentionMaskInterface.register(EAGER, eager_mask)


class SharedView:
    """A config as attention with shared heads sees it: ``eager`` is ours, the stock one knows no shared heads."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        value = getattr(self._config, name)
        return EAGER if name == "_attn_implementation" and value in (None, "eager") else value


def share(attention: Any, block: dict[str, Any]) -> None:
    """Make the stock module ``attention`` one of ``G`` key/value heads for its ``H`` query heads."""
    width = block["kv_heads"] * block["head_dim"]
    for name in (block["key"], block["value"]):
        full = getattr(attention, name)
        setattr(attention, name, nn.Linear(full.in_features, width, bias=full.bias is not None))
    attention.num_key_value_groups = block["heads"] // block["kv_heads"]
    attention.config = SharedView(attention.config)


class Replaced:
    """Mixed into a stock model class: builds that model, then lets heads of its decoder's attention share keys."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        block = config.kvfold
        for path, module in list(self.named_modules()):  # type: ignore[attr-defined]
            if type(module).__name__ == block["replaces"] and "decoder" in path.split("."):
                share(module, block)
                module.apply(self._init_weights)  # type: ignore[attr-defined]


def __getattr__(name: str) -> type:
    """``KvfoldX``: the stock config X under a model type of its own, or the stock model X with shared heads."""
    stock = getattr(transformers, name.removeprefix("Kvfold"), None) if name.startswith("Kvfold") else None
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(stock, transformers.PretrainedConfig):
        made = type(name, (stock,), {"model_type": f"kvfold_{stock.model_type}", "base_model_tp_plan": None})
    else:
        config = f"Kvfold{stock.config_class.__name__}"
        config_class = globals()[config] if config in globals() else __getattr__(config)
        made = type(name, (Replaced, stock), {"config_class": config_class})
        if renamed := get_checkpoint_conversion_mapping(stock.__name__):  # names of tensors in files
            register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    made.__module__ = __name__
    globals()[name] = made  # one class for each name: pickling and registering look it up here
    return made
