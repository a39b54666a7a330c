"""The config and the tensors of the stock class for a model with latent attention (MLA). Does not
import torch.

Layout ``free`` supports any frequencies and attention biases (one latent channel is a constant that
makes the latent's RMSNorm a known factor). The DeepSeek loaders of inference engines silently drop
both, so the output is not a DeepSeek model but a ``YoutuForCausalLM`` (stock in transformers),
which has the same attention and tensor names, and dense layers.

Layout ``engine`` is a ``DeepseekV3ForCausalLM`` that those loaders read correctly: no biases, YaRN
(also for plain RoPE), an untied head, and only dense layers (``first_k_dense_replace`` is the
number of layers).

A model with experts becomes a ``Mistral4ForCausalLM`` in both layouts. Its router computes the
softmax of all logits, selects the largest probabilities, and optionally divides them by their sum,
like mixtral and qwen3_moe (DeepSeek-V3 uses a sigmoid, and DeepSeek-V2 never divides).

Experts are copied without decoding them. The experts of a layer are stored in two tensors: ``[n, 2
I, E]``, with the gate rows of each expert before its up rows, and ``[n, E, I]``. Both are
concatenations of the bytes of source tensors. The class adds a shared expert to the routed experts,
but the source has no shared expert: layout ``free`` stores a shared expert of width 0, and layout
``engine`` stores zeros, because the loaders of engines expect its tensors.

``classes.json`` has the names of copied tensors by their roles, and the keys of config.json for
each class, in order; strings are expressions (see ``families/values.py``). The pad token is left
out in layout ``free``, because transformers 5.23 zeroes its embedding when it loads a Youtu model.
A DeepSeek model without experts has the smallest numbers that its readers accept: llama.cpp refuses
a model with as many groups of experts as experts, hence two.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from kvfold.convert.checkpoint.files import remove_code_reference, set_config_dtype
from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import find_wrapper_prefixes
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import (
    make_older_rope_keys,
    read_rope_parameters,
    scale_frequencies_yarn,
)
from kvfold.convert.families.values import evaluate_expression
from kvfold.convert.targets.custom_code import CODE, build_custom_config, plan_custom_tensors
from kvfold.convert.targets.mla.spec import (
    ATTENTION,
    SHAPES,
    MlaSpec,
    collect_mla_sizes,
    count_cached_divisors,
)
from kvfold.convert.targets.output_checkpoint import (
    OutputCheckpoint,
    choose_computed_dtype,
    choose_output_dtype,
)

_ROPE_BASE = 10000.0  # of the standard frequencies that longrope's factors divide
_CLASSES = json.loads(Path(__file__).with_name("classes.json").read_text(encoding="utf-8"))
_TENSORS: dict[str, str] = _CLASSES["tensors"]
# Properties of a model's block that a stock class has, or the config states; the others must have
# their defaults.
_STATED = {"norm", "norm_eps", "activation", "mlp", "order", "sparse", "tied"}
_STATED |= {"experts_per_token", "experts_renormalized"}
Source = str | tuple[str, ...] | None
TensorShapes = dict[str, tuple[tuple[int, ...], Source]]


def build_mla_config(
    model: Model, spec: MlaSpec, theta: Sequence[float], *, dtype: str
) -> dict[str, Any]:
    """Return ``config.json`` of the model converted to a stock MLA class. ``theta [P/2]`` are the
    rotary frequencies in radians per position.

    ``dtype`` is in the spelling of transformers. The dtype has two keys, for readers before and
    after transformers 5; in layout ``engine`` so do the frequencies.
    """
    block = model.block
    # Where all layers have experts, the width of the MLPs that the model lacks is theirs.
    down = model.list_names("down", 0) or model.list_names("expert_down", 0)
    values = {
        "attention_dropout": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **model.config,
        **vars(block),
        **collect_mla_sizes(model, spec),
        "context": model.geometry.positions,
        "mlp_width": model.tensors[down[0]].shape[1],
    }
    if block.sparse:
        sparse = [layer.index for layer in model.layers if layer.sparse]
        downs = model.list_names("expert_down", sparse[0])
        values["dense_layers"] = sparse[0]
        values["expert_width"] = model.tensors[downs[0]].shape[1]
        values["experts"] = len(downs)
    stock = _CLASSES["experts" if block.sparse else spec.layout]
    keys = {**stock["class"], **_CLASSES["all"], **stock["experts"]}
    return {
        **_evaluate_all(keys, values),
        **_build_rope_config(model, spec, theta),
        "dtype": dtype,
        "torch_dtype": dtype,  # the spelling before transformers 5
    }


def _evaluate_all(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``table`` with each string value replaced by the result of its expression over
    ``values``.
    """
    return {key: evaluate_expression(value, values) for key, value in table.items()}


def _build_rope_config(model: Model, spec: MlaSpec, theta: Sequence[float]) -> dict[str, Any]:
    """Return the config keys for the rotary embedding with frequencies ``theta [P/2]``, and
    ``head_dim`` if a reader of the config needs it.
    """
    engine = spec.layout == "engine"
    sparse = model.block.sparse
    positions = model.geometry.positions
    base = find_rope_base(theta)
    if engine or (base is not None and sparse):
        table, _ = fit_yarn_parameters(model, spec, theta)
    elif base is not None and not spec.has_kernels:
        table = {"rope_type": "default", "rope_theta": base}
    else:
        table = build_longrope_parameters(theta, positions)
    if engine and not sparse:
        table = {"rope_parameters": table}
        return {**make_older_rope_keys(table), **table}
    if not sparse and not spec.has_kernels:
        return {"rope_parameters": table}
    # vLLM's Transformers backend takes head_dim for the size of the latent cache. Youtu and
    # Mistral4 rotate a part of their head_dim dims, rounded down, and otherwise ignore it: where
    # kernels support the cache one value serves all.
    head_dim = spec.rope_dim + (
        spec.kv_rank if spec.has_kernels else spec.choose_head_dims(model.geometry.head_dim)[0]
    )
    table["partial_rotary_factor"] = (spec.rope_dim + 0.5) / head_dim
    if sparse:
        table["llama_4_scaling_beta"] = 0.0  # else Mistral4 scales queries by their position
    return {"head_dim": head_dim, "rope_parameters": table}


def fit_yarn_parameters(
    model: Model, spec: MlaSpec, theta: Sequence[float]
) -> tuple[dict[str, Any], list[float]]:
    """Return the YaRN rope parameters for ``spec.rope_dim`` dims whose frequencies are nearest to
    ``theta [n]``, those of the rotary pairs that are kept, and the ``n`` frequencies that loaders
    compute from these parameters.

    Plain RoPE is YaRN of factor 1. The loaders of engines read any other type of a DeepSeek config
    as YaRN too, as DeepSeek-V3 has it: the first pairs of plain RoPE, then a blend that is linear
    in the pair's index, then pairs divided by the factor. The first pair always turns by one radian
    per position. So YaRN's frequencies are exact if its blend begins and ends at kept pairs, those
    of llama3 but for its blend, and those of linear but for the first. Nearest is least in the sum
    of ``log(1 + difference * context)``, the octaves of distances at which a pair is out of phase.
    """
    positions = model.geometry.positions
    plain_base = find_rope_base(theta)
    if plain_base is not None:
        # Not the default type: for plain interleaved RoPE vLLM 0.32 has a kernel on CPUs that
        # rotates several heads wrongly.
        values = {"base": plain_base, "context": positions}
        return _evaluate_all(_CLASSES["yarn"], values), list(theta)
    source_base = read_rope_parameters(model.values)["rope_theta"]
    pairs = model.geometry.rotary_dims // 2
    stored = spec.rope_dim // 2
    count = len(theta)
    fits = []
    for step in range(1, max(1, (pairs - 1) // max(1, count - 1)) + 1):
        base = source_base ** (step * count / pairs)
        plain = [base ** (-index / stored) for index in range(stored)]
        used = plain[:: stored // count]
        factor = max(1.0, *(before / after for before, after in zip(used, theta, strict=True)))
        # The product is the context that vLLM serves, the quotient what transformers expects.
        context = max(1, round(positions / factor))
        values = {"base": base, "context": context}
        table = {**_evaluate_all(_CLASSES["yarn"], values), "factor": positions / context}
        for first, last in combinations(range(2 * stored), 2):
            # Turns within the context between two pairs, which readers round to these.
            for key, pair in (("beta_fast", first + 0.25), ("beta_slow", last - 0.25)):
                table[key] = context / (2 * math.pi) * base ** (-pair / stored)
            scaled = scale_frequencies_yarn(table, plain, positions)[0][:: stored // count]
            differences = zip(scaled, theta, strict=True)
            error = sum(math.log1p(abs(a - b) * positions) for a, b in differences)
            fits.append((error, {**table}, scaled))
    _, table, scaled = min(fits, key=lambda fit: fit[0])
    return table, scaled


def build_longrope_parameters(theta: Sequence[float], positions: int) -> dict[str, Any]:
    """Return ``rope_parameters`` of type longrope that give any rotary frequencies ``theta [P/2]``:
    one factor for each standard frequency, equal for short and long texts.
    """
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


def find_rope_base(theta: Sequence[float]) -> float | None:
    """Return the RoPE base for which ``theta_i = base^(-2i/P)`` holds for all ``P/2`` frequencies
    within float32 precision, or None if there is none.
    """
    # Plain RoPE starts at one radian per position, whatever its base.
    if not math.isclose(theta[0], 1.0, rel_tol=1e-7):
        return None
    base = _ROPE_BASE if len(theta) == 1 else theta[-1] ** (-len(theta) / (len(theta) - 1))
    base = float(round(base)) if math.isclose(base, round(base), rel_tol=1e-6) else base
    for index, angle in enumerate(theta):
        if not math.isclose(angle, base ** (-index / len(theta)), rel_tol=3e-7):
            return None
    return base


@dataclass(frozen=True, kw_only=True)
class MlaCheckpoint(OutputCheckpoint):
    """MLA of ``spec`` for ``model``, whose files are ``checkpoint``."""

    model: Model
    spec: MlaSpec
    checkpoint: Checkpoint
    dtype: str

    def encode_layer(self, layer: int, weights: Any) -> Mapping[str, Any]:
        """Return the stored tensors of ``layer`` by name, from its converted MLA ``weights``; a
        stock class splits a fused gate and up projection.
        """
        # needs torch, a plan does not
        from kvfold.convert.targets.mla.encode import encode_custom_mla, encode_stock_mla

        if self.spec.layout == "kvfold":
            shapes = list_attention_shapes(self.model, self.spec, layer)
            return encode_custom_mla(weights, shapes)
        engine = self.spec.layout == "engine"
        factor = self.config["rope_parameters"]["factor"] if engine else 1.0
        tensors = encode_stock_mla(weights, layer, self.spec, factor)
        for fused in self.model.list_names("gate_up", layer):
            halves = self.checkpoint.read_tensor(fused).chunk(2)
            for role, half in zip(("gate", "up"), halves, strict=True):
                tensors[_TENSORS[role].format(layer=layer)] = half.contiguous()
        if self.model.tower is None:
            return tensors
        prefixes = find_wrapper_prefixes(self.checkpoint.tensors)
        return {prefixes.to_wrapped_name(name): tensor for name, tensor in tensors.items()}

    def with_frequencies(self, theta: Sequence[Sequence[float]]) -> Self:
        """Return this checkpoint with its config.json filled in for the rotary frequencies ``theta
        [layers][P/2]``, in radians per position. A stock class has one set for all layers: that of
        the first.
        """
        if self.spec.layout == "kvfold":
            facts = _build_custom_mla_entries(self.model, self.spec)
            config = build_custom_config(self.model, self.checkpoint, facts, self.dtype, theta)
            return replace(self, config=config)
        stored = TORCH_NAMES[choose_computed_dtype(self.model, self.checkpoint, self.dtype)]
        config = build_mla_config(self.model, self.spec, theta[0], dtype=stored)
        if self.model.tower is not None:
            config = remove_code_reference({**self.checkpoint.config, "text_config": config})
            config = config if self.dtype == "auto" else set_config_dtype(config, self.dtype)
        return replace(self, config=config)


def plan_mla_output(
    model: Model, checkpoint: Checkpoint, spec: MlaSpec, dtype: str
) -> MlaCheckpoint:
    """The checkpoint of ``model`` as MLA, in a stock class or in layout ``kvfold``.

    Its cache takes ``spec.kv_rank + spec.rope_dim`` elements per token per layer, plus
    `count_cached_divisors` (divisors of norms) if layout ``kvfold`` keeps the source's norms.
    ``dtype`` is the stored dtype in torch's spelling; ``auto`` keeps the dtype of each tensor, and
    computed tensors then have the dtype of the first query projection.
    """
    divisors = count_cached_divisors(model, spec)
    own = spec.layout == "kvfold"
    if own:
        layers = range(model.geometry.layers)
        shapes = [list_attention_shapes(model, spec, layer) for layer in layers]
        tensors = plan_custom_tensors(model, checkpoint, shapes, dtype)
    else:
        if lost := _list_lost_properties(model):
            raise InputError(
                f"{checkpoint.origin}: the result would compute something other than the source;"
                " use another --to or --layout",
                lost,
            )
        tensors = _plan_stock_tensors(model, checkpoint, spec, dtype)
    return MlaCheckpoint(
        kind=f"MLA {spec.kv_rank}+{spec.rope_dim}{f'+{divisors}' if divisors else ''}"
        + format_context(model),
        config={},
        tensors=tensors,
        code=CODE if own else None,
        model=model,
        spec=spec,
        checkpoint=checkpoint,
        dtype=dtype,
    )


def _list_lost_properties(model: Model) -> list[str]:
    """The properties of ``model`` that no stock class has, though no rule of ``problems.json``
    refuses them.
    """
    block = model.block
    lost = [
        f"{item.name}: {getattr(block, item.name)}"
        for item in fields(block)
        if item.name not in _STATED and getattr(block, item.name) != item.default
    ]
    context = model.geometry.positions
    for layer in model.layers:
        if layer.window and layer.window < context:
            lost.append(f"sliding_window of layer {layer.index}: {layer.window}")
        if layer.softcap is not None:
            lost.append(f"softcap of layer {layer.index}: {layer.softcap}")
    return lost


def format_context(model: Model) -> str:
    """Return the suffix of the kind of attention if ``model`` has a shorter context than its config
    states, such as " (context 4096)"; otherwise an empty string.
    """
    context = model.geometry.positions
    stated = evaluate_expression(model.family.sizes.positions, model.values)
    return f" (context {context})" if context < stated else ""


def _build_custom_mla_entries(source: Model, spec: MlaSpec) -> dict[str, Any]:
    """The entries of the block ``kvfold`` in config.json that describe latent attention."""
    norm = source.qk_norm
    facts: dict[str, Any] = {
        "variant": "latent" if norm is None else "normed_latent",
        "kv_rank": spec.kv_rank,
        "rope_dim": spec.rope_dim,
        "qkv_bias": "q" in source.biased,
        "o_bias": True,  # constant values are in it
    }
    if norm is not None:
        facts["kv_heads"] = source.geometry.kv_heads
        # `flat` norms act on all heads at once; the gain of a norm is its weight plus `offset`.
        facts["norm"] = {
            "kind": norm.kind,
            "flat": norm.extent == "flat",
            "eps": norm.eps,
            "offset": norm.offset,
        }
    return facts


def _plan_stock_tensors(
    model: Model, checkpoint: Checkpoint, spec: MlaSpec, dtype: str
) -> tuple[PlannedTensor, ...]:
    """The output tensors in a stock class."""
    default = choose_computed_dtype(model, checkpoint, dtype)
    shapes = list_mla_shapes(model, spec)
    if model.tower is not None:
        # A multimodal wrapper also holds a vision tower and a projector, which are copied.
        prefixes = find_wrapper_prefixes(checkpoint.tensors)
        shapes = {prefixes.to_wrapped_name(name): value for name, value in shapes.items()}
        for info in checkpoint.tensors.values():
            if info.name not in model.tensors and not info.name.startswith(model.tower):
                shapes[info.name] = (info.shape, info.name)
    tensors = []
    for name, (shape, source) in shapes.items():
        stored = default
        if source:
            first = source if isinstance(source, str) else source[0]
            stored = choose_output_dtype(checkpoint.tensors[first].dtype, dtype)
        tensors.append(PlannedTensor(name, stored, shape, source))
    return tuple(tensors)


def list_mla_shapes(model: Model, spec: MlaSpec) -> TensorShapes:
    """Return the shape of each output tensor of a stock MLA class, and the source tensors that it
    copies (see ``PlannedTensor.source``), by name.
    """
    shapes = _list_copied_shapes(model, None)
    # A tied head is not stored, except for engines, whose loaders ask for it.
    if spec.layout == "engine":
        shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    for layer in range(model.geometry.layers):
        attention = list_attention_shapes(model, spec, layer)
        shapes |= {name: (shape, None) for name, shape in attention.items()}
        for fused in model.list_names("gate_up", layer):
            rows, width = model.tensors[fused].shape
            for role in ("gate", "up"):  # two tensors in the stock class
                shapes[_TENSORS[role].format(layer=layer)] = ((rows // 2, width), None)
        shapes |= _list_copied_shapes(model, layer)
        if model.layers[layer].sparse:
            shapes |= _list_expert_shapes(model, spec, layer)
    return shapes


def list_attention_shapes(model: Model, spec: MlaSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each attention tensor in ``layer`` of ``model`` converted to MLA with
    ``spec``, by tensor name, as ``shapes.json`` lists them.
    """
    sizes = collect_mla_sizes(model, spec)
    rows = SHAPES["stock"]
    module = ATTENTION
    if spec.layout == "kvfold":
        rows = SHAPES["kvfold"]
        module = model.family.attention.module
    return {
        f"{module.format(layer=layer)}.{name}": tuple(
            evaluate_expression(size, sizes) for size in row["shape"]
        )
        for name, row in rows.items()
        if evaluate_expression(row["when"], sizes)
    }


def _list_copied_shapes(model: Model, layer: int | None) -> TensorShapes:
    """The shapes and source tensors of norms, MLP, embedding and head in ``layer`` or outside the
    layers (None), by name.
    """
    return {
        name.format(layer=layer): (model.tensors[source].shape, source)
        for role, name in _TENSORS.items()
        for source in model.list_names(role, layer)
    }


def _list_expert_shapes(model: Model, spec: MlaSpec, layer: int) -> TensorShapes:
    """Return the shapes of the router and the experts in ``layer``, and the source tensors that
    they copy, by output name.
    """
    mlp = f"model.layers.{layer}.mlp"
    (router,) = model.list_names("router", layer)
    downs = model.list_names("expert_down", layer)
    width, inner = model.tensors[downs[0]].shape
    shared = inner if spec.layout == "engine" else 0
    gates = model.list_names("expert_gate", layer)
    pairs = zip(gates, model.list_names("expert_up", layer), strict=True)
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
