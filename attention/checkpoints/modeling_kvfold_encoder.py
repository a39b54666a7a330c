"""Stock encoders of transformers with fewer keys and values. kvfold puts this file beside the weights that need it.

``KvfoldBertModel`` is transformers' ``BertModel`` with the self-attention of every layer replaced, and so on for any
``KvfoldX``; ``config.json`` is that of the source model with a block ``kvfold`` that says how. All the rest, from
embeddings to heads, stays transformers' own. An encoder keeps no cache: fewer parameters are what it gains, and fewer
bytes to read for each text. The file needs torch and transformers; it reads and writes nothing.

Shapes: ``B`` texts, ``T`` tokens, ``E`` model dim, ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``R``
channels of a latent.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class EncoderAttention(nn.Module):
    """Every token attends to all that are not padding. ``H`` heads of queries; a subclass makes keys and values."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)  # not that of the stock class, which is among the bases of what is made
        self.config, self.is_causal = config, False
        facts = config.kvfold
        self.width, self.heads, self.head_dim = facts["model_dim"], facts["heads"], facts["head_dim"]
        inner = self.heads * self.head_dim
        self.q_proj = nn.Linear(self.width, inner)
        self.o_proj = nn.Linear(inner, self.width) if facts["projects"] else nn.Identity()  # or the layer projects
        self.num_key_value_groups = 1
        self.scaling: float = facts["scale"]
        self.attention_dropout: float = facts["attention_dropout"]

    def keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden_states [B, T, E]`` to ``[B, G, T, D]`` each."""
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden_states [B, T, E]`` to ``[B, T, E]``, and the attention weights where they were computed."""
        for unused in ("encoder_hidden_states", "past_key_values"):
            options.pop(unused, None)
        query = self.split(self.q_proj(hidden_states))
        key, value = self.keys_and_values(hidden_states)
        name = self.config._attn_implementation
        function = eager_attention_forward if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.attention_dropout if self.training else 0.0
        context, weights = function(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **options
        )
        return self.o_proj(context.flatten(2)), weights

    def split(self, projected: Tensor) -> Tensor:
        """``[B, T, heads * D]`` by head: ``[B, heads, T, D]``."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)


class GroupedAttention(EncoderAttention):
    """GQA, or MQA with one key/value head: the ``H`` query heads share ``G`` key/value heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        groups = config.kvfold["kv_heads"]
        self.k_proj = nn.Linear(self.width, groups * self.head_dim)
        self.v_proj = nn.Linear(self.width, groups * self.head_dim)
        self.num_key_value_groups = self.heads // groups

    def keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k_proj(hidden_states)), self.split(self.v_proj(hidden_states))


class LatentAttention(EncoderAttention):
    """MLA: the keys and values of all heads are read from one latent ``[B, T, R]`` (DeepSeek-V2, 2024)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rank, inner = config.kvfold["kv_rank"], self.heads * self.head_dim
        self.kv_down_proj = nn.Linear(self.width, rank)
        self.k_up_proj = nn.Linear(rank, inner, bias=False)
        self.v_up_proj = nn.Linear(rank, inner, bias=False)

    def keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.kv_down_proj(hidden_states)
        return self.split(self.k_up_proj(latent)), self.split(self.v_up_proj(latent))


VARIANTS = {"grouped": GroupedAttention, "latent": LatentAttention}


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, with its weights ``[B, H, T, T]``."""
    repeats = query.shape[1] // key.shape[1]
    scores = scaling * query @ key.repeat_interleave(repeats, 1).transpose(2, 3)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(torch.softmax(scores, -1), dropout, module.training)
    return (weights @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), weights


class Replaced:
    """Mixed into a stock model class: builds that model, then puts ours in place of its self-attention modules."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        attention = VARIANTS[config.kvfold["variant"]]
        for parent in list(self.modules()):  # type: ignore[attr-defined]
            for name, child in list(parent.named_children()):
                if type(child).__name__ == config.kvfold["replaces"]:
                    # also a stock attention, for what looks for one: output_attentions
                    made = type(attention.__name__, (attention, type(child)), {})(config)
                    made.apply(self._init_weights)  # type: ignore[attr-defined]
                    setattr(parent, name, made)


def __getattr__(name: str) -> type:
    """``KvfoldX``: the stock config X under a model type of its own, or the stock model X with attention replaced."""
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
