"""Checks that find out why a model cannot become an MLA checkpoint, from its config alone. Does not
import torch.

Each problem is one line: a feature of the model that the layout cannot express, and an option to
use instead.
"""

from collections.abc import Iterator

from kvfold.attention.checkpoints import SOURCES
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_parameters
from kvfold.convert.families.schema import ROLES
from kvfold.convert.targets.mla.spec import MlaSpec, cached_divisors, context_length
from kvfold.convert.targets.same_family import cache_elements

_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_EXPERT_ROLES = {"router", "expert_gate", "expert_up", "expert_down"}
_MLP_ROLES = {"gate", "up", "gate_up", "down"}
_NORM_ROLES = {"final_norm", "attention_norm", "mlp_norm"}
_STOCK_ROLES = {"embedding", "head", *ROLES, *_NORM_ROLES, *_MLP_ROLES, *_EXPERT_ROLES}


def latent_problems(model: Model, spec: MlaSpec, *, allow_growth: bool = False) -> list[str]:
    """All reasons why ``model`` cannot be converted to ``spec``, one line each; empty if it can."""
    problems = _own_problems(model) if spec.layout == "kvfold" else model_problems(model)
    if spec.layout == "engine":
        for feature in _engine_features(model):
            problems.append(f"--layout engine: engines misread {feature}; use --layout free")
    return [*problems, *_size_problems(model, spec, allow_growth)]


def model_problems(model: Model) -> list[str]:
    """All features of the model that the stock MLA classes cannot express at any size, one line
    each.
    """
    kind = model.family.model_type
    if model.tower is not None and not WRAPPERS[kind].any_text:
        return [
            f"--to mla: {kind} has a fixed language model class without an MLA version; use --to"
            " gqa instead"
        ]
    layout = "--to gqa" if kind not in SOURCES or any(_own_features(model)) else "--layout kvfold"
    features = [*_attention_features(model), *_stock_features(model)]
    if model.block.sparse:
        features += _expert_features(model)
    return [
        f"--to mla: {kind} has {feature}, which the stock MLA class cannot express; use {layout}"
        " instead"
        for feature in features
    ]


def _own_problems(model: Model) -> list[str]:
    """Reasons why the model cannot be converted to layout ``kvfold``."""
    kind = model.family.model_type
    problems = [
        f"--layout kvfold: {kind} has {feature}, which MLA cannot express; use --to gqa instead"
        for feature in _own_features(model)
    ]
    if not problems and (kind not in SOURCES or model.tower is not None):
        problems = [
            f"--layout kvfold: {kind} has no latent modules in this layout yet; use --layout free"
            " or --to gqa instead"
        ]
    return problems


def _own_features(model: Model) -> Iterator[str]:
    """Yield the features that layout ``kvfold`` cannot express."""
    yield from _attention_features(model)
    # A stock class is cut to the shorter context instead; this layout keeps the source's.
    if context_length(model) < model.geometry.positions:
        yield f"other rotary frequencies for texts above {context_length(model)} tokens"


def _attention_features(model: Model) -> Iterator[str]:
    """Yield the features of the attention that no MLA layout can express."""
    norm = model.qk_norm
    if model.family.attention.sinks is not None:
        yield "learned attention sinks"
    if norm is not None and (norm.bias or norm.after_rotary):
        yield "norms on queries and keys with biases or after the rotary embedding"
    if any(layer.clip is not None for layer in model.layers):
        yield "queries, keys and values that are clipped"
    if any(layer.growth for layer in model.layers):
        yield "queries that grow with their position"
    kinds = {rope_parameters(model.values, layer.type)["rope_type"] for layer in model.layers}
    for kind in sorted(kinds.difference(_FIXED_ROPE)):
        yield f"rope_type {kind!r} instead of {', '.join(_FIXED_ROPE)}"


def _stock_features(model: Model) -> Iterator[str]:
    """Yield the features that layout ``kvfold`` can express but the stock classes cannot."""
    block = model.block
    if block.norm != "rms" or block.norm_bias or not block.norm_weight or block.norm_offset:
        yield "norms other than the standard RMSNorm"
    if block.order != "pre":
        yield f"{block.order!r} norm placement"
    scales = (block.residual_scale, block.embedding_scale, block.logit_scale)
    if scales != (1.0, 1.0, 1.0) or block.logit_softcap is not None:
        yield "scales or softcaps on residuals, embeddings or logits"
    roles = {role for role, _ in model.names}
    # Whatever the block says: a tensor that the class has no place for would be lost.
    others = sorted(roles - _STOCK_ROLES)
    if others:
        yield f"tensors for {', '.join(others)}"
    if block.mlp == "plain":
        yield "MLPs without a gate"
    layers = model.layers
    context = context_length(model)
    windows = [layer.window for layer in layers if layer.window and layer.window < context]
    if windows:
        yield (
            f"{len(windows)} of {len(layers)} layers with a sliding window of {windows[0]} tokens,"
            f" fewer than the context of {context} (max_position_embeddings)"
        )
    if any(layer.softcap is not None for layer in layers):
        yield "a softcap on attention scores"
    tables = [rope_parameters(model.values, layer.type) for layer in layers]
    if any(table != tables[0] for table in tables):
        yield "different rotary frequencies per layer type"


def _expert_features(model: Model) -> Iterator[str]:
    """Yield the features of the experts that the stock class cannot express."""
    if model.block.routing is None:
        yield "experts that are not chosen by the softmax of all router logits"
    sparse = [layer.index for layer in model.layers if layer.sparse]
    dense = [layer.index for layer in model.layers if not layer.sparse and layer.index > sparse[0]]
    if dense:
        yield f"experts in layer {sparse[0]} but not in layer {dense[0]} after it"
    counts = [len(model.names.get(("expert_down", layer), ())) for layer in sparse]
    # The router adds up the best two of each group, and there is one group.
    if 1 in counts:
        yield "layers with one expert"
    if 0 in counts:
        yield "experts whose gate, up and down projections are not stored one by one"


def _engine_features(model: Model) -> Iterator[str]:
    """Yield the features that inference engines ignore or misread."""
    rope = rope_parameters(model.values)["rope_type"]
    if model.tower is not None:
        yield "language models in wrappers"
    if model.biased:
        yield f"biases on {', '.join(model.biased)}"
    if rope != "default":
        yield f"rope_type {rope!r}"
    if model.block.activation not in ("silu", "swish"):
        yield f"the activation {model.block.activation!r}"


def _size_problems(model: Model, spec: MlaSpec, allow_growth: bool) -> Iterator[str]:
    """Yield reasons why the sizes of ``spec`` are impossible or save nothing."""
    size = model.geometry
    rank = spec.kv_rank
    rope = spec.rope_dim
    # Layout engine has one slot per frequency.
    largest = size.rotary_dims * (1 if spec.layout == "engine" else size.kv_heads)
    smallest = min(2, largest)
    if rope % 2 or not smallest <= spec.used_rope_dim(size.rotary_dims) <= largest:
        rule = f"an even number from {smallest} to {largest}" if largest else "0"
        yield f"--rope-dim {rope} must be {rule}, because heads have {size.rotary_dims} rotary dims"
    if rank < 1 + spec.constant:
        yield f"--kv-rank {rank} must be at least {1 + spec.constant}"
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
