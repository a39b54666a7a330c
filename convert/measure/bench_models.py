"""The models of ``kvfold bench``: checkpoints, or the attention kinds of a well-known shape with random weights.

No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.convert.errors import InputError, did_you_mean
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.own_code import BLOCK, source_type

_KV_HEADS, _RANK, _ROPE = 8, 512, 64  # of the converted kinds of a shape


@dataclass(frozen=True)
class Subject:
    """A model in one form. ``folder`` None: random weights of ``config``. ``form``: ``stock`` or ``absorbed``."""

    name: str
    form: str
    config: dict[str, Any]
    folder: str | None = None
    revision: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}, {self.form}" if is_latent(self.config) else self.name


@dataclass(frozen=True)
class Shape:
    model: int
    inner: int
    heads: int
    layers: int
    vocabulary: int
    positions: int


SHAPES = {
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": Shape(5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": Shape(8192, 28672, 64, 80, 32000, 4096),
    "tiny": Shape(64, 128, 8, 2, 256, 256),
}


def shape_subjects(name: str, layers: int | None, longest: int) -> list[Subject]:
    """MHA, GQA-8, and MLA 512 + 64 stock and absorbed, for ``longest`` positions. A tiny shape gets smaller ones."""
    if name not in SHAPES:
        raise InputError(f"--shape {name}: unknown; expected one of {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    shape = SHAPES[name]
    dim = shape.model // shape.heads
    kv_heads = min(_KV_HEADS, shape.heads // 4)
    rank, rope = min(_RANK, 4 * dim), min(_ROPE, dim // 2)
    common = {
        "hidden_size": shape.model,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers if layers is None else layers,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": max(longest, shape.positions),
        "tie_word_embeddings": False,
    }
    llama = {**common, "model_type": "llama", "head_dim": dim}
    latent = {
        **common,
        "model_type": "youtu",
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": dim,
        "v_head_dim": dim,
        "attention_bias": True,
    }
    return [
        Subject("MHA", "stock", {**llama, "num_key_value_heads": shape.heads}),
        Subject(f"GQA-{kv_heads}", "stock", {**llama, "num_key_value_heads": kv_heads}),
        Subject(f"MLA {rank} + {rope}", "stock", latent),
        Subject(f"MLA {rank} + {rope}", "absorbed", latent),
    ]


def checkpoint_subjects(models: Sequence[str]) -> list[Subject]:
    """Every checkpoint in stock form, latent ones absorbed too. Raises InputError when one cannot be opened."""
    from kvfold.convert.checkpoint.opening import open_checkpoint

    subjects = []
    for model in models:
        checkpoint = open_checkpoint(model)
        config, folder = checkpoint.config, str(checkpoint.folder)
        checkpoint.close()
        forms = ("stock", "absorbed") if is_latent(config) else ("stock",)
        subjects += [Subject(model, form, {**config, **_usual_names(config)}, folder) for form in forms]
    return subjects


def _usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of ``config`` by their usual names, where the family has names of its own, or layout ``kvfold`` has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own, kind = source_type(config), config.get("model_type")
    names = CONFIG_MAPPING[own or kind].attribute_map if (own or kind) in CONFIG_MAPPING else {}
    sizes = {usual: config[name] for usual, name in names.items() if name in config}
    if own is None:
        return sizes
    block = config[BLOCK]
    dim = block["head_dim"]
    if "kv_rank" not in block:
        return {**sizes, "head_dim": dim, "num_key_value_heads": block["kv_heads"]}
    heads = {"qk_nope_head_dim": dim, "v_head_dim": dim}
    norm = block.get("norm")
    divisors = {} if norm is None else {"cached_divisors": 1 if norm["flat"] else block["kv_heads"]}
    return {**sizes, **heads, **divisors, "kv_lora_rank": block["kv_rank"], "qk_rope_head_dim": block["rope_dim"]}
