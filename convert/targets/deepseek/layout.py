"""MLA: the stock ``DeepseekV3ForCausalLM`` that holds a converted model, as a plan's layout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfold.convert.families.model import Family
from kvfold.convert.families.names import ROLES
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.shards import OutputTensor
from kvfold.convert.targets.deepseek.config import LatentTarget, deepseek_config, deepseek_shapes, split_gate_up
from kvfold.convert.targets.deepseek.problems import context
from kvfold.convert.targets.same_family import role_tensors, stored_dtype
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def latent_layout(
    family: Family, checkpoint: Checkpoint, target: LatentTarget, theta: Sequence[float], dtype: str | None
) -> TargetLayout:
    """The checkpoint that caches ``target.kv_rank + target.rope_dim`` numbers, rotating by ``theta [P/2]``.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep the source's.
    """
    config, shapes = checkpoint.config, deepseek_shapes(family, checkpoint.config, target)
    attention = checkpoint.tensors[role_tensors(family, config, 0, ROLES)[0]].dtype
    tensors = tuple(
        OutputTensor(
            name, stored_dtype(attention if source is None else checkpoint.tensors[source].dtype, dtype), shape, source
        )
        for name, (shape, source) in shapes.items()
    )
    layers = family.geometry(config).layers
    computed: list[list[str]] = [[] for _ in range(layers)]
    for name, (_, source) in shapes.items():
        if source is None:
            computed[int(name.split(".")[2])].append(name)
    positions = context(family, config)
    stored = dtype or _TORCH_NAMES[attention]
    changed = deepseek_config(family, config, target, theta, dtype=stored, positions=positions)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.targets.deepseek.tensors import block_tensors, deepseek_tensors

        return deepseek_tensors(weights, layer, target) | block_tensors(family, config, layer, checkpoint.read)

    kind = f"MLA {target.kv_rank}+{target.rope_dim}"
    return TargetLayout(kind, changed, tensors, tuple(map(tuple, computed)), target.kv_rank + target.rope_dim, encode)


def latent_reads(family: Family, config: Mapping[str, Any], layer: int) -> tuple[str, ...]:
    """The source tensors that ``layer`` of the output is computed from."""
    fused = split_gate_up(family, config, layer)
    return role_tensors(family, config, layer, ROLES) + (() if fused is None else fused[:1])
