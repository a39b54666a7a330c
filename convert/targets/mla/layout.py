"""MLA: the stock class that holds a converted model, as a plan's layout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import TORCH_NAMES
from kvfold.convert.checkpoint.json_text import with_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.families.model import Model
from kvfold.convert.families.wrappers import names_in_files
from kvfold.convert.targets.mla.config import LatentTarget, mla_config
from kvfold.convert.targets.mla.problems import context
from kvfold.convert.targets.mla.shapes import Source, layer_shapes, mla_shapes, split_gate_up
from kvfold.convert.targets.same_family import stored_dtype
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor


def latent_layout(
    model: Model, checkpoint: Checkpoint, target: LatentTarget, theta: Sequence[float], dtype: str | None
) -> TargetLayout:
    """The checkpoint that caches ``target.kv_rank + target.rope_dim`` elements, rotating by ``theta [P/2]``.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep each tensor's own; computed tensors then have
    that of the first query projection.
    """
    computed_dtype = checkpoint.tensors[model.attention_names(0)[0]].dtype

    def stored(source: Source) -> str:
        first = source if isinstance(source, str) else next(iter(source or ()), None)
        return stored_dtype(computed_dtype if first is None else checkpoint.tensors[first].dtype, dtype)

    # A wrapper's files have a prefix before the language model's names, which the stock shapes lack.
    moved = (lambda name: name) if model.tower is None else names_in_files(checkpoint.tensors).wrapped
    shapes = {moved(name): value for name, value in mla_shapes(model, target).items()}
    if model.tower is not None:
        # A multimodal wrapper also holds a vision tower and a projector, which are copied.
        others = (info for info in checkpoint.tensors.values() if info.name not in model.tensors)
        shapes |= {info.name: (info.shape, info.name) for info in others if not info.name.startswith(model.tower)}
    tensors = tuple(OutputTensor(name, stored(source), shape, source) for name, (shape, source) in shapes.items())
    computed = tuple(
        tuple(moved(name) for name, (_, source) in layer_shapes(model, target, layer).items() if source is None)
        for layer in range(model.geometry.layers)
    )
    config = mla_config(model, target, theta, dtype=dtype or TORCH_NAMES[computed_dtype], positions=context(model))
    if model.tower is not None:
        config = {**checkpoint.config, "text_config": config}
        config = config if dtype is None else with_dtype(config, dtype)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.targets.mla.tensors import mla_tensors, mlp_tensors

        made = mla_tensors(weights, layer, target) | mlp_tensors(model, layer, checkpoint.read)
        return {moved(name): tensor for name, tensor in made.items()}

    kind, elements = f"MLA {target.kv_rank}+{target.rope_dim}", target.kv_rank + target.rope_dim
    return TargetLayout(kind, config, tensors, computed, elements, encode)


def latent_reads(model: Model, layer: int) -> tuple[str, ...]:
    """The source tensors that ``layer`` of the output is computed from."""
    fused = split_gate_up(model, layer)
    return model.attention_names(layer) + (() if fused is None else fused[:1])
