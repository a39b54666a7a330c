"""The registry of methods and objectives: a decorator registers each of them by name; no other list
contains the names.

A method converts a layer: its ``fit_weights`` computes a `ConvertedLayer` from a `FoldLayer` or a
`LatentLayer`. An objective is the error that a fold minimizes: an object that implements
``transforms.fold.heads.Objective``. ``tests/convert/methods/`` has an example of each.

The files in this folder are imported when a name is first looked up. They must not import torch at
module level, because ``kvfold --help`` lists the names. A file elsewhere may import torch; only
``MODULE:NAME`` imports such a file.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.errors import option_error, suggest_name

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.fold.grouping import PairLosses
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.latent.latent_weights import LatentWeights
    from kvfold.convert.transforms.latent.slots import RotarySlots
    from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

DEFAULT = "principal"
DEFAULT_OBJECTIVE = "scores"

Notes = Mapping[str, Any]  # JSON values


@dataclass(frozen=True)
class ConvertedLayer:
    """The result of a conversion method for one layer, before it is encoded for the checkpoint.

    weights: of its attention.
    notes: about it, for ``kvfold.json``.
    """

    weights: "AttentionWeights | LatentWeights"
    notes: Notes = field(default_factory=dict)


def _refuse_error_without_text(weights: Any) -> float:
    """Raise ValueError: a method that reads no text cannot measure an error."""
    raise ValueError(
        "layer.measure_error needs calibration text, which the method does not read; set"
        " reads_text = True in its class"
    )


@dataclass(frozen=True, kw_only=True)
class SourceLayer:
    """The input of a conversion method: one layer of the source model with its calibration
    statistics.

    index: its number.
    weights: of its attention.
    rotary: its rotary frequencies.
    context: the number of positions that the converted layer must support.
    statistics: of its inputs on calibration text; None for a method that does not read text.
    measure_error: returns ``||y - y'||^2 / ||y||^2`` of the attention output on held-out text for
        candidate weights; raises ValueError if the method does not read text.
    """

    index: int
    weights: "AttentionWeights"
    rotary: "Rotary"
    context: int
    statistics: "LayerStatistics | None" = None
    measure_error: Callable[[Any], float] = _refuse_error_without_text

    def require_statistics(self) -> "LayerStatistics":
        """Return the calibration statistics. Raises ValueError if the method does not read text."""
        if self.statistics is None:
            raise ValueError(
                "the layer has no calibration statistics, because the method does not read text;"
                " set reads_text = True in its class"
            )
        return self.statistics


@dataclass(frozen=True, kw_only=True)
class FoldLayer(SourceLayer):
    """The input of a method for GQA and MQA: a layer whose key/value heads are to be folded.

    kv_heads: the number of key/value heads to keep.
    std: the initializer range in the model's config.
    seed: of the request.
    similar: groups may contain heads that are not neighbors.
    objective: the error that the fold minimizes.
    pair_losses_cache: caches results for folds of this layer to other numbers of heads.
    """

    kv_heads: int
    std: float
    seed: int
    similar: bool
    objective: "Objective"
    pair_losses_cache: "dict[bool, PairLosses]"


@dataclass(frozen=True, kw_only=True)
class LatentLayer(SourceLayer):
    """The input of a method for MLA: a layer that is to be converted to latent attention.

    channels: the number of latent channels.
    slots: the rotary slots.
    scale: multiplies scores.
    query_channels: the width of the query latent, or None for no query latent.
    centered: one of the channels is constant and carries the mean; otherwise the latent is
        normalized as is.
    keeps_norms: norms on queries and keys are kept.
    gain: the weight ``[E]`` of the norm in front of the attention.
    inputs: the attention inputs ``[n, E]`` for some tokens, empty without text.
    """

    channels: int
    slots: "RotarySlots"
    scale: float
    query_channels: int | None
    centered: bool
    keeps_norms: bool
    gain: "Tensor | None"
    inputs: "Tensor"


class Method:
    """Base class of conversion methods. A subclass sets the attributes and implements
    `fit_weights`.

    name: the NAME of ``--method NAME``.
    targets: the values of ``--to`` for which it is available.
    reads_text: it needs calibration text.
    card: the sentence about it on the model card, without the final period.
    pools: it leaves queries and the output projection unchanged.
    seeded: the result depends on the request's seed.
    needs_linear_keys: it does not support norms on queries and keys after the rotary embedding.
    """

    name: str
    targets: tuple[str, ...]
    reads_text: bool
    card: str
    pools = False
    seeded = False
    needs_linear_keys = False

    def fit_weights(self, layer: Any) -> ConvertedLayer:
        """Convert ``layer``, a `LatentLayer` for target mla and a `FoldLayer` otherwise.

        Implemented in ``fold.py``, ``mla.py`` and ``baselines.py``.
        """
        raise NotImplementedError


MethodClass = TypeVar("MethodClass", bound=type[Method])
ObjectiveFactory = TypeVar("ObjectiveFactory", bound="Callable[[], Objective]")
# Methods by target and name.
_methods: dict[tuple[str, str], Method] = {}
_objectives: dict[str, "Callable[[], Objective]"] = {}


def register_method(kind: MethodClass) -> MethodClass:
    """Class decorator: register a `Method` as ``--method NAME`` for its targets."""
    for target in kind.targets:
        _methods[target, kind.name] = kind()
    return kind


def register_objective(name: str) -> Callable[[ObjectiveFactory], ObjectiveFactory]:
    """Decorator: register an objective's class, or a function that returns an objective, as
    ``--objective NAME``.
    """

    def register_factory(factory: ObjectiveFactory) -> ObjectiveFactory:
        """Store ``factory`` under the objective's name."""
        _objectives[name] = factory
        return factory

    return register_factory


@cache
def _import_method_files() -> None:
    """Import every file in this folder, so that their methods and objectives are registered."""
    # In alphabetical order: the names of a target are listed in the order of their registration.
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")


def list_methods(target: str | None = None) -> tuple[str, ...]:
    """Return the names of the methods for ``target`` (None means every target), the default method
    first.
    """
    _import_method_files()
    # A dict keeps the order of registration, and names that several targets share once.
    names = dict.fromkeys(name for to, name in _methods if target in (None, to))
    return tuple(sorted(names, key=lambda name: name != DEFAULT))


def list_objectives() -> tuple[str, ...]:
    """Return the names of all objectives."""
    _import_method_files()
    return tuple(_objectives)


def find_method(name: str, target: str) -> Method:
    """Return the method ``name`` (or ``MODULE:NAME``) for ``target``. Raises InputError if
    ``target`` has no such method.
    """
    return _methods[target, _resolve_name("method", name, target)]


def find_objective(name: str) -> "Objective":
    """Return the objective ``name`` (or ``MODULE:NAME``). Raises InputError if there is none of
    this name.
    """
    return _objectives[_resolve_name("objective", name)]()


def _resolve_name(option: str, name: str, target: str | None = None) -> str:
    """Return the registered name in ``MODULE:NAME``, after importing MODULE. Raises InputError if
    MODULE cannot be imported or NAME is not registered.
    """
    _import_method_files()
    module, _, plain = name.rpartition(":")
    if module:
        try:
            import_module(module)
        except ImportError as error:
            raise option_error(
                option,
                name,
                f": cannot import module {module!r} ({error}); install it or add its folder to"
                " PYTHONPATH",
            ) from error
    allowed = list_objectives() if target is None else list_methods(target)
    if plain not in allowed:
        for_target = "" if target is None else f" with --to {target}"
        allowed_names = ", ".join(allowed) + suggest_name(plain, allowed)
        raise option_error(
            option, name, f"is not available{for_target}; use one of {allowed_names}"
        )
    return plain
