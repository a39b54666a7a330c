"""Well-known models by their shapes: their config.json and headers without files, for ``kvfold plan --shape``."""

import math
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError, did_you_mean
from kvfold.convert.families.model import model_of
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.headers import TensorInfo
from kvfold.convert.io.reader import NoReader

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05}
_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
)
SHAPES: dict[str, tuple[int, ...]] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096, 10000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, 4096, 10000),
    "llama-2-70b": (8192, 28672, 64, 8, 80, 32000, 4096, 10000),
    "llama-3-8b": (4096, 14336, 32, 8, 32, 128256, 8192, 500000),
    "llama-3-70b": (8192, 28672, 64, 8, 80, 128256, 8192, 500000),
    "llama-3-405b": (16384, 53248, 128, 8, 126, 128256, 131072, 500000),
    "smollm2-135m": (576, 1536, 9, 3, 30, 49152, 8192, 100000),
}


def shape_checkpoint(name: str) -> Checkpoint:
    """A checkpoint in bfloat16 of which there are headers alone. InputError for a name that is not in ``SHAPES``."""
    if name not in SHAPES:
        raise InputError(f"--shape {name}: expected one of {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    config: dict[str, Any] = {**_LLAMA, **dict(zip(_KEYS, SHAPES[name], strict=True)), "torch_dtype": "bfloat16"}
    infos, position = {}, 0
    for tensor in model_of(config).tensors.values():
        end = position + 2 * math.prod(tensor.shape)
        infos[tensor.name] = TensorInfo(tensor.name, "BF16", tensor.shape, "model.safetensors", position, end)
        position = end
    return Checkpoint(Path(), config, infos, name, {}, NoReader(), {})
