"""What a calibrated conversion chose and gained, as objects; `fitted_of` reads them from
``kvfold.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Change(Generic[Value]):
    """A value of the source, and of the result."""

    before: Value
    after: Value


@dataclass(frozen=True)
class Split:
    """A split tried for a budget, and its KL in nats in a few layers, as fitted and after a few
    refinement steps.
    """

    kv_rank: int
    rope_dim: int
    kl: float
    refined_kl: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without ``refined_kl`` if it was not measured."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Gain:
    """An error on held-out text before and after training or a fit; ``steps`` were run, the weights
    are of ``kept``.
    """

    before: float
    after: float
    steps: int = 0
    kept: int = 0


AnyGain = TypeVar("AnyGain", bound=Gain)


@dataclass(frozen=True)
class Polishing(Gain):
    """The KL of polishing (in nats) by round, of ``tokens_per_error`` tokens; further figures of
    some are in ``curve``.

    A point of the curve has ``tokens``, ``kl``, ``excess``, ``loss`` and ``top_1_agreement`` on
    held-out text.
    """

    errors: list[float] = field(default_factory=list)
    tokens_per_error: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RotaryWorth:
    """The share of the scores' energy per rotary pair, the part kept, and the ``slots`` kept of
    those ``sorted``.
    """

    per_pair: list[float]
    kept_per_pair: list[float]
    slots: int
    sorted: list[float]


@dataclass(frozen=True)
class LatentSpectrum:
    """The share of energy of the latent's channels, ``channels`` of which are kept; ``lost`` is the
    rest by layer.
    """

    channels: int
    sorted: list[float]
    lost: list[float]


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """The splits tried for a budget, and gains: ``refinement`` and ``output_fit`` by layer,
    ``polish`` as a whole.
    """

    splits: tuple[Split, ...] = ()
    refinement: tuple[Gain, ...] = ()
    output_fit: tuple[Gain, ...] = ()
    polish: Polishing | None = None
    rotary_worth: RotaryWorth | None = None
    latent_spectrum: LatentSpectrum | None = None


def fitted_of(record: Mapping[str, Any]) -> FitReport:
    """Read the content of a ``kvfold.json``; entries that it lacks are empty or None."""
    worth, spectrum, polish = (
        record.get(name) for name in ("rotary_worth", "latent_spectrum", "polish")
    )
    return FitReport(
        refinement=tuple(_read(Gain, entry) for entry in record.get("refinement", ())),
        output_fit=tuple(_read(Gain, entry) for entry in record.get("output_fit", ())),
        splits=tuple(Split(**split) for split in record.get("splits", ())),
        polish=None if polish is None else _read(Polishing, polish),
        rotary_worth=None if worth is None else RotaryWorth(**worth),
        latent_spectrum=None if spectrum is None else LatentSpectrum(**spectrum),
    )


def _read(kind: type[AnyGain], entry: Mapping[str, Any]) -> AnyGain:
    """The fields of the dataclass ``kind`` that ``entry`` has."""
    return kind(**{name: entry[name] for name in kind.__dataclass_fields__ if name in entry})
