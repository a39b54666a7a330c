"""The result of a conversion, as returned by `convert_checkpoint`, and the lines that a command
prints at its end: the output, the saved cache, the loss, the verdict and the next command.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold.attention.drift.metrics import format_cache_saving, format_metrics
from kvfold.convert.conversion.judgment import (
    NEAR,
    format_verdict,
    judge_drift,
    predict_loss_after_normal_effort,
    suggest_next_command,
)
from kvfold.convert.conversion.memory import (
    describe_memory,
    estimate_disk,
    get_free_disk_bytes,
)
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import describe_calibration_text, make_record
from kvfold.convert.errors import list_some
from kvfold.convert.formatting import format_bytes, format_duration, format_labeled_rows
from kvfold.convert.methods.registry import DEFAULT
from kvfold.convert.targets.engines import ENGINE_LEGEND, name_serving_engines
from kvfold.convert.targets.mla.spec import list_stock_limits
from kvfold.convert.text.corpus import BUILT_IN, choose_calibration_texts
from kvfold.convert.training.budget import count_polish_steps, count_step_tokens

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport


class BeforeAndAfter(NamedTuple):
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
    def attention(self) -> BeforeAndAfter:
        """The kinds of attention before and after the conversion, such as MHA and GQA-4."""
        return BeforeAndAfter(self.plan.source_kind, self.plan.output.kind)

    @property
    def cache_elements(self) -> BeforeAndAfter:
        """The KV-cache elements per token per layer before and after the conversion."""
        return BeforeAndAfter(self.plan.cache_elements, self.plan.result.count_cache_elements())

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
            facts = {
                "out": None,
                "dry_run": True,
                "files": {
                    shard.file: sum(tensor.nbytes for tensor in shard.tensors)
                    for shard in plan.shards
                },
                "disk_bytes": estimate_disk(plan),
                "free_bytes": get_free_disk_bytes(plan),
                **describe_memory(plan),
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
        plan = self.plan
        drift = self.drift
        if self.written is None or self.seconds is None:
            return summarize_plan(plan)
        size = format_bytes(sum(tensor.nbytes for tensor in plan.output.tensors))
        cost = f"{size}, {format_duration(self.seconds)}"
        rows = [
            ("made", f"{describe_conversion(plan)} in {self.written}: {cost}"),
            ("layout", explain_layout(plan)),
            ("cache", describe_cache(plan)),
        ]
        if drift is not None:
            rows += [
                ("loss", format_metrics(drift)),
                *(("by text", line) for line in format_losses_by_text(self.record)),
                ("verdict", format_verdict(drift)),
            ]
            expected = predict_loss_after_normal_effort(plan.request, drift)
            if expected is not None and self.verdict != NEAR:
                left = f"{format_metrics(expected)}, {judge_drift(expected)}"
                rows.append(("expected", f"{left}, with --effort normal"))
        else:
            rows.append(("verdict", "not measured without text, see next"))
        rows.append(("warning", make_baseline_warning(plan)))
        return format_labeled_rows(rows, suggest_next_command(plan, drift))


def describe_start(plan: Plan) -> str:
    """Return the first lines of a run: what it makes, and which engines will serve that."""
    engines = f"served by {name_serving_engines(plan.engines)} ({ENGINE_LEGEND})"
    return format_labeled_rows([("plan", describe_conversion(plan)), ("engines", engines)])


def make_baseline_warning(plan: Plan) -> str:
    """Return a warning about a method that reads no text; empty for any other."""
    if plan.method.reads_text:
        return ""
    name = f"--method {plan.request.resolved_method}"
    return f"{name} reads no text and usually loses far more than the default, --method {DEFAULT}"


def describe_conversion(plan: Plan) -> str:
    """Return the source's name with the kinds of attention before and after the conversion, such as
    ``demo, MHA -> MQA``.
    """
    return f"{plan.checkpoint.origin}, {plan.source_kind} -> {plan.output.kind}"


def explain_layout(plan: Plan) -> str:
    """Return why the result is in layout ``kvfold`` although the user named no layout, or an empty
    string.
    """
    if plan.mla_spec is None or plan.mla_spec.layout != "kvfold" or plan.request.layout is not None:
        return ""
    return f"kvfold, because no stock MLA class has {list_some(list_stock_limits(plan.model))}"


def describe_cache(plan: Plan) -> str:
    """Return the KV-cache elements per token per layer before and after the conversion, the saving
    in percent, and how the loss is measured with a rounded cache.
    """
    before = plan.cache_elements
    after = plan.result.count_cache_elements()
    saving = format_cache_saving(before, after)
    rounding = plan.request.cache
    rounded = f"; rounded to {rounding} (simulated)" if rounding else ""
    return f"{before} -> {after} elements per token per layer, {saving}{rounded}"


def format_losses_by_text(record: Mapping[str, Any]) -> list[str]:
    """Return one line with the loss on each calibration text of a mixture. The list is empty if
    there is only one text.
    """
    lines = []
    for row in record["drift"].get("texts", ()):
        loss = format_metrics(SimpleNamespace(**row))
        lines.append(
            f"{describe_calibration_text(row['text'])}: {loss} ({row['sequences']} sequences)"
        )
    return lines


def summarize_plan(plan: Plan) -> str:
    """Return the lines that ``--dry-run`` prints: the planned tensors, the text and training steps,
    and the memory and disk space needed.
    """
    request = plan.request
    computed = sum(map(len, plan.output.computed_names))
    copied = len(plan.output.tensors) - computed
    rows = [
        ("plan", describe_conversion(plan)),
        ("layout", explain_layout(plan)),
        ("cache", describe_cache(plan)),
        ("tensors", f"{copied} copied, {computed} computed, in {len(plan.shards)} files"),
    ]
    if request.calibrated:
        texts = choose_calibration_texts(request.calibration, plan.checkpoint.has_chat_template)
        names = " + ".join(name or BUILT_IN for name, _ in texts)
        rows.append(("text", f"{request.samples} x {request.calibration_length} tokens of {names}"))
    if request.refine:
        rows.append(("refine", f"{request.refine} steps in each layer"))
    if request.polish:
        steps = count_polish_steps(request.polish, request.calibration_length)
        rows.append(
            ("polish", f"{steps} steps of {count_step_tokens(request.calibration_length)} tokens")
        )
    disk = format_bytes(estimate_disk(plan))
    rows.append(("disk", f"{disk} needed, {format_bytes(get_free_disk_bytes(plan))} free"))
    memory = describe_memory(plan)
    for label, name in (("RAM", "host"), ("GPU", "card")):
        if (needed := memory[f"{name}_memory_bytes"]) is not None:
            text = f"about {format_bytes(needed)} needed"
            if (free := memory[f"{name}_memory_free_bytes"]) is not None:
                text += f", {format_bytes(free)} free"
            rows.append((label, text + " (estimated, not measured)" * (name == "card")))
    rows.append(("written", "nothing (--dry-run)"))
    return format_labeled_rows(rows)
