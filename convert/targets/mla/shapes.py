"""Names and shapes of the tensors of the stock MLA classes; without torch.

Experts are copied and never decoded: the experts of a layer are two tensors, ``[n, 2 I, E]`` with the rows of each gate
before those of its up projection, and ``[n, E, I]``, in both of which the bytes of the source's tensors follow one
another. The class adds a shared expert to the routed ones, and the source has none: layout ``free`` has one of width 0,
layout ``engine`` one of zeros, because the loaders of engines expect its tensors.
"""

from collections.abc import Iterator

from kvfold.convert.families.model import Model
from kvfold.convert.targets.mla.config import LatentTarget, query_rank

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

Shape = tuple[int, ...]
Source = str | tuple[str, ...] | None
Shapes = Iterator[tuple[str, tuple[Shape, Source]]]


def attention_module(layer: int) -> str:
    """Name of the attention of ``layer``."""
    return f"model.layers.{layer}.self_attn"


def mla_shapes(model: Model, target: LatentTarget) -> dict[str, tuple[Shape, Source]]:
    """The shape of every output tensor, and the source tensors whose bytes it repeats (see ``OutputTensor.source``)."""
    shapes = dict(_outer(model, target))
    for layer in range(model.geometry.layers):
        shapes |= layer_shapes(model, target, layer)
    return shapes


def layer_shapes(model: Model, target: LatentTarget, layer: int) -> dict[str, tuple[Shape, Source]]:
    """The part of `mla_shapes` that belongs to ``layer``."""
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


def _outer(model: Model, target: LatentTarget) -> Shapes:
    """Embedding, final norm and head."""
    (embedding,), (norm,) = model.names["embedding", None], model.names["final_norm", None]
    (head,) = model.names.get(("head", None), (embedding,))
    yield _NAMES["embedding"], (model.tensors[embedding].shape, embedding)
    yield _NAMES["final_norm"], (model.tensors[norm].shape, norm)
    # A tied head is not stored, except for engines, whose loaders ask for it.
    if head != embedding or target.layout == "engine":
        yield _NAMES["head"], (model.tensors[head].shape, head)


def _block(model: Model, layer: int) -> Shapes:
    """Norms and MLP of ``layer``; a fused gate and up projection is split, because the stock class has two."""
    fused = split_gate_up(model, layer)
    if fused is not None:
        rows, width = model.tensors[fused[0]].shape
        yield from ((name, ((rows // 2, width), None)) for name in fused[1:])
    for role in ("attention_norm", "mlp_norm", "gate", "up", "down"):
        for source in model.names.get((role, layer), ()):
            yield _name(role, layer), (model.tensors[source].shape, source)


def _name(role: str, layer: int) -> str:
    return _NAMES[role].replace("{layer}", str(layer))


def expert_shapes(model: Model, layer: int, shared: int) -> Shapes:
    """The experts of ``layer``, with ``shared`` shared experts of zeros."""
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
