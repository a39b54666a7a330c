"""The plan of a conversion, from headers alone: an impossible request fails here, before any weight is read."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.family import Family, Geometry, family_of, tensor_problems
from kvfold.convert.families.names import Role
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.shards import Shard, assign_shards
from kvfold.convert.request import ConvertRequest
from kvfold.convert.targets.deepseek_config import LatentTarget, query_rank
from kvfold.convert.targets.latent_layout import check_latent, latent_layout, latent_reads
from kvfold.convert.targets.same_family import (
    ABSORBED,
    POOLED,
    attention_label,
    folded_layout,
    numbers_cached,
    role_tensors,
)
from kvfold.convert.targets.target import TargetLayout

_SLACK = 1 << 20  # config, index, card and file system blocks


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before weights are read. ``numbers_cached`` counts per token and layer."""

    request: ConvertRequest
    checkpoint: Checkpoint
    family: Family
    geometry: Geometry
    layout: TargetLayout
    shards: tuple[Shard, ...]

    @property
    def source_name(self) -> str:
        return self.checkpoint.origin

    @property
    def source_kind(self) -> str:
        return attention_label(self.geometry)

    @property
    def numbers_cached(self) -> int:
        return numbers_cached(self.geometry)

    def latent_target(self) -> LatentTarget:
        """What an MLA request asks to be written."""
        return _latent_target(self.request)

    def query_rank(self) -> int | None:
        """Channels of the query latent as written, None without one."""
        return query_rank(self.family, self.checkpoint.config, self.latent_target())

    def read_names(self, layer: int) -> tuple[str, ...]:
        """The source tensors that the transform of ``layer`` reads."""
        if self.request.to == "mla":
            return latent_reads(self.family, self.checkpoint.config, layer)
        return role_tensors(self.family, self.checkpoint.config, layer, self.roles)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The projections that the method changes: pooling leaves queries and the output alone."""
        return _roles(self.request)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the output will take, headers and side files included."""
        extra = sum(path.stat().st_size for path in self.checkpoint.extra_files())
        names = sum(len(tensor.name) + 120 for tensor in self.layout.tensors)
        return sum(tensor.nbytes for tensor in self.layout.tensors) + 3 * names + extra + _SLACK

    @property
    def free_bytes(self) -> int:
        """Free bytes on the disk that OUT lies on."""
        folder = Path(self.request.out).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        return shutil.disk_usage(existing).free

    def origins(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """For every output tensor, how it came about and the source tensors it came from."""
        names: dict[str, tuple[str, tuple[str, ...]]] = {}
        for tensor in self.layout.tensors:
            if tensor.source is not None:
                changed = tensor.dtype != self.checkpoint.tensors[tensor.source].dtype
                names[tensor.name] = ("cast" if changed else "copied", (tensor.source,))
        for layer, computed in enumerate(self.layout.computed):
            names.update({name: (self.request.resolved_method, self.read_names(layer)) for name in computed})
        return {tensor.name: names[tensor.name] for tensor in self.layout.tensors}


def make_plan(request: ConvertRequest, checkpoint: Checkpoint) -> Plan:
    """Raises InputError when the checkpoint is not one of its family, or cannot become what is asked."""
    family = family_of(checkpoint.config)
    geometry = family.geometry(checkpoint.config)
    problems = tensor_problems(family, checkpoint.config, checkpoint.tensors)
    if problems:
        raise InputError(
            f"{checkpoint.origin}: its tensors are not those of a {family.model_type} model with this config.json; "
            "check that files and config belong together",
            problems,
        )
    layout = _layout(request, checkpoint, family, geometry)
    shards = assign_shards(layout.tensors, request.shard_bytes)
    return Plan(request, checkpoint, family, geometry, layout, tuple(shards))


def _layout(request: ConvertRequest, checkpoint: Checkpoint, family: Family, geometry: Geometry) -> TargetLayout:
    dtype = None if request.dtype == "auto" else request.dtype
    if request.to == "mla":
        target = _latent_target(request)
        check_latent(family, checkpoint, target, allow_growth=request.allow_growth)
        # Frequencies are provisional: a calibrated run settles them when it has seen all layers.
        return latent_layout(family, checkpoint, target, [1.0] * (target.rope_dim // 2), dtype)
    kv_heads = 1 if request.kv_heads is None else request.kv_heads
    check_kv_heads(kv_heads, geometry, request.allow_growth)
    return folded_layout(family, checkpoint, kv_heads, roles=_roles(request), dtype=dtype)


def _latent_target(request: ConvertRequest) -> LatentTarget:
    if request.kv_rank is None or request.rope_dim is None:
        raise ValueError("request: expected a split into --kv-rank and --rope-dim, found none")
    layout: Any = request.layout or "deepseek"
    return LatentTarget(request.kv_rank, request.rope_dim, request.q_rank, layout)


def _roles(request: ConvertRequest) -> tuple[Role, ...]:
    return ABSORBED if request.calibrated else POOLED


def possible_kv_heads(geometry: Geometry) -> list[int]:
    """Numbers of key/value heads that a fold can leave: the proper divisors of the present number, largest first."""
    return [g for g in range(geometry.kv_heads - 1, 0, -1) if geometry.kv_heads % g == 0]


def check_kv_heads(kv_heads: int, geometry: Geometry, allow_growth: bool) -> None:
    """Raises InputError unless ``kv_heads`` groups can be made of the present heads."""
    present = geometry.kv_heads
    choices = ", ".join(map(str, possible_kv_heads(geometry))) or "none: there is one head already"
    if kv_heads > geometry.heads:
        raise InputError(f"--kv-heads {kv_heads}: more than the {geometry.heads} query heads; possible here: {choices}")
    if kv_heads == present and not allow_growth:
        raise InputError(
            f"--kv-heads {kv_heads}: the model has {present} key/value heads already, so nothing would shrink; "
            f"possible here: {choices} (--allow-growth converts all the same)"
        )
    if kv_heads > present:
        raise InputError(
            f"--kv-heads {kv_heads}: the model has only {present} key/value heads; possible here: {choices}"
        )
    if present % kv_heads:
        raise InputError(
            f"--kv-heads {kv_heads}: does not divide the {present} key/value heads; possible here: {choices}"
        )
