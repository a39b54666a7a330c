"""Layers with experts in the stock class that holds latent attention beside them, ``Mistral4ForCausalLM``; no torch.

Its router takes the softmax of all logits, the largest few of it, and divides them by their sum or not: as mixtral,
qwen3_moe and kin do. DeepSeek-V3 and its kin weigh by a sigmoid, DeepSeek-V2 never divides. The experts of a layer are
two tensors, ``[n, 2 I, E]`` with the rows of each gate before those of its up, and ``[n, E, I]``: in both the bytes of
the source's tensors follow one another, so experts are copied and never decoded.

The class adds a shared expert to the routed ones. There is none to convert: layout ``free`` has one of width 0, layout
``engine`` one of zeros, since the loaders of engines expect its tensors.
"""

from collections.abc import Iterator
from typing import Any

from kvfold.convert.families.model import Model

EXPERT_TYPE = "mistral4"
EXPERT_CLASS: dict[str, Any] = {"architectures": ["Mistral4ForCausalLM"], "model_type": EXPERT_TYPE}
EXPERT_ROLES = frozenset({"router", "expert_gate", "expert_up", "expert_down"})
_SHARED = "shared_"  # how the roles of a shared expert's tensors begin
_LEAST = 2  # experts: the router adds up the best two of each group, and there is one group

Source = str | tuple[str, ...] | None
Shapes = Iterator[tuple[str, tuple[tuple[int, ...], Source]]]


def expert_shapes(model: Model, layer: int, shared: int) -> Shapes:
    """The tensors of a layer's experts as ``config.mla_shapes`` gives them, with ``shared`` shared experts of zeros."""
    mlp, names = f"model.layers.{layer}.mlp", model.names
    (router,), downs = names["router", layer], names["expert_down", layer]
    width, inner = model.tensors[downs[0]].shape
    pairs = zip(names["expert_gate", layer], names["expert_up", layer], strict=True)
    yield f"{mlp}.gate.weight", (model.tensors[router].shape, router)
    yield (
        f"{mlp}.experts.gate_up_proj",
        ((len(downs), 2 * inner, width), tuple(name for pair in pairs for name in pair)),
    )
    yield f"{mlp}.experts.down_proj", ((len(downs), width, inner), downs)
    for name in ("gate", "up"):
        yield f"{mlp}.shared_experts.{name}_proj.weight", ((shared * inner, width), ())
    yield f"{mlp}.shared_experts.down_proj.weight", ((width, shared * inner), ())


def expert_config(model: Model, shared: int) -> dict[str, Any]:
    """The keys of ``config.json`` about experts."""
    routing, first = model.block.routing, _dense_layers(model)
    assert routing is not None  # expert_problems refuses models without
    downs = model.names["expert_down", first]
    return {
        "first_k_dense_replace": first,
        "moe_intermediate_size": model.tensors[downs[0]].shape[1],
        "n_routed_experts": len(downs),
        "n_shared_experts": shared,
        "num_experts_per_tok": routing.per_token,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": routing.renormalized,
        "routed_scaling_factor": 1.0,
    }


def dense_config(layers: int, intermediate: int) -> dict[str, Any]:
    """The keys about experts of a DeepSeek model that has none: the smallest numbers that their readers accept.

    Two experts: llama.cpp refuses a model with as many groups of experts as experts.
    """
    return {
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": 2,
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


def expert_problems(model: Model) -> Iterator[str]:
    """What the class cannot express of a model with experts."""
    roles = {role for role, _ in model.names}
    if model.block.routing is None:
        yield "routes tokens to experts in another way than by softmax, as the stock MLA class with experts does"
    if any(map(is_shared, roles)):
        gate = f"{_SHARED}router" in roles
        how = "weighs its shared expert by a gate of its own" if gate else "has shared experts"
        yield f"{how}, the stock MLA class with experts adds them as they are"
    if EXPERT_ROLES - roles:
        yield "stores its experts in another form than one gate, up and down projection each"
        return
    if mixed := [layer.index for layer in model.layers[_dense_layers(model) :] if not layer.sparse]:
        yield (
            f"has no experts in layer {mixed[0]}, after layers that have some; the stock MLA class has layers without "
            "experts before all others only"
        )
    if any(len(names) < _LEAST for (role, _), names in model.names.items() if role == "expert_down"):
        yield f"has layers with one expert, the stock MLA class routes to {_LEAST} at least"


def is_shared(role: str) -> bool:
    """Whether a tensor of this role is a shared expert's."""
    return role.startswith(_SHARED)


def _dense_layers(model: Model) -> int:
    """Layers before the first with experts."""
    return next(layer.index for layer in model.layers if layer.sparse)
