"""Methods and objectives by name. Each is one function (or class) that a decorator registers; no other list names them.

A method makes a converted layer of a source layer, ``FoldLayer`` or ``LatentLayer`` -> ``Fitted``. An objective is what
a fold minimizes: an object with the methods of ``transforms.fold.heads.Objective``. CONTRIBUTING.md has one of each.

The files of this folder are imported when a name is first looked up. They must not import torch at their top, because
``kvfold --help`` lists names. A file elsewhere may; ``--method MODULE:NAME`` imports it, and nothing else does.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.convert.errors import InputError, did_you_mean, opt

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.transforms.fold.grouping import Pairs
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.latent.slots import Slots
    from kvfold.convert.transforms.latent.weights import LatentWeights
    from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

DEFAULT = "principal"
DEFAULT_OBJECTIVE = "scores"

Notes = Mapping[str, Any]  # JSON values


@dataclass(frozen=True)
class Fitted:
    """A converted layer before it is encoded for its files, and what ``kvfold.json`` says of it."""

    weights: "AttentionWeights | LatentWeights"
    notes: Notes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of the source. ``context``: the number of positions that the result has to serve.

    ``statistics`` are of its inputs on calibration text, None for a method that reads none.
    """

    index: int
    weights: "AttentionWeights"
    rotary: "Rotary"
    context: int
    statistics: "LayerStatistics | None"

    def known(self) -> "LayerStatistics":
        """``statistics``. Raises ValueError without them."""
        if self.statistics is None:
            raise ValueError("layer: no statistics; register the method with reads_text=True")
        return self.statistics


@dataclass(frozen=True, kw_only=True)
class FoldLayer(Layer):
    """A layer whose key/value heads a method folds to ``kv_heads``.

    With text ``error`` gives ``||y - y'||^2 / ||y||^2`` of the attention's output on held-out text for a candidate.
    ``similar``: heads other than neighbors may share. ``std`` is that of the model's initial weights. ``shared`` keeps
    what fits of this layer to other numbers of heads need too.
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
    """A layer that a method turns into latent attention of ``channels`` channels and the rotary ``slots``.

    ``query_channels`` of a query latent, None without one. ``centered``: one of the channels is constant and carries
    the mean; otherwise the latent is normalized as it is. ``keeps_norms``: norms on queries and keys stay. ``scale``
    multiplies scores, ``gain [E]`` is the weight of the norm in front of the attention. ``error`` as in `FoldLayer`;
    ``inputs [n, E]`` are the attention's inputs for some tokens, empty without text.
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
    """A registered method. ``card`` is its sentence on the model card, without the full stop.

    ``pools``: queries and the output projection stay as they are. ``seeded``: the request's seed decides the result.
    ``needs_linear_keys``: it does not support norms on queries and keys after the rotary embedding.
    ``takes_objective``: it reads ``layer.objective``.
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
    """Register the decorated function as ``--method NAME`` of ``targets``; the arguments are those of `Method`."""

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
    """Import the files of this folder, so that each registers its names."""
    # In alphabetical order: the names of a target are listed in the order of their registration.
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")


def methods_of(target: str | None = None) -> tuple[str, ...]:
    """The names of a target's methods, of all without a ``target``; the default first."""
    _discover()
    # A dict keeps the order of registration, and names that several targets share once.
    names = dict.fromkeys(name for to, name in _methods if target in (None, to))
    return tuple(sorted(names, key=lambda name: name != DEFAULT))


def objectives() -> tuple[str, ...]:
    """The names of all objectives."""
    _discover()
    return tuple(_objectives)


def quick_method(target: str) -> str:
    """The first method of ``target`` that reads no text."""
    return next(name for name in methods_of(target) if not _methods[target, name].reads_text)


def find_method(name: str, target: str) -> Method:
    """The method ``name``, or ``MODULE:NAME``, of ``target``. Raises InputError where there is none."""
    _discover()
    # The module of the name registers it.
    plain = _imported(name, "method")
    if (target, plain) not in _methods:
        allowed = methods_of(target)
        way_out = f"use one of {', '.join(allowed)}{did_you_mean(plain, allowed)}"
        raise InputError(f"{opt('method', name)} does not go with {opt('to', target)}; {way_out}")
    return _methods[target, plain]


def find_objective(name: str) -> "Callable[[], Objective]":
    """The factory of the objective ``name``; of ``MODULE:NAME`` the one that the module registers.

    Raises InputError for an unknown name.
    """
    _discover()
    plain = _imported(name, "objective")
    if plain not in _objectives:
        way_out = f"use one of {', '.join(_objectives)}{did_you_mean(plain, _objectives)}"
        raise InputError(f"{opt('objective', name)}: no such objective; {way_out}")
    return _objectives[plain]


def _imported(name: str, option: str) -> str:
    """``name`` without its module, which is imported."""
    module, colon, plain = name.rpartition(":")
    if not colon:
        return name
    try:
        import_module(module)
    except ImportError as error:
        way_out = "install it, or put its folder on PYTHONPATH"
        raise InputError(f"{opt(option, name)}: cannot import {module} ({error}); {way_out}") from error
    return plain
