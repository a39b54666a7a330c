"""vLLM plug-in: serves GQA and MQA results of layout ``kvfold`` without ``--trust-remote-code``.

vLLM calls `register` in each of its processes (the entry point ``vllm.general_plugins``). It runs
these models by its Transformers backend, which finds a class in ``transformers`` by the name in
``architectures``. MLA of layout ``kvfold`` caches latents in a way that vLLM has no kernel for;
layout ``engine`` and ``free`` are the ones that it serves.
"""

from typing import Any

import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.attention.checkpoints import SOURCES, modeling_kvfold
from kvfold.attention.checkpoints.registered import register_models


class VllmGroupedSelfAttention(modeling_kvfold.GroupedSelfAttention):
    """Grouped attention on vLLM's paged cache. vLLM requires that the source of `forward` contains
    the call of its attention function.
    """

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention output ``[1, T, E]`` for ``hidden_states [1, T, E]``, the new tokens
        of all sequences one after the other, and None.
        """
        query, key, value = self.project(hidden_states, position_ids)
        attention = ALL_ATTENTION_FUNCTIONS["vllm"]
        context, _ = attention(self, query, key, value, None, scaling=self.scaling)  # [T, H * D]
        return self.o_proj(context.view(*hidden_states.shape[:2], -1)), None


def register() -> None:
    """Register the ``kvfold`` layout of all families that vLLM can run with transformers and vLLM.
    Calling it again changes nothing.
    """
    register_models()
    modeling_kvfold.VARIANTS["vllm grouped"] = VllmGroupedSelfAttention
    for source in SOURCES:
        stock = CONFIG_MAPPING[source]
        config = getattr(modeling_kvfold, f"Kvfold{stock.__name__}")
        model: Any = AutoModelForCausalLM._model_mapping[config]
        # Classes that have key/value heads of their own are in this layout for MLA only.
        if model.is_backend_compatible() and not hasattr(stock(), "num_key_value_heads"):
            setattr(transformers, model.__name__, model)
            # A source's config may hold the name too, with its own number.
            config.num_key_value_heads = property(_read_kv_heads, lambda config, value: None)


def _read_kv_heads(config: Any) -> int:
    """Return a config's number of key/value heads, which vLLM reads as ``num_key_value_heads`` to
    size its cache. Raises ValueError for MLA.
    """
    facts = config.kvfold
    if facts["variant"] != "grouped":
        raise ValueError(
            f"vLLM has no kernels for MLA of layout kvfold ({config.model_type}); convert the"
            " source to GQA or MQA instead, or serve this model with transformers"
        )
    return int(facts["kv_heads"])
