"""The models and settings of ``kvfold bench``; bytes, operations and memory of a decoding step. No torch here.

A model is a checkpoint, or an attention kind of a well-known shape with random weights. Per layer, with ``B``
sequences, ``S`` slots, ``H`` heads, ``G`` key/value heads, ``D`` head dim, latent ``R + P``:

    cached elements    MHA, GQA, MQA  2 B S G D                MLA  B S (R + P), and divisors of norms as part of P
    operations         4 B S H D      absorbed  2 B S H (2 R + P)      expanded  2 B S H ((Dn + Dv) R + Dn + P + Dv)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.convert.errors import InputError, did_you_mean, opt
from kvfold.convert.targets.mla.config import is_latent
from kvfold.convert.targets.own_code import BLOCK, source_type

# Targets of a shape: eight key/value heads as in Llama 3, the latent of DeepSeek's models.
_KV_HEADS, _RANK, _ROPE = 8, 512, 64
# Allocators round up and libraries need room: torch alone takes about 0.6 GB of a process.
_SPARE = 1.05
_FIXED = 600 << 20


@dataclass(frozen=True)
class Subject:
    """A model in one form. ``folder`` None: random weights of ``config``. ``form``: ``stock`` or ``absorbed``."""

    name: str
    form: str
    config: dict[str, Any]
    folder: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}, {self.form}" if is_latent(self.config) else self.name


@dataclass(frozen=True)
class BenchOptions:
    """The settings of a measurement. ``prefill_tokens`` None: 2048 on a CPU, 32768 on CUDA; 0: no prefill."""

    contexts: tuple[int, ...] = (2048,)
    batches: tuple[int, ...] = (1,)
    device: str = "auto"
    dtype: str = "auto"
    cache: str = "dynamic"
    prefill_tokens: int | None = None
    # Spent on the timed steps of each context and batch.
    seconds: float = 4.0
    threads: int | None = None


@dataclass(frozen=True)
class BenchTask:
    """One model and the resolved settings; ``prefill_tokens`` bounds a prefill over all its sequences."""

    subject: Subject
    options: BenchOptions
    device: str
    dtype: str
    prefill_tokens: int

    @classmethod
    def from_json(cls, text: str) -> "BenchTask":
        fields = json.loads(text)
        lists = {name: tuple(fields["options"][name]) for name in ("contexts", "batches")}
        options = BenchOptions(**{**fields["options"], **lists})
        return cls(**{**fields, "subject": Subject(**fields["subject"]), "options": options})

    def prefill_size(self, context: int, batch: int) -> tuple[int, int]:
        """Sequences and tokens of each: all, or as much as ``prefill_tokens`` allows; (0, 0) for no prefill."""
        if self.prefill_tokens == 0:
            return 0, 0
        length = min(context, self.prefill_tokens)
        return max(1, min(batch, self.prefill_tokens // length)), length


@dataclass(frozen=True)
class KnownShape:
    """The sizes of a published model."""

    model_dim: int
    inner_dim: int
    heads: int
    layers: int
    vocabulary: int
    positions: int


SHAPES = {
    "llama-2-7b": KnownShape(4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": KnownShape(5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": KnownShape(8192, 28672, 64, 80, 32000, 4096),
    "tiny": KnownShape(64, 128, 8, 2, 256, 256),
}


def shape_subjects(name: str, layers: int | None, longest: int) -> list[Subject]:
    """MHA, GQA-8, and MLA 512 + 64 stock and absorbed, for ``longest`` positions. A tiny shape gets smaller ones."""
    if name not in SHAPES:
        raise InputError(
            f"{opt('shape', name)}: unknown; expected one of {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}"
        )
    shape = SHAPES[name]
    dim = shape.model_dim // shape.heads
    kv_heads = min(_KV_HEADS, shape.heads // 4)
    rank, rope = min(_RANK, 4 * dim), min(_ROPE, dim // 2)
    common = {
        "hidden_size": shape.model_dim,
        "intermediate_size": shape.inner_dim,
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
    """The sizes of ``config`` under llama's names, for families and layouts that name them otherwise."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source, kind = source_type(config), config.get("model_type")
    names = CONFIG_MAPPING[source or kind].attribute_map if (source or kind) in CONFIG_MAPPING else {}
    sizes = {usual: config[name] for usual, name in names.items() if name in config}
    if source is None:
        return sizes
    block = config[BLOCK]
    dim = block["head_dim"]
    if "kv_rank" not in block:
        return {**sizes, "head_dim": dim, "num_key_value_heads": block["kv_heads"]}
    sizes |= {"qk_nope_head_dim": dim, "v_head_dim": dim}
    sizes |= {"kv_lora_rank": block["kv_rank"], "qk_rope_head_dim": block["rope_dim"]}
    if (norm := block.get("norm")) is not None:
        sizes["cached_divisors"] = 1 if norm["flat"] else block["kv_heads"]
    return sizes


@dataclass(frozen=True)
class StepCosts:
    """Bytes and operations of one decoding step of a whole model, and the memory that it needs, in bytes."""

    cache_bytes: int
    attention_operations: int
    operations: int
    read_bytes: int
    attention_memory: int
    memory: int


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters: all, and those of the layers and the head, which every step reads."""

    total: int
    read: int


def step_costs(
    config: Mapping[str, Any],
    form: str,
    weights: ParameterCount,
    size: int,
    context: int,
    batch: int,
    prefill: int = 0,
) -> StepCosts:
    """Costs at ``context`` tokens of ``batch`` sequences, with ``size`` bytes per element.

    ``prefill``: tokens prefilled at once, whose activations count for the memory.
    """
    layers, slots = int(config["num_hidden_layers"]), batch * context
    elements, operations, expanded = _per_slot(config, form)
    cache = layers * slots * elements * size
    attention = layers * slots * operations
    # transformers copies a layer's growing cache at each step.
    working = (slots * elements + slots * expanded) * size
    activations = 12 * int(config["hidden_size"]) + 3 * int(config.get("intermediate_size") or 0)
    prefilling = prefill * size * (layers * elements + activations)
    memory = weights.total * size + max(cache + working, prefilling)
    return StepCosts(
        cache_bytes=cache,
        attention_operations=attention,
        operations=attention + 2 * batch * weights.read,
        read_bytes=cache + weights.read * size,
        attention_memory=working,
        memory=int(_SPARE * memory) + _FIXED,
    )


def _per_slot(config: Mapping[str, Any], form: str) -> tuple[int, int, int]:
    """For one layer and slot: elements cached, operations, elements that attention makes in between."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank") is None:
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        groups = int(config.get("num_key_value_heads") or heads)
        # Stock attention repeats shared keys and values for every query head.
        return 2 * groups * dim, 4 * heads * dim, 0 if groups == heads else 2 * heads * dim
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"]) + int(config.get("cached_divisors", 0))
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    # The modeling file of layout kvfold decodes over the latents by itself.
    if form == "absorbed" or source_type(config):
        return rank + rope, 2 * heads * (2 * rank + rope), heads
    expanded = heads * (2 * nope + rope + 2 * value)
    return rank + rope, 2 * heads * ((nope + value) * rank + nope + rope + value), expanded
