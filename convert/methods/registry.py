"""The registry of methods and objectives. A decorator registers each of them by name; no other list
contains the names.

A method computes a converted layer from a source layer: ``FoldLayer`` or ``LatentLayer`` ->
``Fitted``. An objective is the error that a fold minimizes: an object that implements
``transforms.fold.heads.Objective``. CONTRIBUTING.md has an example of each.

The files in this folder are imported when a name is first looked up. They must not import torch at
module level, because ``kvfold --help`` lists the names. A file elsewhere may import torch; only
``MODULE:NAME`` imports such a file.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.errors import did_you_mean, option_error

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.fold.grouping import Pairs
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.latent.latent_weights import LatentWeights
    from kvfold.convert.transforms.latent.slots import Slots
    from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

DEFAULT = "principal"
DEFAULT_OBJECTIVE = "scores"

Notes = Mapping[str, Any]  # JSON values


@dataclass(frozen=True)
class Fitted:
    """A converted layer before it is encoded for the checkpoint, and the notes about it for
    ``kvfold.json``.
    """

    weights: "AttentionWeights | LatentWeights"
    notes: Notes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of the source model. ``context``: the number of positions that the converted layer
    must support.

    ``statistics`` describe its inputs on calibration text; None for a method that does not read
    text.
    """

    index: int
    weights: "AttentionWeights"
    rotary: "Rotary"
    context: int
    statistics: "LayerStatistics | None"

    def require_statistics(self) -> "LayerStatistics":
        """Return ``statistics``. Raises ValueError if they are None."""
        if self.statistics is None:
            raise ValueError(
                "layer: has no calibration statistics; register the method with reads_text=True"
            )
        return self.statistics


@dataclass(frozen=True, kw_only=True)
class FoldLayer(Layer):
    """A layer whose key/value heads a method folds to ``kv_heads``.

    ``error`` returns ``||y - y'||^2 / ||y||^2`` of the attention output on held-out text for
    candidate weights, and raises ValueError if the method does not read text. ``similar``: groups
    may contain heads that are not neighbors. ``std``: the initializer range in the model's config.
    ``shared`` caches results for folds of this layer to other numbers of heads.
    """

    kv_heads: int
    std: float
    seed: int
    similar: bool
    objective: "Objective"
    error: "Callable[[AttentionWeights], float]"
    shared: "dict[bool, Pairs]"


@dataclass(frozen=True, kw_only=True)
class LatentLayer(Layer):
    """A layer that a method converts to latent attention with ``channels`` latent channels and the
    rotary ``slots``.

    ``query_channels``: the width of the query latent, or None for no query latent. ``centered``:
    one of the channels is constant and carries the mean; otherwise the latent is normalized as is.
    ``keeps_norms``: norms on queries and keys are kept. ``scale`` multiplies scores, ``gain [E]``
    is the weight of the norm in front of the attention. ``error`` as in `FoldLayer`; ``inputs [n,
    E]`` are the attention inputs for some tokens, empty without text.
    """

    channels: int
    slots: "Slots"
    scale: float
    query_channels: int | None
    centered: bool
    keeps_norms: bool
    gain: "Tensor | None"
    inputs: "Tensor"
    error: "Callable[[LatentWeights], float]"


@dataclass(frozen=True)
class Method:
    """A registered method. ``card`` is the sentence about it on the model card, without the final
    period.

    ``pools``: the method leaves queries and the output projection unchanged. ``seeded``: the result
    depends on the request's seed. ``needs_linear_keys``: the method does not support norms on
    queries and keys after the rotary embedding. ``takes_objective``: the method uses
    ``layer.objective``.
    """

    name: str
    targets: tuple[str, ...]
    reads_text: bool
    card: str
    fit: Callable[[Any], Fitted]
    pools: bool = False
    seeded: bool = False
    needs_linear_keys: bool = False
    takes_objective: bool = False


# Methods by target and name.
_methods: dict[tuple[str, str], Method] = {}
_objectives: dict[str, "Callable[[], Objective]"] = {}
Fitting = TypeVar("Fitting", bound=Callable[[Any], Fitted])
Making = TypeVar("Making", bound="Callable[[], Objective]")


def method(
    name: str, *, targets: tuple[str, ...], reads_text: bool, card: str, **flags: bool
) -> Callable[[Fitting], Fitting]:
    """Register the decorated function as ``--method NAME`` for ``targets``; the arguments are
    fields of `Method`.
    """

    def register(fit: Fitting) -> Fitting:
        # One function may serve several targets.
        for target in targets:
            _methods[target, name] = Method(name, targets, reads_text, card, fit, **flags)
        return fit

    return register


def objective(name: str) -> Callable[[Making], Making]:
    """Register the decorated class, or function that returns an objective, as ``--objective NAME``."""

    def register(make: Making) -> Making:
        _objectives[name] = make
        return make

    return register


@cache
def _discover() -> None:
    """Import the files in this folder so that each registers its names."""
    # In alphabetical order: the names of a target are listed in the order of their registration.
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")


def methods_of(target: str | None = None) -> tuple[str, ...]:
    """The names of the methods for ``target`` (None means every target), with the default method
    first.
    """
    _discover()
    # A dict keeps the order of registration, and names that several targets share once.
    names = dict.fromkeys(name for to, name in _methods if target in (None, to))
    return tuple(sorted(names, key=lambda name: name != DEFAULT))


def objectives() -> tuple[str, ...]:
    """The names of all objectives."""
    _discover()
    return tuple(_objectives)


def quick_method(target: str) -> str:
    """The first method for ``target`` that does not read text."""
    return next(name for name in methods_of(target) if not _methods[target, name].reads_text)


def find_method(name: str, target: str) -> Method:
    """The method ``name`` (or ``MODULE:NAME``) for ``target``. Raises InputError if ``target`` has
    no such method.
    """
    rule = f"is not available with --to {target}"
    return _methods[target, _registered("method", name, partial(methods_of, target), rule)]


def find_objective(name: str) -> "Callable[[], Objective]":
    """The factory of the objective ``name`` (or ``MODULE:NAME``). Raises InputError for an unknown
    name.
    """
    return _objectives[_registered("objective", name, objectives, "is not a known objective")]


def _registered(option: str, name: str, names: Callable[[], tuple[str, ...]], rule: str) -> str:
    """The name of ``names`` in ``name``; the module of a ``MODULE:NAME`` registers it when it is
    imported.
    """
    _discover()
    module, _, plain = name.rpartition(":")
    if module:
        try:
            import_module(module)
        except ImportError as error:
            way_out = "install the module, or add its folder to PYTHONPATH"
            raise option_error(
                option, name, f": cannot import module {module!r} ({error}); {way_out}"
            ) from error
    if plain not in (allowed := names()):
        raise option_error(
            option, name, f"{rule}; use one of {', '.join(allowed)}{did_you_mean(plain, allowed)}"
        )
    return plain
