"""Tiny random checkpoints of every family, made by the stock classes: each switches on what is
particular to it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
SIZES: dict[str, Any] = _TABLES["sizes"]
FAMILIES: dict[str, dict[str, Any]] = _TABLES["families"]
# Families whose stock class gives every query head a key and a value of its own: they become layout
# kvfold.
CLASSICS: dict[str, dict[str, Any]] = _TABLES["classics"]


def tiny_config(name: str, changes: dict[str, Any]) -> Any:
    """The stock config of the tiny model of family ``name``."""
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **{**SIZES, **(FAMILIES | CLASSICS)[name], **changes})


def skip_unknown(name: str) -> None:
    """Skip the test if the installed transformers, an older supported one, has no model type
    ``name``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {name}")


def make_tiny(name: str, folder: Path, changes: dict[str, Any]) -> None:
    """Saves a random model of family ``name`` in float32, none of its norms and biases at the value
    it starts from.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(tiny_config(name, changes), dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or ".ln_" in path or path.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
