"""Tiny random multimodal wrappers, made by the stock classes, and inputs with an image for them."""

import copy
from pathlib import Path

import torch
from tiny_models import save_random

from helpers.checkpoints import read_json, stock_model

IMAGE = 90
START = 92
END = 93
# The configs of each wrapper's language and vision models, its other keys, and its image.
MODELS = read_json(Path(__file__).with_suffix(".json"))


def make_wrapper(name, folder, **text):
    """Saves a random wrapper called ``name`` in float32; ``text`` are changes to its language
    model's config.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(17)
    # The classes of configs change what they are given.
    parts = copy.deepcopy(MODELS[name])
    config = CONFIG_MAPPING[name](
        text_config=parts["text"] | text, vision_config=parts["vision"], **parts["other"]
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_random(model, folder)


def inputs(name):
    """Text with an image in it, or without one for a wrapper that cuts its images into tiles."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 80, (1, 24), generator=generator)
    given = {"input_ids": tokens}
    image = MODELS[name]["image"]
    if image is None:
        return given
    end = 6 + image["tokens"]
    tokens[:, 6:end] = IMAGE
    given["pixel_values"] = torch.randn(image["pixels"], generator=generator)
    given |= {key: torch.tensor(value) for key, value in image["sizes"].items()}
    if "image_grid_thw" in given:
        tokens[:, 5] = START
        tokens[:, end] = END
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
    return given


def logits(folder, given):
    """The logits of the wrapper in ``folder`` as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    with torch.no_grad():
        return stock_model(folder, AutoModelForImageTextToText, dtype=torch.float32)(**given).logits
