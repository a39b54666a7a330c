"""Checks that find out why a model cannot become an MLA checkpoint, from its config alone. Does not
import torch.

Each problem is one line: a property of the model that the layout cannot express, and an option to
use instead.
"""

from collections.abc import Iterator

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_parameters
from kvfold.convert.families.schema import ROLES
from kvfold.convert.targets.mla.spec import (
    KERNEL_CACHES,
    KERNEL_HEADS,
    MlaSpec,
    cached_divisors,
    context_length,
)
from kvfold.convert.targets.same_family import cache_elements

_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_EXPERTS = {"router", "expert_gate", "expert_up", "expert_down"}
_ROLES = {"embedding", "final_norm", "head", "attention_norm", "mlp_norm"}
_MLP = {"gate", "up", "gate_up", "down"}
_MLP_BIASES = {"gate_bias", "up_bias", "gate_up_bias", "down_bias"}
_SHARED = "shared_"  # begins the roles of a shared expert's tensors
_MIN_EXPERTS = 2  # the router adds up the best two of each group, and there is one group


def latent_problems(model: Model, spec: MlaSpec, *, allow_growth: bool = False) -> list[str]:
    """All reasons why ``model`` cannot be converted to ``spec``, one line each; empty if it can."""
    if spec.layout == "kvfold":
        problems = _own_problems(model)
    else:
        problems = model_problems(model)
        if spec.layout == "engine":
            problems += _engine_problems(model)
    return [*problems, *_size_problems(model, spec, allow_growth)]


def model_problems(model: Model) -> list[str]:
    """All properties of the model that the stock MLA classes cannot express at any size, one line
    each.
    """
    kind = model.family.model_type
    if model.tower is not None and not WRAPPERS[kind].any_text:
        return [
            f"--to mla: {kind} has a fixed language model class without an MLA version; use --to"
            " gqa instead"
        ]
    problems = [
        *_block_problems(model),
        *(_expert_problems(model) if model.block.sparse else ()),
        *_attention_problems(model),
        *_stock_attention_problems(model),
    ]
    own = kind in SOURCES and not any(_own_attention_problems(model))
    instead = "--layout kvfold" if own else "--to gqa"
    return [f"--to mla: {kind} {problem}; use {instead} instead" for problem in problems]


def _own_problems(model: Model) -> list[str]:
    """Reasons why the model cannot be converted to layout ``kvfold``."""
    kind = model.family.model_type
    problems = [f"{problem}; use --to gqa instead" for problem in _own_attention_problems(model)]
    if not problems and (kind not in SOURCES or model.tower is not None):
        problems = [
            "has no latent modules in this layout yet; use --layout free or --to gqa instead"
        ]
    return [f"--layout kvfold: {kind} {problem}" for problem in problems]


def _own_attention_problems(model: Model) -> Iterator[str]:
    yield from _attention_problems(model)
    # A stock class is cut to the shorter context instead; this layout keeps the source's.
    if context_length(model) < model.geometry.positions:
        yield (
            f"has other frequencies for texts above {context_length(model)} tokens, but MLA layouts"
            " have only one set"
        )


def _block_problems(model: Model) -> Iterator[str]:
    """Yield properties of the block around the attention that the stock classes cannot express."""
    block = model.block
    if block.norm != "rms" or block.norm_bias or not block.norm_weight or block.norm_offset:
        norm = "LayerNorm" if block.norm == "layer" else "an RMSNorm variant"
        yield f"uses {norm}, but the stock MLA class supports only standard RMSNorm"
    if block.mlp == "plain":
        yield "has MLPs without a gate, but the stock MLA class has gated MLPs"
    if block.order != "pre":
        yield (
            f"has {block.order!r} norm placement, but the stock MLA class normalizes before"
            " attention and MLP"
        )
    for name in ("residual", "embedding", "logit"):
        scale = getattr(block, f"{name}_scale")
        if scale != 1.0:
            yield f"has a {name} scale of {scale:g}, but the stock MLA class has no such scale"
    if block.logit_softcap is not None:
        yield f"has a logit softcap of {block.logit_softcap:g}, but the stock MLA class has none"
    # Whatever the block says: a tensor that the class has no place for would be lost.
    roles = {role for role, _ in model.names if not role.startswith(_SHARED)}
    biases = sorted(roles & _MLP_BIASES)
    if biases:
        yield f"has biases in its MLPs ({', '.join(biases)}), but the stock MLA class has none"
    others = sorted(roles - {*ROLES} - _ROLES - _MLP - _EXPERTS - _MLP_BIASES)
    if others:
        yield f"has tensors that the stock MLA class lacks ({', '.join(others)})"


def _expert_problems(model: Model) -> Iterator[str]:
    """Yield properties of the experts that the stock class cannot express."""
    roles = {role for role, _ in model.names}
    if model.block.routing is None:
        yield (
            "does not route tokens by the softmax of all router logits, but the stock MLA class"
            " with experts does"
        )
    if any(role.startswith(_SHARED) for role in roles):
        gated = f"{_SHARED}router" in roles
        how = "weights its shared expert by a gate" if gated else "has shared experts"
        yield f"{how}, but the stock MLA class adds shared experts unweighted"
    if _EXPERTS - roles:
        yield "does not store separate gate, up and down projections for each expert"
        return
    sparse = [layer.index for layer in model.layers if layer.sparse]
    dense = [layer.index for layer in model.layers if not layer.sparse and layer.index > sparse[0]]
    if dense:
        yield (
            f"has experts in layer {sparse[0]} but not in layer {dense[0]}; in the stock MLA class,"
            " dense layers come before all layers with experts"
        )
    if any(len(model.names["expert_down", layer]) < _MIN_EXPERTS for layer in sparse):
        yield f"has layers with one expert, but the stock MLA class needs at least {_MIN_EXPERTS}"


def _attention_problems(model: Model) -> Iterator[str]:
    """Yield properties of the attention that no MLA layout can express."""
    layers = model.layers
    norm = model.qk_norm
    if model.family.attention.sinks is not None:
        yield "has learned attention sinks, but MLA layouts do not support sinks"
    if norm is not None and norm.bias:
        yield "has norms with biases on queries and keys, which no projection can replace"
    if norm is not None and norm.after_rotary:
        yield (
            "normalizes queries and keys after their rotary embedding, which no linear map can"
            " replace"
        )
    if any(layer.clip is not None for layer in layers):
        yield "clips queries, keys and values, but MLA layouts do not support clipping"
    if any(layer.growth for layer in layers):
        yield (
            "multiplies queries by a factor that grows with their position, but MLA layouts cannot"
        )
    kinds = {rope_parameters(model.values, layer.type)["rope_type"] for layer in layers}
    for kind in sorted(kinds.difference(_FIXED_ROPE)):
        yield f"has rope_type {kind!r}, but MLA layouts support only {', '.join(_FIXED_ROPE)}"


def _stock_attention_problems(model: Model) -> Iterator[str]:
    """Yield properties of the attention that layout ``kvfold`` can express but the stock classes
    cannot.
    """
    layers = model.layers
    context = context_length(model)
    windows = [layer.window for layer in layers if layer.window and layer.window < context]
    if windows:
        yield (
            f"has {len(windows)} of {len(layers)} layers with a sliding window of {windows[0]}"
            f" tokens, fewer than the context of {context} (max_position_embeddings), but the stock"
            " MLA class has no sliding windows"
        )
    if any(layer.softcap is not None for layer in layers):
        yield "has a softcap on attention scores, but the stock MLA class has no softcap"
    tables = [rope_parameters(model.values, layer.type) for layer in layers]
    if any(table != tables[0] for table in tables):
        yield (
            "has different rotary frequencies per layer type, but the stock MLA class has only"
            " one set"
        )


def _engine_problems(model: Model) -> list[str]:
    """The model's properties that inference engines ignore or misread."""
    kind = model.family.model_type
    rope = rope_parameters(model.values)["rope_type"]
    activation = model.block.activation
    checks = (
        (
            model.tower is not None,
            f"{kind} wraps a language model, which no engine is known to load",
        ),
        ("q" in model.biased, f"{kind} has biases on queries, keys and values, lost in engines"),
        ("o" in model.biased, f"{kind} has a bias on the attention output, lost in engines"),
        (rope != "default", f"rope_type is {rope!r}, but engines support only 'default'"),
        (
            activation not in ("silu", "swish"),
            f"the activation is {activation!r}, but engines support only 'silu'",
        ),
    )
    return [f"--layout engine: {text}; use --layout free" for found, text in checks if found]


def _size_problems(model: Model, spec: MlaSpec, allow_growth: bool) -> Iterator[str]:
    """Yield reasons why the sizes of ``spec`` are impossible or save nothing."""
    size = model.geometry
    rank = spec.kv_rank
    rope = spec.rope_dim
    engine = spec.layout == "engine"
    largest = size.rotary_dims * (1 if engine else size.kv_heads)
    if not largest:
        if rope:
            yield f"--rope-dim {rope} must be 0, because the model has no rotary embedding"
    elif rope < 2:
        yield f"--rope-dim {rope} must be an even number from 2 to {largest}"
    elif spec.used_rope_dim(size.rotary_dims) > largest:
        times = "" if engine else f" times {size.kv_heads} key/value heads"
        rule = f"must be at most {largest} ({size.rotary_dims} rotary dims per head{times})"
        kernels = engine and rope in {dims for _, dims, _ in KERNEL_HEADS}
        if kernels and rope % size.rotary_dims == 0:
            ranks = ", ".join(str(cache - rope) for cache in KERNEL_CACHES)
            rule += f"; use {largest}, or --kv-rank {ranks}, whose kernels take zeros in the rest"
        yield f"--rope-dim {rope} {rule}"
    elif rope % 2:
        yield (
            f"--rope-dim {rope} must be even, such as {rope + 1}, because rotary dims come in pairs"
        )
    if rank < 1 + spec.constant:
        why = ", because one channel is constant" * spec.constant
        yield f"--kv-rank {rank} must be at least {1 + spec.constant}{why}"
    divisors = cached_divisors(model, spec)
    cache = rank + rope + divisors
    present = cache_elements(size)
    if cache >= present and not allow_growth:
        norms = f" ({divisors} of them for key norms)" if divisors else ""
        yield (
            f"--kv-rank {rank} and --rope-dim {rope} need {cache} elements per token per"
            f" layer{norms}, no fewer than the source's {present}; lower either value, or add"
            " --allow-growth"
        )
