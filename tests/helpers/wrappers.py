"""Tiny random multimodal wrappers, made by the stock classes, and inputs with an image for them."""

import copy
from pathlib import Path
from typing import Any

import tiny_models
import torch
from torch import Tensor

from helpers.checkpoints import stock_model

IMAGE = 90
VIDEO = 91
START = 92
END = 93
TEXT: dict[str, Any] = {**tiny_models.SIZES, "num_key_value_heads": 4}
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
PAIRS = {"image_size": [16, 16], "patch_size": [8, 8]}
GRID: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_GRID = {**GRID, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SIZES = torch.tensor([[32, 32]])


def mrope(*section: int) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "mrope_section": [*section], "rope_theta": 1e4}
    }


def typed(model_type: str, sizes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **sizes, **changes}


INDEX = {"image_token_index": IMAGE}
TILES = {**INDEX, "image_grid_pinpoints": [[16, 16]]}
WINDOWED = {"sliding_window": 8, "sliding_window_pattern": 2, "head_dim": 16}
SIGLIP = typed("siglip_vision_model", PATCHES)
CLIP = typed("clip_vision_model", PATCHES)
PIXTRAL = typed("pixtral", PATCHES, image_size=32)
MISTRAL = typed("mistral", TEXT, head_dim=8)
QWEN2 = typed("qwen2", TEXT)
# The configs of each wrapper's language and vision models, its other keys, and how many tokens its
# image takes.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "aya_vision": (
        typed("cohere2", TEXT, sliding_window=8),
        SIGLIP,
        {**INDEX, "downsample_factor": 2},
        1,
    ),
    "gemma3": ({**TEXT, **WINDOWED}, PATCHES, {**INDEX, "mm_tokens_per_image": 4}, 4),
    "internvl": (QWEN2, typed("internvl_vision", PATCHES, **PAIRS), {"image_token_id": IMAGE}, 1),
    "llava": (typed("llama", TEXT), CLIP, INDEX, 4),
    "llava_next": (MISTRAL, CLIP, TILES, 0),
    "llava_onevision": (QWEN2, SIGLIP, TILES, 0),
    "mistral3": (MISTRAL, PIXTRAL, {**INDEX, "spatial_merge_size": 2}, 4),
    "qwen2_vl": (
        {**TEXT, **mrope(1, 1, 2)},
        {**GRID, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        QWEN,
        4,
    ),
    "qwen2_5_vl": (
        {**TEXT, **mrope(1, 1, 2)},
        {**QWEN_GRID, "window_size": 16, "fullatt_block_indexes": [1]},
        QWEN,
        4,
    ),
    "qwen3_vl": (
        {**TEXT, **mrope(3, 3, 2), "head_dim": 16},
        {**QWEN_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        QWEN,
        4,
    ),
}


def make_wrapper(name: str, folder: Path, **text: Any) -> None:
    """Saves a random wrapper called ``name`` in float32; ``text`` are changes to its language
    model's config.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(17)
    # The classes of configs change what they are given.
    language, vision, others, _ = copy.deepcopy(MODELS[name])
    config = {"text_config": {**language, **text}, "vision_config": vision, **others}
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
    count = MODELS[name][-1]
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
            "image_sizes": SIZES,
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
