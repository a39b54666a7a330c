"""MLA: the stock ``DeepseekV3ForCausalLM`` that holds a converted model, as a plan's layout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.convert.families.model import Model
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.shards import OutputTensor
from kvfold.convert.targets.deepseek.config import LatentTarget, deepseek_config, deepseek_shapes, split_gate_up
from kvfold.convert.targets.deepseek.problems import context
from kvfold.convert.targets.same_family import stored_dtype
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def latent_layout(
    model: Model, checkpoint: Checkpoint, target: LatentTarget, theta: Sequence[float], dtype: str | None
) -> TargetLayout:
    """The checkpoint that caches ``target.kv_rank + target.rope_dim`` numbers, rotating by ``theta [P/2]``.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep the source's.
    """
    shapes = deepseek_shapes(model, target)
    attention = checkpoint.tensors[model.attention_names(0)[0]].dtype
    tensors = tuple(
        OutputTensor(
            name, stored_dtype(attention if source is None else checkpoint.tensors[source].dtype, dtype), shape, source
        )
        for name, (shape, source) in shapes.items()
    )
    computed: list[list[str]] = [[] for _ in model.layers]
    for name, (_, source) in shapes.items():
        if source is None:
            computed[int(name.split(".")[2])].append(name)
    stored = dtype or _TORCH_NAMES[attention]
    changed = deepseek_config(model, target, theta, dtype=stored, positions=context(model))

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.targets.deepseek.tensors import block_tensors, deepseek_tensors

        return deepseek_tensors(weights, layer, target) | block_tensors(model, layer, checkpoint.read)

    kind = f"MLA {target.kv_rank}+{target.rope_dim}"
    return TargetLayout(kind, changed, tensors, tuple(map(tuple, computed)), target.kv_rank + target.rope_dim, encode)


def latent_reads(model: Model, layer: int) -> tuple[str, ...]:
    """The source tensors that ``layer`` of the output is computed from."""
    fused = split_gate_up(model, layer)
    return model.attention_names(layer) + (() if fused is None else fused[:1])
