"""Which tensors of a checkpoint make which parameters of a transformers model, and how.

Files and modules do not always agree: mixtral stores one tensor per expert where the module holds them fused.
transformers keeps the conversions as data (``conversion_mapping``); this module applies them to a few parameters at a
time, reading only the tensors that those need, from whatever shards hold them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from kvfold.convert.errors import InputError, KvfoldError

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What makes one parameter (or, where a converter splits, the first of several): the file's tensors, in order.

    ``converter`` is None when the file holds the parameter itself; ``patterns[i]`` is its name for ``sources[i]``.
    Recipes that read the same tensors for the same parameter are equal, whichever model's they are.
    """

    target: str
    sources: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = field(default=None, compare=False)

    def make(self, read: Read, model: Any) -> dict[str, Tensor]:
        """Read the sources and convert them, in the dtype that they are stored in."""
        if self.converter is None:
            return {self.target: read(self.sources[0])}
        converter = deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.target, source, pattern, read(source))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class WeightMap:
    """The recipes of every parameter and persistent buffer of ``model`` (on the meta device) from tensors ``names``."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.model = model
        self.expected: dict[str, Tensor] = dict(model.state_dict())
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.recipes = _recipes(model, self.expected, names)
        self._kept_in_float32 = {
            *(getattr(model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
        }

    def under(self, prefix: str) -> list[Recipe]:
        """The recipes of the parameters whose names begin with ``prefix``; KvfoldError if some have none."""
        self._refuse_missing(target for target in self.expected if target.startswith(prefix))
        return [recipe for target, recipe in self.recipes.items() if target.startswith(prefix)]

    def source_of(self, target: str) -> Recipe:
        """The recipe of one parameter, or of the one that it is tied to."""
        tied_to = self.tied.get(target)
        if target not in self.recipes and tied_to is not None:
            target = tied_to
        self._refuse_missing([target])
        return self.recipes[target]

    def load(self, recipe: Recipe, read: Read, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """The parameters that ``recipe`` makes: full names, checked shapes, ``dtype`` (integers keep theirs)."""

        made = recipe.make(read, self.model)
        for name in list(made):
            tensor, expected = made.pop(name), self.expected.get(name)
            if expected is not None and expected.shape != tensor.shape:
                raise InputError(
                    f"the model's {name} has shape {list(expected.shape)} by config.json, "
                    f"but {', '.join(recipe.sources[:3])} gives {list(tensor.shape)}"
                )
            keeps_float32 = not self._kept_in_float32.isdisjoint(name.split("."))
            wanted = torch.float32 if keeps_float32 else dtype
            made[name] = tensor.to(device, wanted if tensor.is_floating_point() else None)
        return made

    def _refuse_missing(self, targets: Iterable[str]) -> None:
        have = self._covered
        missing = [target for target in targets if target not in have and target not in self.tied]
        if missing:
            raise InputError(
                f"the checkpoint lacks tensors for {len(missing)} parameters of {type(self.model).__name__}",
                missing,
            )

    @property
    def _covered(self) -> set[str]:
        covered = set(self.recipes)
        for recipe in self.recipes.values():
            if recipe.converter is not None and len(recipe.converter.target_patterns) > 1:
                first, *others = recipe.converter.target_patterns
                covered.update(recipe.target.replace(first, other) for other in others)
        return covered


def _recipes(model: Any, expected: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Recipe]:
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    gathered: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _rename(name, renamings, converters, model.base_model_prefix, expected)
        if target in expected:
            gathered.setdefault(target, []).append((name, pattern))
    return {target: _recipe(target, parts, by_pattern) for target, parts in gathered.items()}


def _recipe(target: str, parts: Sequence[tuple[str, str | None]], by_pattern: Mapping[str, WeightConverter]) -> Recipe:
    sources = tuple(name for name, _ in parts)
    patterns = tuple(pattern for _, pattern in parts if pattern is not None)
    if not patterns:
        if len(sources) > 1:
            raise KvfoldError(f"{len(sources)} tensors of the checkpoint are all {target}: {', '.join(sources)}")
        return Recipe(target, sources)
    if len(patterns) < len(sources):
        raise KvfoldError(f"{target} is stored both whole and in parts: {', '.join(sources[:4])}")
    return Recipe(target, sources, patterns, by_pattern[patterns[0]])


def _rename(
    name: str, renamings: list[Any], converters: list[Any], prefix: str, expected: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    target, pattern = rename_source_key(name, renamings, converters, prefix, dict(expected))
    if target not in expected and name in expected:
        return name, None
    return target, pattern
