"""What a conversion returns, and what it chose and gained, as objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvfold.convert.conversion.judgment import judge
from kvfold.convert.conversion.memory import free_disk, needs_of
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import make_record
from kvfold.convert.conversion.summary import (
    describe_conversion,
    summarize_conversion,
    summarize_plan,
)

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

Value = TypeVar("Value")


@dataclass(frozen=True)
class Change(Generic[Value]):
    """A value of the source, and of the result."""

    before: Value
    after: Value


@dataclass(frozen=True)
class Conversion:
    """The result of a run.

    plan: what was planned.
    written: OUT; None for a dry run.
    seconds: the time that the run took; None for a dry run.
    record: the content of ``kvfold.json``; empty for a dry run.
    drift: from the source on held-out text; None for a run without text.
    """

    plan: Plan
    written: Path | None = None
    seconds: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    drift: "DriftReport | None" = None

    def __repr__(self) -> str:
        where = "planned" if self.written is None else f"written to {str(self.written)!r}"
        return f"Conversion({describe_conversion(self.plan)}; {where})"

    @property
    def attention(self) -> Change[str]:
        """The kinds of attention, such as MHA and GQA-4."""
        return Change(self.plan.source_kind, self.plan.layout.kind)

    @property
    def cache_elements(self) -> Change[int]:
        """The KV-cache elements per token per layer."""
        return Change(self.plan.cache_elements, self.plan.layout.cache_elements)

    @property
    def verdict(self) -> str | None:
        """The verdict on the result in words (`judgment.LIMITS`); None for a run without text."""
        return None if self.drift is None else judge(self.drift)

    @property
    def split(self) -> tuple[int, int] | None:
        """The rank and the rotary dims of an MLA result; None for GQA and MQA."""
        latent = self.plan.latent
        return None if latent is None else (latent.kv_rank, latent.rope_dim)

    @property
    def choices(self) -> "Choices":
        """What was chosen and gained."""
        return read_choices(self.record)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the plan for a dry run, otherwise the record without its lists of tensors
        and files.
        """
        plan = self.plan
        if self.written is None:
            needs = needs_of(plan)
            facts = {
                "out": None,
                "dry_run": True,
                "files": {
                    shard.file: sum(tensor.nbytes for tensor in shard.tensors)
                    for shard in plan.shards
                },
                "disk_bytes": needs.disk,
                "free_bytes": free_disk(plan),
                "memory_bytes": needs.memory,
                "scratch_bytes": needs.scratch,
                **make_record(plan),
            }
        else:
            facts = {
                "out": str(self.written),
                "seconds": self.seconds,
                "weight_bytes": sum(tensor.nbytes for tensor in plan.layout.tensors),
                "verdict": self.verdict,
                **self.record,
            }
            facts.pop("files", None)
        facts.pop("tensors", None)
        return facts

    def summary(self) -> str:
        """The text on the terminal: the plan for a dry run, otherwise what was made and lost."""
        if self.written is None or self.seconds is None:
            return summarize_plan(self.plan)
        return summarize_conversion(self.plan, self.record, self.drift, self.written, self.seconds)


@dataclass(frozen=True)
class Split:
    """A split tried for a budget.

    kv_rank: the rank of the latent.
    rope_dim: the rotary dims.
    kl: the KL in nats per token in a few layers, as fitted.
    refined_kl: the same after a few steps of refinement; None if not measured.
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
    """A gain on held-out text by training or a fit.

    before: the error before it.
    after: the error after it.
    steps: the steps that were run.
    kept: the step whose weights are used.
    """

    before: float
    after: float
    steps: int = 0
    kept: int = 0


AnyGain = TypeVar("AnyGain", bound=Gain)


@dataclass(frozen=True)
class Polishing(Gain):
    """The gain of polishing, in KL (nats per token).

    errors: the KL before training and after each round.
    tokens_per_error: the tokens of a round.
    curve: further figures of some rounds: ``tokens``, ``kl``, ``excess``, ``loss`` and
        ``top_1_agreement`` on held-out text.
    """

    errors: list[float] = field(default_factory=list)
    tokens_per_error: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RotaryWorth:
    """The share of the scores' energy in rotary pairs.

    per_pair: the share of each pair.
    kept_per_pair: the part of it that is kept.
    slots: the number of slots kept.
    sorted: the shares of the largest slots.
    """

    per_pair: list[float]
    kept_per_pair: list[float]
    slots: int
    sorted: list[float]


@dataclass(frozen=True)
class LatentSpectrum:
    """The share of energy of the latent's channels.

    channels: the number of channels kept.
    sorted: the shares of the largest channels, mean over layers.
    lost: the share beyond the channels kept, by layer.
    """

    channels: int
    sorted: list[float]
    lost: list[float]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a calibrated conversion chose and gained.

    splits: those tried for a budget.
    refinement: the gain of refinement, by layer.
    output_fit: the gain of the fit of the output projection, by layer.
    polish: the gain of polishing.
    rotary_worth: what the rotary slots of MLA keep.
    latent_spectrum: what the latent of MLA keeps.
    """

    splits: tuple[Split, ...] = ()
    refinement: tuple[Gain, ...] = ()
    output_fit: tuple[Gain, ...] = ()
    polish: Polishing | None = None
    rotary_worth: RotaryWorth | None = None
    latent_spectrum: LatentSpectrum | None = None


def read_choices(record: Mapping[str, Any]) -> Choices:
    """Read the content of a ``kvfold.json``; entries that it lacks are empty or None."""
    polish = record.get("polish")
    worth = record.get("rotary_worth")
    spectrum = record.get("latent_spectrum")
    return Choices(
        refinement=tuple(_read_gain(Gain, entry) for entry in record.get("refinement", ())),
        output_fit=tuple(_read_gain(Gain, entry) for entry in record.get("output_fit", ())),
        splits=tuple(Split(**split) for split in record.get("splits", ())),
        polish=None if polish is None else _read_gain(Polishing, polish),
        rotary_worth=None if worth is None else RotaryWorth(**worth),
        latent_spectrum=None if spectrum is None else LatentSpectrum(**spectrum),
    )


def _read_gain(kind: type[AnyGain], entry: Mapping[str, Any]) -> AnyGain:
    """The fields of the dataclass ``kind`` that ``entry`` has."""
    return kind(**{name: entry[name] for name in kind.__dataclass_fields__ if name in entry})
