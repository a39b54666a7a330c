"""Names, shapes and config of the stock class that holds a converted model; without torch.

Layout ``free`` uses attention biases (one latent channel is the constant that makes the latent's RMSNorm a known
factor) and any frequencies. The DeepSeek loaders of inference engines drop both without a word, so it is no DeepSeek
model by name but a ``YoutuForCausalLM`` (transformers 5.1 on): the same attention, dense layers, tensors of the same
names.

Layout ``engine`` is the ``DeepseekV3ForCausalLM`` that those loaders read right: no bias, plain RoPE, a head of its
own, every layer dense (``first_k_dense_replace`` is the number of layers).

A model with experts is a ``Mistral4ForCausalLM`` in both layouts (``experts.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model
from kvfold.convert.targets.mla.experts import (
    EXPERT_CLASS,
    EXPERT_TYPE,
    Source,
    dense_config,
    expert_config,
    expert_shapes,
)
from kvfold.convert.targets.mla.rope import engine_rope, expert_rope, part_of_head, rope_config

NORM_EPS = 1e-6  # of both latent norms, as the stock class hard-codes it
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
}

# Sizes that vLLM's MLA kernels take: cached elements R + P, and dims of a head (unrotated, rotary, value).
KERNEL_CACHES = (576, 512, 320)
KERNEL_HEADS = ((128, 64, 128), (64, 64, 128), (192, 64, 256), (256, 0, 256))
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "youtu", EXPERT_TYPE)
_CLASSES: dict[str, dict[str, Any]] = {
    "free": {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"},
    "engine": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}

Shape = tuple[int, ...]


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a model whose attention is latent (MLA) already."""
    return config.get("model_type") in LATENT_TYPES


@dataclass(frozen=True)
class LatentTarget:
    """Sizes of latent attention. ``kv_rank`` R + ``rope_dim`` P are the KV-cache elements per token per layer.

    R includes the constant channel. ``rotated`` mixes the others, for a quantized cache.
    Without ``q_rank`` queries have no latent, unless biases need one (``query_rank``).
    """

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None
    layout: Literal["free", "engine", "kvfold"] = "free"
    rotated: bool = False

    @property
    def constant(self) -> bool:
        """Whether one channel of each latent is constant, which is 1 channel as a number."""
        return self.layout == "free"

    @property
    def centered(self) -> bool:
        """Whether biases have a place, which take the means."""
        return self.layout != "engine"

    @property
    def keeps_norms(self) -> bool:
        """Whether norms on queries and keys have a place; elsewhere linear maps stand in."""
        return self.layout == "kvfold"

    @property
    def channels(self) -> int:
        """Latent channels without the constant one."""
        return self.kv_rank - self.constant

    @property
    def shared_experts(self) -> int:
        """Shared experts of zeros beside the routed ones: as many as the loaders of engines expect."""
        return int(self.layout == "engine")

    @property
    def has_kernels(self) -> bool:
        """Whether the MLA kernels of engines take this cache."""
        return self.rope_dim in {rope for _, rope, _ in KERNEL_HEADS} and self.kv_rank + self.rope_dim in KERNEL_CACHES

    @property
    def padded(self) -> bool:
        """Whether heads get zeros until kernels take them: where these take the cache."""
        return self.layout == "engine" and self.has_kernels

    def head_dims(self, dim: int) -> tuple[int, int]:
        """Unrotated dims and value dims of a head in the files, for heads of ``dim`` dims: the nearest that fit.

        Zeros change nothing: the scale of the scores is in the queries, and the cache holds no heads.
        """
        sizes = [(n, v) for n, rope, v in KERNEL_HEADS if rope == self.rope_dim and min(n, v) >= dim]
        return min(sizes, key=sum, default=(dim, dim)) if self.padded else (dim, dim)

    def rope_kept(self, rotary_dims: int) -> int:
        """Rotary dims of the files that hold keys; the rest are zero where only ``P / k`` dims of a head rotate."""
        fills = not self.padded or rotary_dims == 0 or self.rope_dim % rotary_dims
        return self.rope_dim if fills else rotary_dims


def cached_divisors(model: Model, target: LatentTarget) -> int:
    """KV-cache elements per token per layer beside R + P: what the norm of keys divides by, where it is kept.

    One for each key/value head, or for all of them together.
    """
    if model.qk_norm is None or not target.keeps_norms:
        return 0
    return 1 if model.qk_norm.extent == "flat" else model.geometry.kv_heads


def attention_module(layer: int) -> str:
    """Name of the attention of ``layer``."""
    return f"model.layers.{layer}.self_attn"


def full_query_rank(geometry: Geometry, target: LatentTarget) -> int:
    """The ``q_rank`` that is exact: no smaller latent holds all queries."""
    rows = geometry.heads * (geometry.head_dim + target.rope_dim)
    return min(geometry.model_dim, rows) + target.constant


def query_rank(model: Model, target: LatentTarget) -> int | None:
    """``q_lora_rank`` of the output.

    In stock classes only a query latent can store a bias on queries, which forces an exact one.
    """
    if target.q_rank is None and model.has_bias("q") and target.layout != "kvfold":
        return full_query_rank(model.geometry, target)
    return target.q_rank


def mla_shapes(model: Model, target: LatentTarget) -> dict[str, tuple[Shape, Source]]:
    """Every output tensor: its shape, and the source tensors whose bytes it repeats, as an ``OutputTensor`` says."""
    shapes = dict(_outer(model, target))
    for layer in range(model.geometry.layers):
        shapes |= layer_shapes(model, target, layer)
    return shapes


def layer_shapes(model: Model, target: LatentTarget, layer: int) -> dict[str, tuple[Shape, Source]]:
    """The tensors of one layer, as ``mla_shapes`` gives them."""
    attention = attention_shapes(model, target, layer)
    experts = expert_shapes(model, layer, target.shared_experts) if model.layers[layer].sparse else ()
    return {name: (shape, None) for name, shape in attention.items()} | dict(_block(model, layer)) | dict(experts)


def attention_shapes(model: Model, target: LatentTarget, layer: int) -> dict[str, Shape]:
    """The attention tensors of ``layer``, all of them computed."""
    size, module = model.geometry, attention_module(layer)
    heads, width, rank = size.heads, size.model_dim, target.kv_rank
    nope, value = target.head_dims(size.head_dim)
    queries, q_rank = heads * (nope + target.rope_dim), query_rank(model, target)
    if q_rank is None:
        shapes: dict[str, Shape] = {"q_proj.weight": (queries, width)}
    else:
        shapes = {
            "q_a_proj.weight": (q_rank, width),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (queries, q_rank),
        }
    shapes["kv_a_proj_with_mqa.weight"] = (rank + target.rope_dim, width)
    shapes["kv_a_layernorm.weight"] = (rank,)
    shapes["kv_b_proj.weight"] = (heads * (nope + value), rank)
    shapes["o_proj.weight"] = (width, heads * value)
    if target.constant:
        biased = {"kv_a_proj_with_mqa": rank + target.rope_dim, "o_proj": width}
        biased |= {} if q_rank is None else {"q_a_proj": q_rank}
        shapes |= {f"{name}.bias": (rows,) for name, rows in biased.items()}
    return {f"{module}.{name}": shape for name, shape in shapes.items()}


def padding(model: Model, target: LatentTarget) -> int:
    """Parameters that are zero because heads are padded."""
    size = model.geometry
    nope, value = (padded - size.head_dim for padded in target.head_dims(size.head_dim))
    rope, inputs = target.rope_dim - target.rope_kept(size.rotary_dims), query_rank(model, target) or size.model_dim
    heads = (nope + rope) * inputs + (nope + value) * target.kv_rank + value * size.model_dim
    return size.layers * (size.heads * heads + rope * size.model_dim)


def split_gate_up(model: Model, layer: int) -> tuple[str, str, str] | None:
    """For a source with one gate-and-up tensor: its name, and the names of gate and up in the output."""
    source = model.names.get(("gate_up", layer))
    return None if source is None else (source[0], _name("gate", layer), _name("up", layer))


def _outer(model: Model, target: LatentTarget) -> Iterator[tuple[str, tuple[Shape, Source]]]:
    (embedding,), (norm,) = model.names["embedding", None], model.names["final_norm", None]
    (head,) = model.names.get(("head", None), (embedding,))
    yield _NAMES["embedding"], (model.tensors[embedding].shape, embedding)
    yield _NAMES["final_norm"], (model.tensors[norm].shape, norm)
    if head != embedding or target.layout == "engine":
        yield _NAMES["head"], (model.tensors[head].shape, head)


def _block(model: Model, layer: int) -> Iterator[tuple[str, tuple[Shape, Source]]]:
    fused = split_gate_up(model, layer)
    if fused is not None:
        rows, width = model.tensors[fused[0]].shape
        yield from ((name, ((rows // 2, width), None)) for name in fused[1:])
    for role in ("attention_norm", "mlp_norm", "gate", "up", "down"):
        for source in model.names.get((role, layer), ()):
            yield _name(role, layer), (model.tensors[source].shape, source)


def _name(role: str, layer: int) -> str:
    return _NAMES[role].replace("{layer}", str(layer))


def mla_config(
    model: Model,
    target: LatentTarget,
    theta: Sequence[float],
    *,
    dtype: str,
    positions: int | None = None,
) -> dict[str, Any]:
    """``config.json`` of the output. ``theta [P/2]``: radians per position of each rotary pair.

    ``dtype`` as transformers spells it. ``positions``: the longest context, where it is shorter than the source's.
    The dtype is spelled twice, for readers before and after transformers 5, and in layout ``engine`` the frequencies.
    """
    size, block, config = model.geometry, model.block, model.config
    longest = size.positions if positions is None else positions
    nope, value = target.head_dims(size.head_dim)
    special = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if target.layout == "free":  # transformers 5.23: loading a Youtu model zeroes the embedding of its pad token
        special["pad_token_id"] = None
    return {
        **(EXPERT_CLASS if block.sparse else _CLASSES[target.layout]),
        "attention_bias": target.constant,
        "attention_dropout": config.get("attention_dropout", 0.0),
        **special,
        "vocab_size": size.vocabulary,
        "hidden_size": size.model_dim,
        "hidden_act": block.activation,
        "intermediate_size": _intermediate(model),
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": target.kv_rank,
        "q_lora_rank": query_rank(model, target),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": target.rope_dim,
        "v_head_dim": value,
        "max_position_embeddings": longest,
        "initializer_range": size.initializer_range,
        "rms_norm_eps": block.norm_eps,
        "tie_word_embeddings": block.tied and target.layout != "engine",
        "use_cache": True,
        "rope_interleave": True,
        **_expert_keys(model, target),
        **_rope(model, target, theta, longest),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope(model: Model, target: LatentTarget, theta: Sequence[float], positions: int) -> dict[str, Any]:
    """Rotary keys.

    vLLM's Transformers backend takes ``head_dim`` for the size of the latent cache. Youtu and Mistral4 rotate a part of
    their ``head_dim`` dims and ignore it otherwise, so where kernels take the cache there are values that all read
    right.
    """
    cached = target.kv_rank + target.rope_dim
    if model.block.sparse:
        head_dim = cached if target.has_kernels else target.head_dims(model.geometry.head_dim)[0] + target.rope_dim
        return {"head_dim": head_dim, **expert_rope(theta, positions, target.rope_dim, head_dim)}
    if target.layout == "engine":
        return engine_rope(theta, positions)
    if not target.has_kernels:
        return rope_config(theta, positions)
    return {"head_dim": cached, **part_of_head(theta, positions, cached)}


def _intermediate(model: Model) -> int:
    """Width of the MLPs, or of the experts where all layers have them."""
    down = model.names.get(("down", 0)) or model.names["expert_down", 0]
    return model.tensors[down[0]].shape[1]


def _expert_keys(model: Model, target: LatentTarget) -> dict[str, Any]:
    if model.block.sparse:
        return expert_config(model, target.shared_experts)
    return dense_config(model.geometry.layers, _intermediate(model)) if target.layout == "engine" else {}
