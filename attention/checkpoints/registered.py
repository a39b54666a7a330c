"""Registers models with kvfold's attention in transformers, so they load without
``trust_remote_code``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.attention.checkpoints import SOURCES, modeling_kvfold

MODEL_TYPE_PREFIX = "kvfold_"  # prefix of our model types


def register_models() -> None:
    """Register the ``kvfold`` layout of every supported family with transformers' Auto classes.

    Checkpoints in that layout then load like any other, using the code of the installed package.
    When such a model is saved, its modeling file is saved too.
    """
    for source in SOURCES:
        register_model(f"{MODEL_TYPE_PREFIX}{source}")


def register_model(model_type: str) -> None:
    """Register one ``model_type``, such as ``kvfold_gpt2``, with transformers' Auto classes. Does
    nothing if it is unknown or already registered.
    """
    source = model_type.removeprefix(MODEL_TYPE_PREFIX)
    if model_type == source or source not in SOURCES or model_type in CONFIG_MAPPING:
        return
    stock = CONFIG_MAPPING[source]
    config = getattr(modeling_kvfold, f"Kvfold{stock.__name__}")
    config.register_for_auto_class()
    AutoConfig.register(model_type, config)
    for auto in (AutoModel, AutoModelForCausalLM):
        model = getattr(modeling_kvfold, f"Kvfold{auto._model_mapping[stock].__name__}")
        model.register_for_auto_class(auto.__name__)
        auto.register(config, model)
