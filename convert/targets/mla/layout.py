"""MLA: the layout of a converted model in a stock class, with names and shapes. Does not import
torch.

Experts are copied without decoding them. The experts of a layer are stored in two tensors: ``[n, 2
I, E]``, with the gate rows of each expert before its up rows, and ``[n, E, I]``. Both are
concatenations of the bytes of source tensors. The class adds a shared expert to the routed experts,
but the source has no shared expert: layout ``free`` stores a shared expert of width 0, and layout
``engine`` stores zeros, because the loaders of engines expect its tensors.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.files import with_dtype
from kvfold.convert.checkpoint.formats import Shape
from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import BlockRole
from kvfold.convert.families.wrappers import names_in_files
from kvfold.convert.targets.mla.config import ATTENTION, LatentTarget, mla_config, query_rank
from kvfold.convert.targets.target import TargetLayout, output_dtype

if TYPE_CHECKING:
    from torch import Tensor

_ROLE_NAMES: dict[BlockRole, str] = {
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
}
_GATE_UP: tuple[BlockRole, BlockRole] = ("gate", "up")

Source = str | tuple[str, ...] | None
Shapes = dict[str, tuple[Shape, Source]]


def latent_layout(
    model: Model,
    checkpoint: Checkpoint,
    target: LatentTarget,
    theta: Sequence[float],
    dtype: str | None,
) -> TargetLayout:
    """The layout of ``model`` as MLA in a stock class; ``theta [P/2]`` are the frequencies in
    radians per position.

    ``dtype`` is the stored dtype in torch's spelling; None keeps the dtype of each tensor, and
    computed tensors then have the dtype of the first query projection.
    """
    computed_dtype = checkpoint.tensors[model.attention_names(0)[0]].dtype
    # A wrapper's files have a prefix before the language model's names, which the stock shapes
    # lack.
    moved = (
        (lambda name: name) if model.tower is None else names_in_files(checkpoint.tensors).wrapped
    )
    shapes = {moved(name): value for name, value in mla_shapes(model, target).items()}
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
            moved(name)
            for name, (_, source) in layer_shapes(model, target, layer).items()
            if source is None
        )
        for layer in range(model.geometry.layers)
    )
    config = mla_config(model, target, theta, dtype=dtype or TORCH_NAMES[computed_dtype])
    if model.tower is not None:
        config = {**checkpoint.config, "text_config": config}
        config = config if dtype is None else with_dtype(config, dtype)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.targets.mla.tensors import mla_tensors  # needs torch, a plan does not

        made = mla_tensors(weights, layer, target)
        for fused in model.names.get(("gate_up", layer), ()):
            for role, half in zip(_GATE_UP, checkpoint.read(fused).chunk(2), strict=True):
                made[_ROLE_NAMES[role].format(layer=layer)] = half.contiguous()
        return {moved(name): tensor for name, tensor in made.items()}

    kind = f"MLA {target.kv_rank}+{target.rope_dim}"
    elements = target.kv_rank + target.rope_dim
    return TargetLayout(kind, config, tuple(tensors), computed, elements, encode)


def mla_shapes(model: Model, target: LatentTarget) -> Shapes:
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
    if head != embedding or target.layout == "engine":
        shapes["lm_head.weight"] = (model.tensors[head].shape, head)
    for layer in range(model.geometry.layers):
        shapes |= layer_shapes(model, target, layer)
    return shapes


def layer_shapes(model: Model, target: LatentTarget, layer: int) -> Shapes:
    """The entries of `mla_shapes` that belong to ``layer``."""
    shapes: Shapes = {
        name: (shape, None) for name, shape in _attention_shapes(model, target, layer).items()
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
        shapes |= _expert_shapes(model, target, layer)
    return shapes


def _attention_shapes(model: Model, target: LatentTarget, layer: int) -> dict[str, Shape]:
    """The shapes of the attention tensors in ``layer``, by name; all of these tensors are computed."""
    size = model.geometry
    heads = size.heads
    width = size.model_dim
    rank = target.kv_rank
    nope, value = target.head_dims(size.head_dim)
    queries = heads * (nope + target.rope_dim)
    q_rank = query_rank(model, target)
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
    return {f"{ATTENTION.format(layer=layer)}.{name}": shape for name, shape in shapes.items()}


def _expert_shapes(model: Model, target: LatentTarget, layer: int) -> Shapes:
    """The shapes and source tensors of the router and the experts in ``layer``, by name."""
    mlp = f"model.layers.{layer}.mlp"
    names = model.names
    (router,), downs = names["router", layer], names["expert_down", layer]
    width, inner = model.tensors[downs[0]].shape
    shared = inner if target.layout == "engine" else 0
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


def padding(model: Model, target: LatentTarget) -> int:
    """The number of parameters that are zero because heads are padded."""
    size = model.geometry
    nope, value = (padded - size.head_dim for padded in target.head_dims(size.head_dim))
    rope = target.rope_dim - target.rope_kept(size.rotary_dims)
    inputs = query_rank(model, target) or size.model_dim
    heads = (nope + rope) * inputs + (nope + value) * target.kv_rank + value * size.model_dim
    return size.layers * (size.heads * heads + rope * size.model_dim)
