"""Tiny random multimodal wrappers, made by the stock classes, and inputs with an image for them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.checkpoints import stock_model

IMAGE = 90
START = 92
END = 93
# The configs of each wrapper's language and vision models, its other keys, and how many tokens its
# image takes.
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def make_wrapper(name: str, folder: Path, **text: Any) -> None:
    """Saves a random wrapper called ``name`` in float32; ``text`` are changes to its language
    model's config.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(17)
    # The classes of configs change what they are given.
    parts = copy.deepcopy(MODELS[name])
    language = {**parts["text"], **text}
    config = {"text_config": language, "vision_config": parts["vision"], **parts["other"]}
    model = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[name](**config), dtype=torch.float32
    )
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias") or parameter.dim() < 2:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(
                    torch.randn_like(parameter) * parameter.flatten(1).shape[-1] ** -0.5
                )
    model.save_pretrained(folder)


def inputs(name: str) -> dict[str, Tensor]:
    """Text with an image in it, or without one for a wrapper that cuts its images into tiles."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 80, (1, 24), generator=generator)
    count = MODELS[name]["image_tokens"]
    if count == 0:
        return {"input_ids": tokens}
    tokens[:, 6 : 6 + count] = IMAGE
    given = {"input_ids": tokens}
    if name.startswith("qwen"):
        tokens[:, 5], tokens[:, 6 + count] = START, END
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
        patches = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        return {**given, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if name == "mistral3":  # its class takes no image of one token
        return {
            **given,
            "pixel_values": torch.randn(1, 3, 32, 32, generator=generator),
            "image_sizes": torch.tensor([[32, 32]]),
        }
    return {**given, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


def logits(folder: Path, given: dict[str, Tensor]) -> Tensor:
    """The logits of the wrapper in ``folder`` as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    with torch.no_grad():
        result: Tensor = stock_model(folder, AutoModelForImageTextToText, dtype=torch.float32)(
            **given
        ).logits
    return result
