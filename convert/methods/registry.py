"""Methods and objectives by name. Each is one function (or class) that a decorator registers; no other list names them.

A method makes a converted layer of a source layer::

    @method("mean", targets=("gqa", "mqa"), reads_text=False, card="Keys and values are the mean of ...")
    def mean(layer: FoldLayer) -> Fitted:
        from kvfold.convert.transforms.fold import pool

        return Fitted(pool.mean(layer.weights, layer.kv_heads))

An objective is what a fold minimizes: an object with the methods of ``transforms.fold.heads.Objective``::

    @objective("nearest-keys")
    class NearestKeys(Scores): ...

The files of this folder are imported when a name is first asked for. They must not import torch at their top, because
``kvfold --help`` lists names. A file elsewhere may; ``--method MODULE:NAME`` imports it, and nothing else does.
"""

import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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


@dataclass(frozen=True)
class FoldLayer:
    """A layer whose key/value heads a method folds to ``kv_heads``.

    ``statistics`` are those of its inputs on calibration text, None for a method that reads none; ``error`` then gives
    ``||y - y'||^2 / ||y||^2`` of the attention's output on held-out text for a candidate. ``context``: the number of
    positions that the layer has to serve. ``similar``: heads other than neighbors may share. ``std`` is that of the
    model's initial weights. ``shared`` keeps what fits of this layer to other numbers of heads need too.
    """

    index: int
    weights: "AttentionWeights"
    kv_heads: int
    rotary: "Rotary"
    context: int
    std: float
    seed: int
    similar: bool
    objective: "Objective"
    statistics: "LayerStatistics | None"
    error: "Callable[[AttentionWeights], float]"
    shared: "dict[bool, Pairs]"

    def known(self) -> "LayerStatistics":
        """``statistics``. Raises ValueError without them."""
        if self.statistics is None:
            raise ValueError("layer: no statistics; register the method with reads_text=True")
        return self.statistics


@dataclass(frozen=True)
class LatentLayer:
    """A layer that a method turns into latent attention of ``channels`` channels and the rotary ``slots``.

    ``query_channels``: those of a query latent, None without one. ``centered``: one of the channels is constant and
    carries the mean; otherwise the latent is normalized as it is. ``keeps_norms``: norms on queries and keys stay.
    ``scale`` multiplies scores, ``gain [E]`` is the weight of the norm in front of the attention. ``statistics`` and
    ``error`` as in `FoldLayer`; ``inputs [n, E]`` are the attention's inputs for some tokens, empty without text.
    """

    index: int
    weights: "AttentionWeights"
    channels: int
    slots: "Slots"
    rotary: "Rotary"
    context: int
    scale: float
    query_channels: int | None
    centered: bool
    keeps_norms: bool
    gain: "Tensor | None"
    statistics: "LayerStatistics | None"
    inputs: "Tensor"
    error: "Callable[[LatentWeights], float]"

    def known(self) -> "LayerStatistics":
        """``statistics``. Raises ValueError without them."""
        if self.statistics is None:
            raise ValueError("layer: no statistics; register the method with reads_text=True")
        return self.statistics


class Fit(Protocol):
    def __call__(self, layer: Any, /) -> Fitted: ...


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
    fit: Fit
    pools: bool = False
    seeded: bool = False
    needs_linear_keys: bool = False
    takes_objective: bool = False


_methods: dict[tuple[str, str], Method] = {}  # by target and name
_objectives: dict[str, "Callable[[], Objective]"] = {}
Fitting = TypeVar("Fitting", bound=Fit)
Making = TypeVar("Making", bound="Callable[[], Objective]")


def method(
    name: str, *, targets: tuple[str, ...], reads_text: bool, card: str, **flags: bool
) -> Callable[[Fitting], Fitting]:
    """Register the decorated function as ``--method NAME`` of ``targets``; the arguments are those of `Method`."""

    def register(fit: Fitting) -> Fitting:
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
    """Import the files of this folder, in alphabetical order, so that each registers its names."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        import_module(f"{package}.{module.name}")


def methods_of(target: str | None = None) -> tuple[str, ...]:
    """The names of a target's methods, of all without a ``target``; the default first."""
    _discover()
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
    """The method ``name`` of ``target``; of ``MODULE:NAME`` the one that the module registers.

    Raises InputError where there is none.
    """
    _discover()
    plain = _imported(name, "method")
    if (target, plain) not in _methods:
        allowed = methods_of(target)
        raise InputError(
            f"{opt('method', name)} does not go with {opt('to', target)}; use one of {', '.join(allowed)}"
            f"{did_you_mean(plain, allowed)}"
        )
    return _methods[target, plain]


def find_objective(name: str) -> "Callable[[], Objective]":
    """What makes the objective ``name``; of ``MODULE:NAME`` the one that the module registers.

    Raises InputError where there is none.
    """
    _discover()
    plain = _imported(name, "objective")
    if plain not in _objectives:
        raise InputError(
            f"{opt('objective', name)}: no such objective; use one of {', '.join(_objectives)}"
            f"{did_you_mean(plain, _objectives)}"
        )
    return _objectives[plain]


def module_of(name: str) -> str | None:
    """The file of the module that ``MODULE:NAME`` names; None for a plain name, or a module without a file."""
    module, colon, _ = name.rpartition(":")
    return getattr(sys.modules.get(module), "__file__", None) if colon else None


def _imported(name: str, option: str) -> str:
    """``name`` without its module, which is imported."""
    module, colon, plain = name.rpartition(":")
    if not colon:
        return name
    try:
        import_module(module)
    except ImportError as error:
        raise InputError(
            f"{opt(option, name)}: cannot import {module} ({error}); install it, or put its folder on PYTHONPATH"
        ) from error
    return plain
