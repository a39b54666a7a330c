"""The config and the tensors of the stock class for a model with latent attention (MLA). Does not
import torch.

Layout ``free`` supports any frequencies and attention biases (one latent channel is a constant that
makes the latent's RMSNorm a known factor). The DeepSeek loaders of inference engines silently drop
both, so the output is not a DeepSeek model but a ``YoutuForCausalLM`` (stock in transformers),
which has the same attention and tensor names, and dense layers.

Layout ``engine`` is a ``DeepseekV3ForCausalLM`` that those loaders read correctly: no biases, plain
RoPE, an untied head, and only dense layers (``first_k_dense_replace`` is the number of layers).

A model with experts becomes a ``Mistral4ForCausalLM`` in both layouts. Its router computes the
softmax of all logits, selects the largest probabilities, and optionally divides them by their sum,
like mixtral and qwen3_moe (DeepSeek-V3 uses a sigmoid, and DeepSeek-V2 never divides).

Experts are copied without decoding them. The experts of a layer are stored in two tensors: ``[n, 2
I, E]``, with the gate rows of each expert before its up rows, and ``[n, E, I]``. Both are
concatenations of the bytes of source tensors. The class adds a shared expert to the routed experts,
but the source has no shared expert: layout ``free`` stores a shared expert of width 0, and layout
``engine`` stores zeros, because the loaders of engines expect its tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.members import with_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import OutputTensor
from kvfold.convert.families.family import names_in_files
from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import BlockRole
from kvfold.convert.targets.mla.spec import (
    ATTENTION,
    EXPERT_TYPE,
    MlaSpec,
    context_length,
    query_rank,
)
from kvfold.convert.targets.output_checkpoint import OutputCheckpoint, output_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.latent.latent_weights import LatentWeights

_CLASSES: dict[str, dict[str, Any]] = {
    "free": {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"},
    "engine": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "experts": {"architectures": ["Mistral4ForCausalLM"], "model_type": EXPERT_TYPE},
}
_ROPE_BASE = 10000.0  # of the standard frequencies that longrope's factors divide


def mla_config(
    model: Model, spec: MlaSpec, theta: Sequence[float] | None, *, dtype: str
) -> dict[str, Any]:
    """``config.json`` of the output. ``theta [P/2]`` are the rotary frequencies in radians per
    position; None, before they are chosen, leaves their keys out.

    ``dtype`` is in the spelling of transformers. The dtype has two keys, for readers before and
    after transformers 5; in layout ``engine`` so do the frequencies.
    """
    size = model.geometry
    block = model.block
    config = model.config
    nope, value = spec.head_dims(size.head_dim)
    # Where all layers have experts, the width of the MLPs that the model lacks is theirs.
    down = model.names.get(("down", 0)) or model.names["expert_down", 0]
    width = model.tensors[down[0]].shape[1]
    special = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if spec.layout == "free":
        # transformers 5.23 zeroes the embedding of the pad token when it loads a Youtu model.
        special["pad_token_id"] = None
    return {
        **(_CLASSES["experts" if block.sparse else spec.layout]),
        "attention_bias": spec.constant,
        "attention_dropout": config.get("attention_dropout", 0.0),
        **special,
        "vocab_size": size.vocabulary,
        "hidden_size": size.model_dim,
        "hidden_act": block.activation,
        "intermediate_size": width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": spec.kv_rank,
        "q_lora_rank": query_rank(model, spec),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": value,
        "max_position_embeddings": context_length(model),
        "initializer_range": size.initializer_range,
        "rms_norm_eps": block.norm_eps,
        "tie_word_embeddings": block.tied and spec.layout != "engine",
        "use_cache": True,
        "rope_interleave": True,
        **_expert_config(model, spec, width),
        **({} if theta is None else _rope(model, spec, theta)),
        "dtype": dtype,
        "torch_dtype": dtype,  # the spelling before transformers 5
    }


def _rope(model: Model, spec: MlaSpec, theta: Sequence[float]) -> dict[str, Any]:
    """The config keys for the rotary embedding, and ``head_dim`` if readers need it."""
    cached = spec.kv_rank + spec.rope_dim
    positions = context_length(model)
    head_dim = (
        cached if spec.has_kernels else spec.head_dims(model.geometry.head_dim)[0] + spec.rope_dim
    )
    # vLLM's Transformers backend takes head_dim for the size of the latent cache. Youtu and
    # Mistral4 rotate a part of their head_dim dims, rounded down, and otherwise ignore it: where
    # kernels support the cache one value serves all.
    part = {"partial_rotary_factor": (spec.rope_dim + 0.5) / head_dim}
    plain: Literal["default", "yarn", "longrope"] = "longrope" if spec.has_kernels else "default"
    table = stored_rope(
        theta, positions, "yarn" if model.block.sparse or spec.layout == "engine" else plain
    )
    if model.block.sparse:
        # Mistral4 rotates a part of a head, but not by plain RoPE, and would scale its queries by
        # position.
        return {
            "head_dim": head_dim,
            "rope_parameters": {**table, **part, "llama_4_scaling_beta": 0.0},
        }
    if spec.layout == "engine":
        # YaRN of factor 1 changes no frequency and no scale. It is the way of DeepSeek-V3 itself;
        # for plain interleaved RoPE vLLM 0.32 has a kernel on CPUs that rotates several heads
        # wrongly.
        scaling = {name: value for name, value in table.items() if name != "rope_theta"}
        older = {
            "rope_theta": table["rope_theta"],
            "rope_scaling": {**scaling, "type": table["rope_type"]},
        }
        return {**older, "rope_parameters": table}
    if not spec.has_kernels:
        return {"rope_parameters": table}
    return {"head_dim": cached, "rope_parameters": {**table, **part}}


def _expert_config(model: Model, spec: MlaSpec, width: int) -> dict[str, Any]:
    """The config keys for experts; empty in layout ``free`` if there are none. ``width`` is the
    width of the MLPs.
    """
    if model.block.sparse:
        routing = model.block.routing
        first = next(layer.index for layer in model.layers if layer.sparse)
        assert routing is not None  # model_problems refuses models without
        downs = model.names["expert_down", first]
        return {
            "first_k_dense_replace": first,
            "moe_intermediate_size": model.tensors[downs[0]].shape[1],
            "n_routed_experts": len(downs),
            "n_shared_experts": int(spec.layout == "engine"),
            "num_experts_per_tok": routing.per_token,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": routing.renormalized,
            "routed_scaling_factor": 1.0,
        }
    if spec.layout != "engine":
        return {}
    # A DeepSeek model without experts has the smallest numbers that its readers accept.
    return {
        "first_k_dense_replace": model.geometry.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": width,
        "n_routed_experts": (
            2
        ),  # llama.cpp refuses a model with as many groups of experts as experts
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }


def stored_rope(
    theta: Sequence[float],
    positions: int,
    plain: Literal["default", "yarn", "longrope"] = "default",
) -> dict[str, Any]:
    """``rope_parameters`` for the frequencies ``theta``; for plain RoPE, ``plain`` is the rope type
    to use.

    All other frequencies are stored as ``longrope``, whose factors divide the standard frequencies
    one by one; the factors are the same for short and long texts.
    """
    base = None if plain == "longrope" else plain_base(theta)
    if base is None:
        factors = [_ROPE_BASE ** (-index / len(theta)) / angle for index, angle in enumerate(theta)]
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": positions,
            "rope_theta": _ROPE_BASE,
        }
    if plain == "default":
        return {"rope_type": "default", "rope_theta": base}
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": 1.0,
        "original_max_position_embeddings": positions,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def plain_base(theta: Sequence[float]) -> float | None:
    """The ``base`` with ``theta_i = base^(-2i/P)`` for all ``P/2`` frequencies (within float32
    precision), or None.
    """
    # Plain RoPE starts at one radian per position, whatever its base.
    if not math.isclose(theta[0], 1.0, rel_tol=1e-7):
        return None
    base = 10000.0 if len(theta) == 1 else theta[-1] ** (-len(theta) / (len(theta) - 1))
    base = float(round(base)) if math.isclose(base, round(base), rel_tol=1e-6) else base
    plain = (base ** (-index / len(theta)) for index in range(len(theta)))
    return (
        base
        if all(math.isclose(a, b, rel_tol=3e-7) for a, b in zip(theta, plain, strict=True))
        else None
    )


_ROLE_NAMES: dict[BlockRole, str] = {
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
}
_GATE_UP: tuple[BlockRole, BlockRole] = ("gate", "up")

Source = str | tuple[str, ...] | None
Shapes = dict[str, tuple[tuple[int, ...], Source]]


@dataclass(frozen=True, kw_only=True)
class MlaCheckpoint(OutputCheckpoint):
    """MLA of ``spec`` in a stock class, for ``model``, whose files are ``checkpoint``."""

    model: Model
    spec: MlaSpec
    checkpoint: Checkpoint

    def encode(self, layer: int, weights: "LatentWeights") -> dict[str, "Tensor"]:
        from kvfold.convert.targets.mla.encode import mla_tensors  # needs torch, a plan does not

        tensors = mla_tensors(weights, layer, self.spec)
        for fused in self.model.names.get(("gate_up", layer), ()):
            gate, up = self.checkpoint.read(fused).chunk(2)
            tensors[_ROLE_NAMES["gate"].format(layer=layer)] = gate.contiguous()
            tensors[_ROLE_NAMES["up"].format(layer=layer)] = up.contiguous()
        return {
            stored_name(self.model, self.checkpoint, name): tensor
            for name, tensor in tensors.items()
        }


def stored_name(model: Model, checkpoint: Checkpoint, name: str) -> str:
    """The name in the output's files of the stock class's tensor ``name``: a wrapper's files have
    another prefix.
    """
    return name if model.tower is None else names_in_files(checkpoint.tensors).wrapped(name)


def plan_stock_mla(
    model: Model,
    checkpoint: Checkpoint,
    spec: MlaSpec,
    theta: Sequence[float] | None,
    dtype: str | None,
) -> OutputCheckpoint:
    """The layout of ``model`` as MLA in a stock class; ``theta [P/2]`` are the frequencies in
    radians per position.

    ``dtype`` is the stored dtype in torch's spelling; None keeps the dtype of each tensor, and
    computed tensors then have the dtype of the first query projection.
    """
    computed_dtype = checkpoint.tensors[model.attention_names(0)[0]].dtype
    shapes = {
        stored_name(model, checkpoint, name): value
        for name, value in mla_shapes(model, spec).items()
    }
    if model.tower is not None:
        # A multimodal wrapper also holds a vision tower and a projector, which are copied.
        others = (info for info in checkpoint.tensors.values() if info.name not in model.tensors)
        shapes |= {
            info.name: (info.shape, info.name)
            for info in others
            if not info.name.startswith(model.tower)
        }
    tensors = []
    for name, (shape, source) in shapes.items():
        first = source if isinstance(source, str) else next(iter(source or ()), None)
        present = computed_dtype if first is None else checkpoint.tensors[first].dtype
        tensors.append(OutputTensor(name, output_dtype(present, dtype), shape, source))
    computed = tuple(
        tuple(
            stored_name(model, checkpoint, name)
            for name, (_, source) in layer_shapes(model, spec, layer).items()
            if source is None
        )
        for layer in range(model.geometry.layers)
    )
    config = mla_config(model, spec, theta, dtype=dtype or TORCH_NAMES[computed_dtype])
    if model.tower is not None:
        config = {**checkpoint.config, "text_config": config}
        config = config if dtype is None else with_dtype(config, dtype)

    return MlaCheckpoint(
        kind=f"MLA {spec.kv_rank}+{spec.rope_dim}",
        config=config,
        tensors=tuple(tensors),
        computed=computed,
        cache_elements=spec.kv_rank + spec.rope_dim,
        model=model,
        spec=spec,
        checkpoint=checkpoint,
    )


def mla_shapes(model: Model, spec: MlaSpec) -> Shapes:
    """The shape of each output tensor and the source tensors that it copies (see
    ``OutputTensor.source``), by name.
    """
    (embedding,), (norm,) = model.names["embedding", None], model.names["final_norm", None]
    (head,) = model.names.get(("head", None), (embedding,))
    shapes: Shapes = {
        "model.embed_tokens.weight": (model.tensors[embedding].shape, embedding),
        "model.norm.weight": (model.tensors[norm].shape, norm),
    }
    # A tied head is not stored, except for engines, whose loaders ask for it.
    if head != embedding or spec.layout == "engine":
        shapes["lm_head.weight"] = (model.tensors[head].shape, head)
    for layer in range(model.geometry.layers):
        shapes |= layer_shapes(model, spec, layer)
    return shapes


def layer_shapes(model: Model, spec: MlaSpec, layer: int) -> Shapes:
    """The entries of `mla_shapes` that belong to ``layer``."""
    shapes: Shapes = {
        name: (shape, None) for name, shape in _attention_shapes(model, spec, layer).items()
    }
    for fused in model.names.get(("gate_up", layer), ()):  # two tensors in the stock class
        rows, width = model.tensors[fused].shape
        shapes |= {
            _ROLE_NAMES[role].format(layer=layer): ((rows // 2, width), None) for role in _GATE_UP
        }
    for role, name in _ROLE_NAMES.items():
        for source in model.names.get((role, layer), ()):
            shapes[name.format(layer=layer)] = (model.tensors[source].shape, source)
    if model.layers[layer].sparse:
        shapes |= _expert_shapes(model, spec, layer)
    return shapes


def _attention_shapes(model: Model, spec: MlaSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the attention tensors in ``layer``, all of them computed, by name."""
    size = model.geometry
    heads = size.heads
    width = size.model_dim
    rank = spec.kv_rank
    nope, value = spec.head_dims(size.head_dim)
    queries = heads * (nope + spec.rope_dim)
    q_rank = query_rank(model, spec)
    if q_rank is None:
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, width)}
    else:
        shapes = {
            "q_a_proj.weight": (q_rank, width),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (queries, q_rank),
        }
    shapes["kv_a_proj_with_mqa.weight"] = (rank + spec.rope_dim, width)
    shapes["kv_a_layernorm.weight"] = (rank,)
    shapes["kv_b_proj.weight"] = (heads * (nope + value), rank)
    shapes["o_proj.weight"] = (width, heads * value)
    if spec.constant:
        biased = {"kv_a_proj_with_mqa": rank + spec.rope_dim, "o_proj": width}
        biased |= {} if q_rank is None else {"q_a_proj": q_rank}
        shapes |= {f"{name}.bias": (rows,) for name, rows in biased.items()}
    return {f"{ATTENTION.format(layer=layer)}.{name}": shape for name, shape in shapes.items()}


def _expert_shapes(model: Model, spec: MlaSpec, layer: int) -> Shapes:
    """The shapes and source tensors of the router and the experts in ``layer``, by name."""
    mlp = f"model.layers.{layer}.mlp"
    names = model.names
    (router,), downs = names["router", layer], names["expert_down", layer]
    width, inner = model.tensors[downs[0]].shape
    shared = inner if spec.layout == "engine" else 0
    pairs = zip(names["expert_gate", layer], names["expert_up", layer], strict=True)
    return {
        f"{mlp}.gate.weight": (model.tensors[router].shape, router),
        f"{mlp}.experts.gate_up_proj": (
            (len(downs), 2 * inner, width),
            tuple(name for pair in pairs for name in pair),
        ),
        f"{mlp}.experts.down_proj": ((len(downs), width, inner), downs),
        f"{mlp}.shared_experts.gate_proj.weight": ((shared, width), ()),
        f"{mlp}.shared_experts.up_proj.weight": ((shared, width), ()),
        f"{mlp}.shared_experts.down_proj.weight": ((width, shared), ()),
    }


def padding(model: Model, spec: MlaSpec) -> int:
    """The number of parameters that are zero because heads are padded."""
    size = model.geometry
    nope, value = (padded - size.head_dim for padded in spec.head_dims(size.head_dim))
    rope = spec.rope_dim - spec.used_rope_dim(size.rotary_dims)
    inputs = query_rank(model, spec) or size.model_dim
    heads = (nope + rope) * inputs + (nope + value) * spec.kv_rank + value * size.model_dim
    return size.layers * (size.heads * heads + rope * size.model_dim)
