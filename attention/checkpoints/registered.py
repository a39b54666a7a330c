"""Models with kvfold's own attention, registered with transformers: they load without ``trust_remote_code``."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.attention.checkpoints import modeling_kvfold

MODELING = Path(modeling_kvfold.__file__)  # the file that checkpoints take along
PREFIX = "kvfold_"  # of model types
SOURCES = ("arcee", "gpt2", "gpt_neox", "nemotron", "opt", "phi", "stablelm", "starcoder2")
_AUTO = (AutoModel, AutoModelForCausalLM)


def register_models() -> None:
    """Tell transformers' Auto classes of the layout ``kvfold`` of every family.

    Checkpoints of that layout load as any other then, with the code of the installed package; models that are saved
    take the modeling file along.
    """
    for source in SOURCES:
        register_model(f"{PREFIX}{source}")


def register_model(model_type: str) -> None:
    """The same for one ``model_type``, such as ``kvfold_gpt2``; nothing for any other or a second time."""
    source = model_type.removeprefix(PREFIX)
    if model_type == source or source not in SOURCES or model_type in CONFIG_MAPPING:
        return
    stock = CONFIG_MAPPING[source]
    config = _own(stock)
    config.register_for_auto_class()
    AutoConfig.register(model_type, config)
    for auto in _AUTO:
        model = _own(auto._model_mapping[stock])
        model.register_for_auto_class(auto.__name__)
        auto.register(config, model)


def _own(stock: type) -> Any:
    return getattr(modeling_kvfold, f"Kvfold{stock.__name__}")
