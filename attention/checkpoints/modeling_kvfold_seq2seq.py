"""Stock encoder-decoders of transformers whose decoder caches less. kvfold puts this file beside weights that need it.

``KvfoldT5ForConditionalGeneration`` is transformers' ``T5ForConditionalGeneration`` whose decoder, in its attention to
itself and to the encoder, has fewer key/value heads than query heads, or reads keys and values from a latent; and so on
for any ``KvfoldX``. ``config.json`` is that of the source model with a block ``kvfold`` that says which, and whether
the encoder's attention to itself is like that too. Shared heads leave the stock attention to compute everything,
position biases, scales and caches too: its key and value projections are narrower, and its heads share what they
give. The file needs torch and transformers; it reads and writes nothing.

Shapes: ``B`` texts, ``T`` queries, ``S`` keys, ``E`` model dim, ``H`` query heads, ``G`` key/value heads, ``D`` head
dim, ``R`` channels of a latent.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, EncoderDecoderCache
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
        object.__setattr__(self, "_config", config)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

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
    attention.num_heads = block["kv_heads"]  # Whisper splits keys and values by it
    attention.num_key_value_groups = block["heads"] // block["kv_heads"]
    attention.config = SharedView(attention.config)


class LatentAttention:
    """MLA, mixed into a stock attention class: keys and values are read from one latent (DeepSeek-V2, 2024).

    The cache holds latents ``[B, 1, S, R]`` as its keys and nothing as its values: those of the tokens so far, or those
    of the encoder's states, made once. Nothing rotates in these models; what tells positions apart stays as it was.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        mask: Tensor | None = None,  # what T5 calls it
        position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """``hidden_states [B, T, E]`` to ``[B, T, E]``, T5's position bias, and attention weights if there are any.

        ``key_value_states [B, S, E]``: the encoder's, of attention to these.
        """
        block, biased = self.config.kvfold, hasattr(self, "has_relative_attention_bias")
        start = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        start = start.clone() if isinstance(start, Tensor) else start  # a static cache counts in place
        latent = self.latents(hidden_states, key_value_states, past_key_values)
        query = getattr(self, block["query"])(hidden_states).unflatten(-1, (block["heads"], -1)).transpose(1, 2)
        if position_bias is None and biased and self.has_relative_attention_bias:
            position_bias = self.compute_bias(query.shape[2], latent.shape[2], query.device, start)
        given = {**options, "attention_mask": mask if biased else attention_mask, "position_bias": position_bias}
        steps = past_key_values is not None and query.shape[2] == 1
        flash = "flash" in str(self.config._attn_implementation)  # whose masks are not by position
        context, weights = (self.over_latents if steps and not flash else self.over_heads)(query, latent, given)
        result = getattr(self, block["output"])(context.flatten(2))
        return (result, position_bias, weights) if biased else (result, weights)

    def latents(self: Any, hidden_states: Tensor, key_value_states: Tensor | None, caches: Any) -> Tensor:
        """Those that are attended to, ``[B, 1, S, R]``, in the cache where there is one."""
        crosses, paired = key_value_states is not None, isinstance(caches, EncoderDecoderCache)
        cache = caches
        if paired:
            cache = caches.cross_attention_cache if crosses else caches.self_attention_cache
            if crosses and caches.is_updated.get(self.layer_idx):
                kept: Tensor = cache.layers[self.layer_idx].keys
                return kept
        latent: Tensor = self.kv_down_proj(key_value_states if crosses else hidden_states)[:, None]
        if cache is not None:
            latent, _ = cache.update(latent, latent[..., :0], self.layer_idx)
            if crosses and paired:
                caches.is_updated[self.layer_idx] = True
        return latent

    def over_heads(self: Any, query: Tensor, latent: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Attention ``[B, T, H, D]`` of ``query [B, H, T, D]``, every head with its key and value of each latent."""
        heads = self.config.kvfold["heads"]
        key, value = (up(latent[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2) for up in self.ups())
        attended: tuple[Tensor, Tensor | None] = self.attend(query, key, value, given)
        return attended

    def over_latents(self: Any, query: Tensor, latent: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """One step, ``T = 1``, without keys or values of ``S`` tokens: the up-projections move to query and result.

        All heads are queries of one key/value head, the latent: ``[B, 1, H, R]``.
        """
        heads = self.config.kvfold["heads"]
        up_key, up_value = (up.weight.view(heads, -1, latent.shape[-1]) for up in self.ups())
        query = torch.einsum("bhtd,hdr->bthr", query, up_key)
        for name in ("attention_mask", "position_bias"):  # [., H or 1, 1, S]: heads are positions now
            given[name] = None if given[name] is None else given[name].transpose(1, 2)
        context, weights = self.attend(query, latent, latent, {**given, "is_causal": False})
        return torch.einsum("bhtr,hdr->bthd", context, up_value), None if weights is None else weights.transpose(1, 2)

    def ups(self: Any) -> tuple[nn.Linear, nn.Linear]:
        """The projections ``[H D, R]`` of a latent to keys and to values."""
        return getattr(self, self.config.kvfold["key"]), getattr(self, self.config.kvfold["value"])

    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The attention function that the config names (sdpa, eager, ...): ``[B, T, H, D]``."""
        name = self.config._attn_implementation
        function = eager_attention_forward if name in (None, "eager") else AttentionInterface()[name]
        given = {**given, "dropout": self.dropout if self.training else 0.0, "scaling": self.config.kvfold["scale"]}
        result: tuple[Tensor, Tensor | None] = function(self, query, key, value, **given)
        return result


def factor(attention: Any, block: dict[str, Any]) -> None:
    """Make the stock module ``attention`` latent: its key and value projections read the latent of a new one."""
    width, outer = getattr(attention, block["query"]).in_features, block["heads"] * block["head_dim"]
    attention.kv_down_proj = nn.Linear(width, block["kv_rank"])
    for name in (block["key"], block["value"]):
        setattr(attention, name, nn.Linear(block["kv_rank"], outer, bias=False))
    setattr(attention, block["output"], nn.Linear(outer, width))
    attention.__class__ = type(f"Latent{type(attention).__name__}", (LatentAttention, type(attention)), {})


VARIANTS = {"shared": share, "latent": factor}


class Replaced:
    """Mixed into a stock model class: builds that model, then changes its attention: the decoder's, or all of it."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        block = config.kvfold
        stacks = {"decoder", "encoder"} if block.get("encoder") else {"decoder"}
        for path, module in list(self.named_modules()):  # type: ignore[attr-defined]
            if type(module).__name__ == block["replaces"] and stacks & {*path.split(".")}:
                VARIANTS[block["variant"]](module, block)
                module.apply(self._init_weights)  # type: ignore[attr-defined]


def __getattr__(name: str) -> type:
    """``KvfoldX``: the stock config X under a model type of its own, or the stock model X with other attention."""
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
