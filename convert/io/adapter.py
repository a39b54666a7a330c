"""A PEFT LoRA adapter, merged into the weights while they are read: ``W + scale * B @ A``.

Low-Rank Adaptation (Hu et al., 2021); rank-stabilized scaling alpha / sqrt(r) (Kalajdzievski, 2023). The files are
those of peft's ``save_pretrained``: ``adapter_config.json``, and ``adapter_model.safetensors`` or ``.bin``.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.errors import InputError
from kvfold.convert.io import folder as folders
from kvfold.convert.io.headers import FLOAT_DTYPES, Header, TensorInfo
from kvfold.convert.io.json_text import portable_name
from kvfold.convert.io.reader import Reader, SafetensorsReader, Weights, flat_chunks

if TYPE_CHECKING:
    import torch

CONFIG, SAFETENSORS, LEGACY = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_LORA = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")
# Keys of adapter_config.json that plain LoRA has, or that only concern training, a start or a runtime.
_SCALING = {"alpha_pattern", "fan_in_fan_out", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"}
_TARGETS = {"exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"}
_ABOUT = {"auto_mapping", "base_model_name_or_path", "peft_version", "revision", "runtime_config", "task_type"}
_TRAINING = {"eva_config", "inference_mode", "loftq_config", "lora_dropout", "megatron_core", "qalora_group_size"}
_PLAIN = _SCALING | _TARGETS | _ABOUT | _TRAINING
# Starts that change the base weights, so that an adapter belongs to others than those of MODEL.
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_MERGE = "merge it with peft first (model.merge_and_unload().save_pretrained(...)) and convert the result"


@dataclass(frozen=True)
class Update:
    """The change of one weight: ``a [r, in]``, ``b [out, r]``; ``flip`` where the weight is stored ``[in, out]``."""

    a: TensorInfo
    b: TensorInfo
    scale: float
    flip: bool

    @property
    def shape(self) -> tuple[int, int]:
        out, into = self.b.shape[0], self.a.shape[1]
        return (into, out) if self.flip else (out, into)


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: its updates by the name of the module, what reads them, and what identifies its files."""

    name: str
    updates: Mapping[str, Update]
    reader: Reader
    digests: dict[str, str]
    paths: tuple[Path, ...]


def is_adapter(names: list[str]) -> bool:
    """Whether a folder with files of these ``names`` is an adapter and no model."""
    return CONFIG in names and folders.CONFIG not in names


def base_model_hint(folder: Path) -> str:
    """The command that converts the base model of the adapter in ``folder``, where that names one; else empty."""
    try:
        config = folders.parse_json(folder / CONFIG, folders.read_bytes(folders.resolve_member(folder, CONFIG)))
    except InputError:
        return ""
    base = config.get("base_model_name_or_path")
    return f": kvfold convert {base} OUT --adapter {folder} ..." if isinstance(base, str) and base.strip() else ""


def open_adapter(folder: Path) -> Adapter:
    """The LoRA adapter in ``folder``. Raises InputError when there is none, or one that is not plain LoRA."""
    folder = folder.resolve()
    if not (folder / CONFIG).is_file():
        raise InputError(f"--adapter {folder}: expected a folder with {CONFIG}, found none; give that of peft")
    data = folders.read_bytes(folders.resolve_member(folder, CONFIG))
    config = folders.parse_json(folder / CONFIG, data)
    if reasons := _not_plain(config):
        raise InputError(f"--adapter {folder}: expected plain LoRA, found {', '.join(reasons)}; {_MERGE}")
    path, header, reader = _weights(folder)
    folders.raise_problems(header.problems)
    updates = _updates(folder, config, header)
    digests = {f"adapter/{CONFIG}": hashlib.sha256(data).hexdigest(), f"adapter/{path.name}": header.digest}
    return Adapter(portable_name(folder), updates, reader, digests, (folder / CONFIG, path))


def adapted(weights: Weights, adapter: Adapter) -> Weights:
    """``weights`` with the adapter's updates. Raises InputError for updates of weights that are not there."""
    updates, problems = {}, []
    for module, update in adapter.updates.items():
        name = _tensor_name(module, weights.tensors)
        info = None if name is None else weights.tensors[name]
        if name is None or info is None:
            problems.append(f"{module}: expected a weight of that name in the model, found none")
        elif info.shape != update.shape or info.dtype not in FLOAT_DTYPES:
            problems.append(
                f"{module}: expected {list(update.shape)}, found {info.dtype} {list(info.shape)} in the model"
            )
        else:
            updates[name] = update
    if problems:
        where = f"--adapter {adapter.name}: expected an adapter of this model"
        raise InputError(f"{where}, found {problems[0]}; give the model that it was trained on", problems[1:])
    tensors = {name: _merged(info) if name in updates else info for name, info in weights.tensors.items()}
    line = f"the LoRA adapter {adapter.name}, merged into {len(updates)} weights"
    reader = MergingReader(weights.reader, weights.tensors, adapter.reader, updates)
    return Weights(weights.config, tensors, reader, (*weights.made_of, line))


@dataclass(frozen=True)
class MergingReader:
    """Reads ``base`` tensors, of which ``updates`` change some."""

    base: Reader
    tensors: Mapping[str, TensorInfo]
    adapter: Reader
    updates: Mapping[str, Update]

    def read(self, info: TensorInfo) -> "torch.Tensor":
        """Merged in float32, rounded to the weight's dtype."""
        from kvfold.convert.io.tensors import cast_chunk

        weight = self.base.read(self.tensors[info.name])
        if (update := self.updates.get(info.name)) is None:
            return weight
        change = self.adapter.read(update.b).float() @ self.adapter.read(update.a).float()
        change = change.T if update.flip else change
        return cast_chunk(weight.float().add_(change, alpha=update.scale), weight.dtype, info.name)

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        if info.name in self.updates:
            return flat_chunks(self.read(info), elements)
        return self.base.chunks(self.tensors[info.name], elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None if info.name in self.updates else self.base.raw_path(self.tensors[info.name])

    def close(self) -> None:
        self.base.close()
        self.adapter.close()


def _not_plain(config: Mapping[str, Any]) -> list[str]:
    reasons = [] if config.get("peft_type") == "LORA" else [f"peft_type {config.get('peft_type')!r}"]
    for key, value in config.items():
        if key == "bias":
            unusual = value not in (None, "none")
        elif key == "init_lora_weights":
            unusual = value not in _STARTS
        else:
            unusual = key not in _PLAIN and bool(value)
        if unusual:
            reasons.append(f"{key} {value!r}")
    return reasons


def _weights(folder: Path) -> tuple[Path, Header, Reader]:
    for name in (SAFETENSORS, LEGACY):
        if (folder / name).is_file():
            path = folders.resolve_member(folder, name)
            if name == SAFETENSORS:
                return path, folders.read_header(path, name), SafetensorsReader({name: path})
            from kvfold.convert.io.legacy import LegacyReader, read_legacy_header

            return path, read_legacy_header(path, name, {}), LegacyReader({name: path})
    raise InputError(f"--adapter {folder}: expected {SAFETENSORS} or {LEGACY}, found neither; fetch it again")


def _updates(folder: Path, config: Mapping[str, Any], header: Header) -> dict[str, Update]:
    """By module. Raises InputError for tensors that are no pair of LoRA."""
    sides: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    problems = []
    for info in header.tensors:
        if (match := _LORA.fullmatch(info.name)) is None:
            problems.append(f"--adapter {folder}: expected plain LoRA, found a tensor {info.name!r}; {_MERGE}")
        else:
            sides.setdefault((match["module"], match["kind"] is not None), {})[match["side"]] = info
    updates = {}
    for (module, embedding), pair in sides.items():
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            shapes = {side: list(info.shape) for side, info in pair.items()}
            problems.append(f"--adapter {folder}: {module}: expected A [r, in] and B [out, r], found {shapes}")
        else:
            scale = _scale(config, module, a.shape[0])
            updates[module] = Update(a, b, scale, embedding or bool(config.get("fan_in_fan_out")))
    folders.raise_problems(problems)
    if not updates:
        raise InputError(f"--adapter {folder}: expected the tensors of an adapter, found none; fetch it again")
    return updates


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r); ``alpha_pattern`` names modules by the end of their names, or by expressions."""
    patterns = (config.get("alpha_pattern") or {}).items()
    default = config.get("lora_alpha", 8)
    alpha = next((alpha for key, alpha in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), default)
    return float(alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _tensor_name(module: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The weight of a module: some files leave out the name of the base model in front (``transformer.``)."""
    name = f"{module}.weight"
    return next((each for each in (name, name.partition(".")[2]) if each in tensors), None)


def _merged(info: TensorInfo) -> TensorInfo:
    return replace(info, made=f"{info.made}, merged" if info.made else "merged")
