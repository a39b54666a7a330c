"""The result of a conversion, as returned by `convert_checkpoint`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold.convert.conversion.judgment import judge_drift
from kvfold.convert.conversion.memory import estimate_needs, get_free_disk_bytes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import make_record
from kvfold.convert.conversion.summary import (
    summarize_conversion,
    summarize_plan,
)

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport


class Change(NamedTuple):
    """A figure or name before and after the conversion: of the source model and of the converted
    model.
    """

    before: Any
    after: Any


@dataclass(frozen=True)
class Conversion:
    """The result of a finished conversion or of a dry run.

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

    @property
    def attention(self) -> Change:
        """The kinds of attention before and after the conversion, such as MHA and GQA-4."""
        return Change(self.plan.source_kind, self.plan.output.kind)

    @property
    def cache_elements(self) -> Change:
        """The KV-cache elements per token per layer before and after the conversion."""
        return Change(self.plan.cache_elements, self.plan.result.count_cache_elements())

    @property
    def verdict(self) -> str | None:
        """The verdict on the loss in words, one of `judgment.LIMITS` or "needs training"; None for
        a run without text.
        """
        return None if self.drift is None else judge_drift(self.drift)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values: the plan after a dry run, otherwise the content of
        ``kvfold.json`` without its lists of tensors and files.
        """
        plan = self.plan
        if self.written is None:
            needs = estimate_needs(plan)
            facts = {
                "out": None,
                "dry_run": True,
                "files": {
                    shard.file: sum(tensor.nbytes for tensor in shard.tensors)
                    for shard in plan.shards
                },
                "disk_bytes": needs.disk,
                "free_bytes": get_free_disk_bytes(plan),
                "memory_bytes": needs.memory,
                **make_record(plan),
            }
        else:
            facts = {
                "out": str(self.written),
                "seconds": self.seconds,
                "weight_bytes": sum(tensor.nbytes for tensor in plan.output.tensors),
                "verdict": self.verdict,
                **self.record,
            }
            facts.pop("files", None)
        facts.pop("tensors", None)
        return facts

    def summary(self) -> str:
        """Return the text that the command prints at its end: the plan after a dry run, otherwise
        the output, the saved cache and the measured loss.
        """
        if self.written is None or self.seconds is None:
            return summarize_plan(self.plan)
        return summarize_conversion(self.plan, self.record, self.drift, self.written, self.seconds)
