"""The block that a command prints at its end, made to be read in five seconds: what was made, the
saving, the loss, the verdict and the next command.
"""

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfold.attention.drift.metrics import format_metrics, format_saving
from kvfold.convert import processes
from kvfold.convert.conversion.judgment import judge_with_doubt, next_command
from kvfold.convert.conversion.memory import estimate_needs, free_bytes, free_disk, writes_text
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import text_name
from kvfold.convert.errors import escape_text
from kvfold.convert.formatting import format_bytes, format_duration, format_tokens
from kvfold.convert.request import SELF
from kvfold.convert.text.corpus import BUILT_IN, calibration_texts
from kvfold.convert.training.budget import refining_batch, step_tokens, steps_of

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

_COLUMNS = 100
_LABEL = 9
_FILES = 20  # chosen: a screenful


def format_block(rows: Iterable[tuple[str, str]], next_command: Sequence[str] = ()) -> str:
    """Lines of ``(label, text)``, wrapped to the terminal and at most 100 columns, then the words
    of ``next_command`` as shell code. Rows without text are left out.
    """
    width = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns) - _LABEL
    lines = []
    for label, text in rows:
        for line in textwrap.wrap(
            escape_text(text), width, break_long_words=False, break_on_hyphens=False
        ):
            lines.append(f"{label:<{_LABEL}}{line}")
            label = ""
    if next_command:
        lines.append("next".ljust(_LABEL))
        for words in _join_options(next_command):
            if len(lines[-1]) + len(words) > _LABEL + width - len(" \\"):
                lines[-1] += "\\"
                lines.append(" " * (_LABEL + 2))
            lines[-1] += f"{words} "
    return "\n".join(line.rstrip() for line in lines)


def _join_options(command: Sequence[str]) -> list[str]:
    """The words of ``command`` for a shell, each option with its value."""
    joined: list[str] = []
    option = False
    for word in command:
        if option and not word.startswith("--"):
            joined[-1] += f" {shlex.quote(word)}"
        else:
            joined.append(shlex.quote(word))
        option = word.startswith("--")
    return joined


def summarize_conversion(
    plan: Plan,
    record: Mapping[str, Any],
    drift: "DriftReport | None",
    written: Path,
    seconds: float,
) -> str:
    """The text on the terminal after a conversion."""
    size = format_bytes(sum(tensor.nbytes for tensor in plan.output.tensors))
    rows = [
        ("made", f"{describe_conversion(plan)} in {written}: {size}, {format_duration(seconds)}"),
        ("cache", describe_cache(plan)),
    ]
    if drift is not None:
        rows += [
            ("loss", format_metrics(drift)),
            *(("by text", line) for line in losses_by_text(record)),
            ("verdict", judge_with_doubt(drift)),
        ]
    return format_block(rows, next_command(plan, drift))


def describe_conversion(plan: Plan) -> str:
    """The source, and the kinds of attention before and after: ``demo, MHA -> MQA``."""
    return f"{plan.checkpoint.origin}, {plan.source_kind} -> {plan.output.kind}"


def describe_cache(plan: Plan) -> str:
    """The size of the cache before and after, and the saving."""
    before = plan.cache_elements
    after = plan.output.cache_elements
    return f"{before} -> {after} elements per token per layer, {format_saving(before, after)}"


def losses_by_text(record: Mapping[str, Any]) -> list[str]:
    """A line with the loss on each text of a mixture; none for a single text."""
    lines = []
    for row in record["drift"].get("texts", ()):
        loss = format_metrics(SimpleNamespace(**row))
        lines.append(f"{text_name(row['text'])}: {loss} ({row['sequences']} sequences)")
    return lines


def summarize_plan(plan: Plan) -> str:
    """The text on the terminal after ``--dry-run``: the tensors to compute, the text and training,
    and the memory and disk space needed.
    """
    needs = estimate_needs(plan)
    room = needs.disk + needs.scratch
    per_process = " per process" if processes.world_size() > 1 else ""
    computed = sum(map(len, plan.output.computed))
    copied = len(plan.output.tensors) - computed
    rows = [
        ("plan", describe_conversion(plan)),
        ("cache", describe_cache(plan)),
        ("tensors", f"{copied} copied, {computed} computed; in layer 0:"),
        *(("", line) for line in _describe_layer(plan)),
        ("files", f"{len(plan.shards)}"),
        *(("", f"{shard.file}") for shard in plan.shards[:_FILES]),
        ("text", _describe_text(plan)),
        ("refine", _describe_refinement(plan)),
        ("polish", _describe_polishing(plan)),
        ("disk", f"{format_bytes(room)} needed{_format_free(room, free_disk(plan))}"),
        (
            "memory",
            f"about {format_bytes(needs.memory)} needed{per_process}"
            f"{_format_free(needs.memory, free_bytes(plan))}",
        ),
        ("written", "nothing (--dry-run)"),
    ]
    return format_block(rows)


def _describe_layer(plan: Plan) -> list[str]:
    """A line for each tensor that is computed in layer 0. With a budget the split, and so the
    shapes, are not chosen yet.
    """
    before = plan.checkpoint.tensors
    lines = []
    for tensor in plan.output.tensors:
        if tensor.name in plan.output.computed[0]:
            present = before.get(tensor.name)
            line = f"{tensor.name} {tensor.dtype} {list(present.shape) if present else 'new'}"
            if plan.request.budget is None:
                line += f" -> {list(tensor.shape)}"
            lines.append(line)
    return lines


def _format_free(needed: int, free: int | None) -> str:
    return "" if free is None else f", {format_bytes(free)} free{': too little' * (needed > free)}"


def _describe_text(plan: Plan) -> str:
    """The text that a calibrated run will read; empty for other runs."""
    request = plan.request
    if not request.calibrated:
        return ""
    texts = calibration_texts(request.calibration, plan.checkpoint.chats)
    total = sum(share for _, share in texts)
    shares = [f" ({100 * share / total:.0f} %)" if len(texts) > 1 else "" for _, share in texts]
    names = [(name or BUILT_IN) + share for (name, _), share in zip(texts, shares, strict=True)]
    line = f"{request.samples} x {request.length} tokens of {' + '.join(names)}"
    if not writes_text(plan):
        return line
    itself = f"{SELF} is text that MODEL writes, which keeps it in memory"
    return f"{line}; {itself} (--calibration {SELF}:0 leaves it out)"


def _describe_refinement(plan: Plan) -> str:
    """The steps of refinement; empty without ``--refine``."""
    request = plan.request
    if not request.refine:
        return ""
    batch = min(refining_batch(request.length), request.samples)
    return f"{request.refine} steps of {batch * request.length} tokens, in each layer"


def _describe_polishing(plan: Plan) -> str:
    """The steps of polishing, after the last layer; empty without ``--polish``."""
    request = plan.request
    if not request.polish:
        return ""
    steps = steps_of(request.polish, request.length)
    tokens = step_tokens(request.length)
    return f"{steps} steps of {tokens} tokens, {format_tokens(steps * tokens)} tokens in all"
