"""Checks that find out why a model cannot become an MLA checkpoint, from its config alone. Does not
import torch.

Each problem is one line: a property of the model that the layout cannot express, and an option to
use instead.
"""

from collections.abc import Iterator

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.families.schema import ROLES
from kvfold.convert.targets.mla.spec import (
    KERNEL_CACHES,
    KERNEL_HEADS,
    MlaSpec,
    cached_divisors,
    context,
    full_query_rank,
)
from kvfold.convert.targets.same_family import cache_elements

_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_EXPERTS = frozenset({"router", "expert_gate", "expert_up", "expert_down"})
_SHARED_PREFIX = "shared_"  # prefix of the roles of a shared expert's tensors
_LEAST_EXPERTS = 2  # the router adds up the best two of each group, and there is one group
_ROLES = _EXPERTS | {
    "embedding",
    "final_norm",
    "head",
    "attention_norm",
    "mlp_norm",
    "gate",
    "up",
    "gate_up",
    "down",
}
_MLP_BIASES = frozenset({"gate_bias", "up_bias", "gate_up_bias", "down_bias"})


def latent_problems(model: Model, target: MlaSpec, *, allow_growth: bool = False) -> list[str]:
    """All reasons why ``model`` cannot be converted to ``target``, one line each; empty if it can."""
    if target.layout == "kvfold":
        own = _own_problems(model, target)
        problems = [f"--layout kvfold: {model.family.model_type} {problem}" for problem in own]
    else:
        engine = _engine_problems(model) if target.layout == "engine" else ()
        advised = (f"--layout engine: {problem}; use --layout free" for problem in engine)
        problems = [*model_problems(model), *advised]
    return [*problems, *_size_problems(model, target, allow_growth)]


def model_problems(model: Model) -> list[str]:
    """All properties of the model that the stock MLA classes cannot express at any size, one line
    each.
    """
    kind = model.family.model_type
    gqa = "use --to gqa instead"
    if model.tower is not None and not WRAPPERS[kind].any_text:
        return [f"--to mla: {kind} has a fixed language model class without an MLA version; {gqa}"]
    problems = [
        *_block_problems(model),
        *(_expert_problems(model) if model.block.sparse else ()),
        *_attention_problems(model),
        *_stock_attention_problems(model),
    ]
    own = kind in SOURCES and not any(_own_attention_problems(model))
    instead = "use --layout kvfold instead" if own else gqa
    return [f"--to mla: {kind} {problem}; {instead}" for problem in problems]


def _own_problems(model: Model, target: MlaSpec) -> Iterator[str]:
    """Yield reasons why the model cannot be converted to ``target`` in layout ``kvfold``."""
    attention = [f"{problem}; use --to gqa instead" for problem in _own_attention_problems(model)]
    if not attention and (model.family.model_type not in SOURCES or model.tower is not None):
        yield ("has no latent modules in this layout yet; use --layout free or --to gqa instead")
    if target.q_rank is not None:
        yield "has no query latent in this layout; remove --q-rank"
    yield from attention


def _own_attention_problems(model: Model) -> Iterator[str]:
    yield from _attention_problems(model)
    for kind in {layer.type for layer in model.layers}:
        table = rope_table(model.values, kind)
        if table["rope_type"] == "longrope" and table.get("short_factor") != table.get(
            "long_factor"
        ):
            # A stock class is cut to the shorter context instead; this layout keeps the source's.
            yield (
                f"has other frequencies for texts above {context(model)} tokens, but MLA layouts"
                " have only one set"
            )
            break


def _block_problems(model: Model) -> Iterator[str]:
    block = model.block
    if block.norm != "rms" or block.norm_bias or not block.norm_weight or block.norm_offset:
        described = "LayerNorm" if block.norm == "layer" else "an RMSNorm variant"
        yield f"uses {described}, but the stock MLA class supports only standard RMSNorm"
    if block.mlp == "plain":
        yield "has MLPs without a gate, but the stock MLA class has gated MLPs"
    if block.order != "pre":
        yield (
            f"has {block.order!r} norm placement, but the stock MLA class normalizes before"
            " attention and MLP"
        )
    scales = {
        "residual": block.residual_scale,
        "embedding": block.embedding_scale,
        "logit": block.logit_scale,
    }
    for name, value in scales.items():
        if value != 1.0:
            yield f"has a {name} scale of {value:g}, but the stock MLA class has no such scale"
    if block.logit_softcap is not None:
        yield (
            f"has a logit softcap of {block.logit_softcap:g}, but the stock MLA class has no"
            " softcap"
        )
    # Whatever the block says: a tensor that the class has no place for would be lost.
    roles = {role for role, _ in model.names if not role.startswith(_SHARED_PREFIX)} - {*ROLES}
    if biases := sorted(roles & _MLP_BIASES):
        yield (
            f"has biases in its MLPs ({', '.join(biases)}), but the stock MLA class has no MLP"
            " biases"
        )
    if other := sorted(roles - _ROLES - _MLP_BIASES):
        yield f"has tensors that the stock MLA class lacks ({', '.join(other)})"


def _expert_problems(model: Model) -> Iterator[str]:
    """Yield properties of the experts that the stock class cannot express."""
    roles = {role for role, _ in model.names}
    if model.block.routing is None:
        yield (
            "does not route tokens by the softmax of all router logits, but the stock MLA class"
            " with experts does"
        )
    if any(role.startswith(_SHARED_PREFIX) for role in roles):
        how = (
            "weights its shared expert by a gate"
            if f"{_SHARED_PREFIX}router" in roles
            else "has shared experts"
        )
        yield f"{how}, but the stock MLA class adds shared experts unweighted"
    if _EXPERTS - roles:
        yield "does not store separate gate, up and down projections for each expert"
        return
    first = next(layer.index for layer in model.layers if layer.sparse)
    if mixed := [layer.index for layer in model.layers[first:] if not layer.sparse]:
        yield (
            f"has experts in layer {first} but not in layer {mixed[0]}; in the stock MLA class,"
            " dense layers come before all layers with experts"
        )
    if any(
        len(names) < _LEAST_EXPERTS
        for (role, _), names in model.names.items()
        if role == "expert_down"
    ):
        yield (
            "has layers with only one expert, but the stock MLA class needs at least"
            f" {_LEAST_EXPERTS}"
        )


def _attention_problems(model: Model) -> Iterator[str]:
    """Yield properties of the attention that no MLA layout can express."""
    layers = model.layers
    if model.family.attention.sinks is not None:
        yield "has learned attention sinks, but MLA layouts do not support sinks"
    if model.qk_norm is not None and model.qk_norm.bias:
        yield "has norms with biases on queries and keys, which no projection can replace"
    if model.qk_norm is not None and model.qk_norm.after_rotary:
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
    types = sorted({layer.type for layer in layers}, key=str)
    for kind in dict.fromkeys(
        rope_table(model.values, layer_type)["rope_type"] for layer_type in types
    ):
        if kind not in _FIXED_ROPE:
            yield f"has rope_type {kind!r}, but MLA layouts support only {', '.join(_FIXED_ROPE)}"


def _stock_attention_problems(model: Model) -> Iterator[str]:
    """Yield properties of the attention that layout ``kvfold`` can express but the stock classes
    cannot.
    """
    layers = model.layers
    longest = context(model)
    if narrow := [
        layer.window for layer in layers if layer.window is not None and layer.window < longest
    ]:
        yield (
            f"has {len(narrow)} of {len(layers)} layers with a sliding window of {narrow[0]}"
            f" tokens, fewer than the context of {longest} (max_position_embeddings), but the stock"
            " MLA class has no sliding windows"
        )
    if any(layer.softcap is not None for layer in layers):
        yield "has a softcap on attention scores, but the stock MLA class has no softcap"
    first, *others = (rope_table(model.values, kind) for kind in {layer.type for layer in layers})
    if any(table != first for table in others):
        yield (
            "has different rotary frequencies per layer type, but the stock MLA class has only"
            " one set"
        )


def _engine_problems(model: Model) -> Iterator[str]:
    """Yield the model's properties that inference engines ignore or misread."""
    if model.tower is not None:
        yield (
            f"{model.family.model_type} wraps a language model, and no engine is known to load MLA"
            " inside a wrapper"
        )
    if "q" in model.biased:
        yield (
            f"{model.family.model_type} has biases on queries, keys and values, which engines do"
            " not load"
        )
    if "o" in model.biased:
        yield (
            f"{model.family.model_type} has a bias on the attention output, which engines do not"
            " load"
        )
    if (kind := rope_table(model.values)["rope_type"]) != "default":
        yield f"rope_type is {kind!r}, but engines support only 'default'"
    if (activation := model.block.activation) not in ("silu", "swish"):
        yield f"the activation is {activation!r}, but engines support only 'silu'"


def _size_problems(model: Model, target: MlaSpec, allow_growth: bool) -> Iterator[str]:
    size = model.geometry
    divisors = cached_divisors(model, target)
    rank = target.kv_rank
    rope = target.rope_dim
    engine = target.layout == "engine"
    least = 1 + target.constant
    most = size.rotary_dims * (1 if engine else size.kv_heads)
    rule = ""
    if not most:
        rule = "must be 0, because the model has no rotary embedding" if rope else ""
    elif rope < 2:
        rule = f"must be an even number from 2 to {most}"
    elif target.rope_kept(size.rotary_dims) > most:
        times = "" if engine else f" times {size.kv_heads} key/value heads"
        rule = f"must be at most {most} ({size.rotary_dims} rotary dims per head{times})"
        if (
            engine
            and rope in {dims for _, dims, _ in KERNEL_HEADS}
            and rope % size.rotary_dims == 0
        ):
            ranks = ", ".join(str(cache - rope) for cache in KERNEL_CACHES)
            rule += f"; use {most}, or --kv-rank {ranks}, whose kernels take zeros in the rest"
    elif rope % 2:
        rule = f"must be even, such as {rope + 1}, because rotary dims come in pairs"
    if rule:
        yield f"--rope-dim {rope} {rule}"
    if rank < least:
        why = ", because one channel is constant" * target.constant
        yield f"--kv-rank {rank} must be at least {least}{why}"
    present = cache_elements(size)
    if rank + rope + divisors >= present and not allow_growth:
        kept = f" ({divisors} of them for key norms)" if divisors else ""
        caches = (
            f"and --rope-dim {rope} need {rank + rope + divisors} elements per token per"
            f" layer{kept}"
        )
        way_out = "lower either value, or add --allow-growth"
        yield (f"--kv-rank {rank} {caches}, no fewer than the source's {present}; {way_out}")
    full = full_query_rank(model, target)
    if target.q_rank is not None and not least <= target.q_rank <= full:
        yield (f"--q-rank {target.q_rank} must be from {least} to {full}; {full} is lossless")
