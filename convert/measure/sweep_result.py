"""The result of a sweep: a row per target, as a table, as JSON, and the smallest target within a loss."""

import json
import math
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvfold.attention.drift.report import Measurement, perplexity
from kvfold.convert.console import duration
from kvfold.convert.conversion.record import versions
from kvfold.convert.conversion.run import Conversion, convert_checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.measure.sweep_targets import WITHIN
from kvfold.convert.options import command_words
from kvfold.convert.request import SELF, ConvertRequest

# Given as arguments of the command, or without influence on the result.
_NOT_REPEATED = ("model", "out", "quiet", "max_shard_size")


@dataclass(frozen=True)
class SweptSource:
    """The model of a sweep, the ``elements`` that it caches per token per layer, and the text.

    Targets are measured on ``sequences`` held-out sequences of ``length`` tokens.
    """

    name: str
    sha256: str
    kind: str
    elements: int
    layers: int
    text: str
    text_sha256: str
    calibration_sequences: int
    sequences: int
    length: int

    @property
    def text_name(self) -> str:
        """The name of the text for users."""
        return "text that the source wrote itself" if self.text == SELF else self.text


@dataclass(frozen=True)
class SweptTarget:
    """One target as ``--targets`` spells it, the request that converts to it, and its cost.

    ``kind``: for example ``MLA 32+32``; ``elements``: cached per token per layer; ``seconds``: spent on this target
    alone; ``splits``: the splits of a budget that were compared, with the KL that decided; ``distances``: of its
    residual stream from the source's after every layer, relative to the source's.
    """

    target: str
    request: ConvertRequest
    kind: str
    elements: int
    measured: Measurement
    seconds: float
    splits: list[dict[str, Any]] = field(default_factory=list)
    distances: tuple[float, ...] = ()

    @property
    def excess(self) -> float:
        """Nats per token that the target loses on held-out text."""
        return self.measured.excess

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of ``excess`` over texts like these; None for a single sequence."""
        half = self.measured.excess_margin
        return None if half is None else (self.excess - half, self.excess + half)

    def command(self, model: str, out: str) -> str:
        """The command that converts to the target."""
        given = {name: value for name, value in self.request.given().items() if name not in _NOT_REPEATED}
        return shlex.join(["kvfold", "convert", model, out, *command_words(given)])

    def to_dict(self, source: SweptSource) -> dict[str, Any]:
        """Plain values; what is not finite becomes None."""
        low, high = self.interval or (None, None)
        return {
            "target": self.target,
            "kind": self.kind,
            "options": self.request.result_options(),
            "command": self.command(source.name, self.request.out),
            "cache_elements_per_token_per_layer": self.elements,
            "saving": 1 - self.elements / source.elements,
            "excess": {"value": _finite(self.excess), "low": _finite(low), "high": _finite(high)},
            "perplexity": _finite(perplexity(self.measured.student_loss)),
            "kl": {"value": _finite(self.measured.kl), "margin": _finite(self.measured.kl_margin)},
            "agreement": self.measured.agreement,
            "seconds": self.seconds,
            "residual_by_layer": [_finite(distance) for distance in self.distances],
            **({"splits": self.splits} if self.splits else {}),
        }


@dataclass(frozen=True)
class Sweep:
    """The targets of a sweep in the order in which they were named. ``seconds``: of the whole run."""

    source: SweptSource
    rows: tuple[SweptTarget, ...]
    seconds: float = 0.0

    def smallest(self, within: float = WITHIN) -> SweptTarget | None:
        """The target with the smallest cache whose perplexity is at most ``within`` higher (0.01: 1 %); or None.

        Among equally small ones the target with the least loss.
        """
        # Perplexities compare as ratios, losses as differences: 1 % is 0.00995 nats.
        inside = [row for row in self.rows if row.excess <= math.log1p(within)]
        return min(inside, key=lambda row: (row.elements, row.excess), default=None)

    def table(self) -> str:
        """A line on the source and the text, a line per target, largest cache first, and one on the time."""
        width = max(len(row.kind) for row in self.rows)
        shared = max(0.0, self.seconds - sum(row.seconds for row in self.rows))
        rows = sorted(self.rows, key=lambda row: (-row.elements, row.excess))
        lines = [
            *self._heading(),
            "",
            f"{'target':{width}}  elements  saving  excess loss       95 % interval   KL, nats   top-1    time",
            *(self._line(row, width) for row in rows),
            "",
            f"Excess loss in nats per token; time of the target alone: all took {duration(self.seconds)}, of which "
            f"{duration(shared)} are shared.",
        ]
        return "\n".join(lines)

    def title(self) -> str:
        """The model and the text, for the head of a plot."""
        source = self.source
        text = f"{source.sequences} x {source.length} held-out tokens of {source.text_name}"
        return f"{Path(source.name).name}: {source.kind}; {text}"

    def _heading(self) -> list[str]:
        source, before = self.source, perplexity(self.rows[0].measured.teacher_loss)
        return [
            f"{source.name}: {source.kind}, {source.elements} KV-cache elements per token per layer",
            f"perplexity {before:.2f} on {source.sequences} x {source.length} held-out tokens of {source.text_name}",
        ]

    def lines(self, within: float = WITHIN) -> list[str]:
        """The source, the text, and the decision: the words of a report."""
        return [*self._heading(), *self.decision(within).splitlines()]

    def _line(self, row: SweptTarget, width: int) -> str:
        measured = row.measured
        interval = "-" if row.interval is None else "{:+.4f} to {:+.4f}".format(*row.interval)
        return (
            f"{row.kind:{width}}  {row.elements:8}  {100 * (1 - row.elements / self.source.elements):4.1f} %  "
            f"{row.excess:+11.4f}  {interval:>18}  {measured.kl:9.4f}  {100 * measured.agreement:4.1f} %  "
            f"{duration(row.seconds):>6}"
        )

    def decision(self, within: float = WITHIN) -> str:
        """The smallest target within a loss and the command that converts to it, in two lines; or that none is."""
        limit = f"within {100 * within:g} % perplexity"
        row = self.smallest(within)
        if row is None:
            best = min(self.rows, key=lambda row: row.excess)
            advice = "more --refine steps" if best.request.refine else "--refine auto"
            doubtful = best.interval is not None and best.interval[0] <= math.log1p(within)
            doubt = "; the interval reaches the limit: more --samples narrow it" if doubtful else ""
            nearest = f"{best.kind} comes nearest ({_percent(best)}{doubt})"
            return f"{limit}: none of these; {nearest}. Try {advice}, or larger targets"
        saved = f"{100 * (1 - row.elements / self.source.elements):.1f} % less cache"
        beyond = row.interval is not None and row.interval[1] > math.log1p(within)
        doubt = "; the interval reaches beyond the limit: more --samples narrow it" if beyond else ""
        command = row.command(self.source.name, row.request.out)
        return f"{limit}: {row.kind}, {saved} ({_percent(row)}{doubt})\n  {command}"

    def convert(self, within: float = WITHIN, *, quiet: bool = False) -> Conversion:
        """Write the smallest target within a loss, as its command would. Raises KvfoldError when there is none."""
        row = self.smallest(within)
        if row is None:
            raise KvfoldError(f"{self.rows[0].request.out}: nothing was written; {self.decision(within)}")
        return convert_checkpoint(replace(row.request, quiet=quiet))

    def to_dict(self, within: float = WITHIN) -> dict[str, Any]:
        """Plain values; ``smallest`` is the target within ``within`` and its command, None when there is none."""
        row = self.smallest(within)
        return {
            "source": vars(self.source) | {"perplexity": _finite(perplexity(self.rows[0].measured.teacher_loss))},
            "versions": versions(),
            "seconds": self.seconds,
            "targets": [each.to_dict(self.source) for each in self.rows],
            "within": within,
            "smallest": None if row is None else row.target,
        }

    def to_json(self, within: float = WITHIN) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(within), indent=2, allow_nan=False) + "\n"


def _percent(row: SweptTarget) -> str:
    """The perplexity that the target adds, with its interval."""

    def text(excess: float) -> str:
        # exp overflows a float beyond 709.
        return f"{100 * math.expm1(min(excess, 700)):+.1f}"

    if row.interval is None:
        return f"{text(row.excess)} %"
    low, high = row.interval
    return f"{text(row.excess)} %, 95 % interval {text(low)} to {text(high)}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
