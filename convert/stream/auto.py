"""transformers' ``AutoModelForCausalLM``, completed.

transformers 5.23 ships ``Mistral4ForCausalLM``, a stock class with a language head, but ``AutoModelForCausalLM`` does
not know it yet; ``register`` is the public way to tell it.
"""

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["AutoModelForCausalLM"]

if "mistral4" in CONFIG_MAPPING and "mistral4" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
    from transformers import Mistral4ForCausalLM

    AutoModelForCausalLM.register(CONFIG_MAPPING["mistral4"], Mistral4ForCausalLM, exist_ok=True)
