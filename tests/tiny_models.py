"""Tiny random checkpoints of every family, made by the stock classes: each switches on what is
particular to it.
"""

import json
from pathlib import Path

import pytest

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
SIZES = _TABLES["sizes"]
FAMILIES = _TABLES["families"]
# Families whose stock class gives every query head a key and a value of its own: they become layout
# kvfold.
CLASSICS = _TABLES["classics"]
# Families with latent attention, which kvfold writes but does not convert.
LATENTS = _TABLES["latents"]


def skip_unknown(name):
    """Skip the test if the installed transformers, an older supported one, has no model type
    ``name``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {name}")


def save_random(model, folder):
    """Saves ``model`` with random parameters, no norm and no bias at the value it starts from.

    With 2048 tokens it reads text by the tokenizer of the model that ships.
    """
    import torch
    from helpers.checkpoints import add_demo_tokenizer

    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias") or parameter.dim() < 2:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                inputs = parameter.shape[-1] if parameter.dim() < 4 else parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * inputs**-0.5)
    model.save_pretrained(folder)
    if model.config.get_text_config().vocab_size == 2048:
        add_demo_tokenizer(folder)


def make_tiny(name, folder, changes):
    """Saves a random model of family ``name`` in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(17)
    particular = (FAMILIES | CLASSICS | LATENTS)[name]
    config = AutoConfig.for_model(name, **{**SIZES, **particular, **changes})
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)
