"""The tensors of a checkpoint that make each parameter of a transformers model.

Files and modules do not always agree: mixtral stores one tensor per expert where the module holds them fused.
transformers keeps the conversions as data (``conversion_mapping``); this module applies them to a few parameters at a
time, reading only the tensors that those need, from whatever shards hold them::

    checkpoint's names --read--> stored tensors --converter--> parameter --dtype, device--> the module's tensor

Every step is differentiable, ``read`` included if it gives tensors that require gradients. So refinement trains a
tensor of the file: the loss of a step reaches the float32 master behind a name by the same way that loading takes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from kvfold.convert.errors import InputError, KvfoldError

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class WeightSource:
    """The stored tensors ``names``, in order, that make the parameter ``target`` (where a converter splits: the first).

    ``converter`` is None when the file holds the parameter itself; ``patterns[i]`` is its name for ``names[i]``.
    Sources that read the same tensors for the same parameter are equal, also of different models.
    """

    target: str
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = field(default=None, compare=False)

    def make(self, read: Read, model: Any) -> dict[str, Tensor]:
        """Read the tensors and convert them, in the dtype that they are stored in."""
        if self.converter is None:
            return {self.target: read(self.names[0])}
        converter = deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class WeightMap:
    """The sources of every parameter and persistent buffer of ``model`` among the stored tensors ``names``."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.model = model
        self.expected: dict[str, Tensor] = dict(model.state_dict())
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.sources = _sources(model, self.expected, names)
        self._kept_in_float32 = {
            *(getattr(model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
        }

    def under(self, prefix: str) -> list[WeightSource]:
        """The sources of the parameters whose names begin with ``prefix``. Raises InputError if some have none."""
        self._refuse_missing(target for target in self.expected if target.startswith(prefix))
        return [source for target, source in self.sources.items() if target.startswith(prefix)]

    def source_of(self, target: str) -> WeightSource:
        """The source of one parameter, or of the one that it is tied to. Raises InputError without any."""
        tied_to = self.tied.get(target)
        if target not in self.sources and tied_to is not None:
            target = tied_to
        self._refuse_missing([target])
        return self.sources[target]

    def load(
        self, source: WeightSource, read: Read, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """The parameters that ``source`` makes: full names, checked shapes, ``dtype`` (integers keep theirs)."""
        made = source.make(read, self.model)
        for name in list(made):
            tensor, expected = made.pop(name), self.expected.get(name)
            if expected is not None and expected.shape != tensor.shape:
                raise InputError(
                    f"the model's {name} has shape {list(expected.shape)} by config.json, "
                    f"but {', '.join(source.names[:3])} gives {list(tensor.shape)}"
                )
            keeps_float32 = not self._kept_in_float32.isdisjoint(name.split("."))
            loaded = torch.float32 if keeps_float32 else dtype
            made[name] = tensor.to(device, loaded if tensor.is_floating_point() else None)
        return made

    def _refuse_missing(self, targets: Iterable[str]) -> None:
        covered = self._covered
        missing = [target for target in targets if target not in covered and target not in self.tied]
        if missing:
            raise InputError(
                f"the checkpoint lacks tensors for {len(missing)} parameters of {type(self.model).__name__}",
                missing,
            )

    @cached_property
    def _covered(self) -> set[str]:
        """The parameters with a source: a converter that splits covers several."""
        covered = set(self.sources)
        for source in self.sources.values():
            if source.converter is not None and len(source.converter.target_patterns) > 1:
                first, *others = source.converter.target_patterns
                covered.update(source.target.replace(first, other) for other in others)
        return covered


def _sources(model: Any, expected: dict[str, Tensor], names: Iterable[str]) -> dict[str, WeightSource]:
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    gathered: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _rename(name, renamings, converters, model.base_model_prefix, expected)
        if target in expected:
            gathered.setdefault(target, []).append((name, pattern))
    return {target: _source(target, parts, by_pattern) for target, parts in gathered.items()}


def _source(
    target: str, parts: Sequence[tuple[str, str | None]], by_pattern: Mapping[str, WeightConverter]
) -> WeightSource:
    names = tuple(name for name, _ in parts)
    patterns = tuple(pattern for _, pattern in parts if pattern is not None)
    if not patterns:
        if len(names) > 1:
            raise KvfoldError(f"{len(names)} tensors of the checkpoint are all {target}: {', '.join(names)}")
        return WeightSource(target, names)
    if len(patterns) < len(names):
        raise KvfoldError(f"{target} is stored both whole and in parts: {', '.join(names[:4])}")
    return WeightSource(target, names, patterns, by_pattern[patterns[0]])


def _rename(
    name: str, renamings: list[Any], converters: list[Any], prefix: str, expected: dict[str, Tensor]
) -> tuple[str, str | None]:
    target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:
        return name, None
    return target, pattern
