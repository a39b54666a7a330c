"""The record of a conversion: ``kvfold.json`` and the terminal summary.

``kvfold.json`` contains no dates, timings or paths, so equal requests produce equal bytes.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert import processes
from kvfold.convert.conversion.judgment import next_step, verdict_text
from kvfold.convert.conversion.memory import free_bytes, free_disk, needs_of, writes_text
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.formatting import format_bytes, format_tokens
from kvfold.convert.request import SELF
from kvfold.convert.targets.engines import RANKS, describe_fold, format_support
from kvfold.convert.text.corpus import BUILT_IN, calibration_texts, with_share
from kvfold.convert.training.budget import refining_batch, step_tokens, steps_of

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

_SHOWN_FILES = 20  # chosen: a screenful


def versions() -> dict[str, str | None]:
    """The installed versions of the packages that affect a result; None means not installed."""
    packages = "kvfold", "torch", "transformers", "safetensors", "numpy"
    found = {package: next(iter(distributions(name=package)), None) for package in packages}
    return {package: None if each is None else each.version for package, each in found.items()}


def record(plan: Plan, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of ``kvfold.json``. ``measured`` contains the entries from a calibrated run, or
    is empty.

    A dry run, which reads no weights and so has no hash of the source, passes None.
    """
    hashed = {} if measured is None else {"sha256": plan.checkpoint.source_hash()}
    origins = _origins(plan)
    measured = measured or {}
    return {
        "format": 3,
        "request": (
            plan.request.result_options()
            | ({} if plan.latent is None else {"layout": plan.latent.layout})
        ),
        "versions": versions(),
        "source": {
            "name": plan.checkpoint.origin,
            **hashed,
        },
        "attention": {"from": plan.source_kind, "to": plan.layout.kind},
        "cache_elements": {
            "from": plan.cache_elements,
            "to": plan.layout.cache_elements,
        },
        "cache_elements_per_rank": {
            "from": describe_fold(plan.model).per_rank(),
            "to": plan.result.per_rank(),
        },
        "engines": [asdict(verdict) for verdict in plan.engines],
        **({"padding_parameters": plan.padding} if plan.padding else {}),
        **measured,
        "tensors": {tensor.name: origins[tensor.name] for tensor in plan.layout.tensors},
    }


def _origins(plan: Plan) -> dict[str, dict[str, Any]]:
    """Map each output tensor to its origin (``copied``, ``cast``, ... or the method) and its source
    tensors.
    """
    origins: dict[str, dict[str, Any]] = {}
    for tensor in plan.layout.tensors:
        if tensor.source is not None:
            infos = [plan.checkpoint.tensors[name] for name in tensor.sources]
            changed = any(tensor.dtype != info.dtype for info in infos)
            kind = "cast" if changed else "copied"
            origins[tensor.name] = {
                "origin": kind if infos else "zeros",
                "from": list(tensor.sources),
            }
    # A computed tensor is from all that the transform of its layer reads.
    for computed, read in zip(plan.layout.computed, plan.reads, strict=True):
        origins |= {
            name: {"origin": plan.request.resolved_method, "from": list(read)} for name in computed
        }
    return origins


def headline(plan: Plan) -> str:
    """One line with the source, the target, the method and the cache size before and after."""
    saved = 1 - plan.layout.cache_elements / plan.cache_elements
    return (
        f"{plan.checkpoint.origin}: {plan.source_kind} -> {plan.layout.kind}, method"
        f" {plan.request.resolved_method}: {plan.cache_elements} -> {plan.layout.cache_elements}"
        f" KV-cache elements per token per layer ({100 * abs(saved):.1f} %"
        f" {'more' if saved < 0 else 'less'})"
    )


def summary_text(
    plan: Plan,
    record: Mapping[str, Any],
    drift: "DriftReport | None",
    written: Path,
    seconds: float,
    pass_seconds: float | None,
) -> str:
    """The terminal summary: headline, cost, choices, output, engines, the verdict and the next
    command.
    """
    request = plan.request
    size = sum(tensor.nbytes for tensor in plan.layout.tensors)
    compare = shlex.join(["kvfold", "drift", str(request.model), str(request.out)])
    following = f"next: {compare} --text FILE measures the drift on your own text"
    if drift is not None and math.isfinite(drift.excess):
        following = (
            f"{verdict_text(drift)}\n{next_step(plan, drift, seconds, pass_seconds).to_text()}"
        )
    lines = [
        headline(plan),
        "" if drift is None else cost_text(drift, text_name(record["calibration"]["source"])),
        "" if drift is None else by_text(record),
        "" if drift is None else drift.positions_text(),
        chosen_text(plan, record),
        groups_text(plan, record),
        ranks_text(record),
        padding_text(plan),
        f"wrote {written}: {format_bytes(size)} in {seconds:.1f} s; {parameters_text(plan)}",
        f"{format_support(plan.engines)}; {request.out}/README.md says how, and why not",
        absorb_text(plan),
        following,
    ]
    return "\n".join(filter(None, lines))


def cost_text(drift: "DriftReport", text: str) -> str:
    """One line with the drift on held-out text, named ``text``."""
    excess, margin, (before, after) = drift.excess, drift.measured.excess_margin, drift.perplexities
    if margin is None or not all(map(math.isfinite, (excess, margin, before, after))):
        return (
            "no cost on held-out text: the model's results are not finite, or there is only one"
            " held-out sequence"
        )
    change = f"{before:.2f} -> {after:.2f} ({percent_text(excess, margin)})"
    return (
        f"on {drift.sequences} x {drift.length} held-out tokens of {text}: perplexity {change}, KL "
        f"{drift.kl:.4f} nats, top-1 agreement {100 * drift.agreement:.1f} %"
    )


def by_text(record: Mapping[str, Any]) -> str:
    """One line with the KL and the excess loss on each text of a mixture; empty for a single text."""
    each = [
        f"{text_name(row['text'])}: KL {row['kl'] or math.nan:.4f}, excess"
        f" {row['excess'] or math.nan:+.4f} ({row['sequences']}"
        f" sequence{'s' * (row['sequences'] != 1)})"
        for row in record["drift"].get("texts", ())
    ]
    return f"nats per token by text: {'; '.join(each)}" if each else ""


def percent_text(excess: float, margin: float | None) -> str:
    """The rise in perplexity that is ``excess`` nats of loss, with its interval if there is a
    ``margin``.
    """
    # exp overflows a float beyond 709.
    ends = () if margin is None else (excess - margin, excess + margin)
    lost, *interval = (f"{100 * math.expm1(min(value, 700)):+.1f}" for value in (excess, *ends))
    return f"{lost} %" + (f", 95 % interval {' to '.join(interval)}" if interval else "")


def text_name(source: str) -> str:
    """The name of a calibration text as shown to users."""
    return re.sub(rf"(^| \+ ){SELF}(:[0-9.]+)?$", r"\1text that the source wrote itself", source)


def chosen_text(plan: Plan, record: Mapping[str, Any]) -> str:
    """One line with the split chosen for ``--budget`` and the reason; empty if the request named
    the split.
    """
    if plan.request.budget is None or plan.latent is None or "splits" not in record:
        return ""
    split = f"{plan.latent.kv_rank}+{plan.latent.rope_dim}"
    took = (
        f"--budget {plan.request.budget}: chose {split} from {len(record['splits'])} splits tried"
    )
    if (taken := record.get("preferred_for_engines")) is None:
        return f"{took}, because it drifts least"
    best = taken["instead_of"]
    engines = " and ".join(taken["engines"])
    return (
        f"{took}, with a KL of {taken['kl']:.4f} nats on held-out text;"
        f" {best['kv_rank']}+{best['rope_dim']} has a lower KL of {best['kl']:.4f}, but {engines}"
        " would not serve it"
    )


def groups_text(plan: Plan, record: Mapping[str, Any]) -> str:
    """One line on which heads share and why; empty if there is no choice, as for MQA, where all
    heads share.
    """
    if not (layers := record.get("groups")) or len(layers[0]) == 1:
        return ""
    request = plan.request
    moved = []
    for index, groups in enumerate(layers):
        if any(list(group) != list(range(group[0], group[0] + len(group))) for group in groups):
            moved.append(index)
    if moved:
        example = " | ".join(" ".join(map(str, group)) for group in layers[moved[0]])
        return (
            f"heads that share: not only neighbors in {len(moved)} of {len(layers)} layers, for"
            f" example {example} in layer {moved[0]}; each layer uses the grouping with the"
            " smallest attention error on held-out text (kvfold.json lists all groups)"
        )
    why = "because no other grouping tried has a smaller error on held-out text"
    if request.group == "contiguous":
        why = "as requested by --group contiguous"
    elif not request.chosen_method.reads_text:
        why = f"because --method {request.resolved_method} joins neighbors"
    elif request.group is None and plan.geometry.kv_heads < plan.geometry.heads:
        why = (
            "because the model was trained with neighbors sharing (--group similar compares other"
            " groupings)"
        )
    return f"heads that share: neighbors in every layer, {why}"


def rank_sizes(record: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """``(ranks, before, after)``: cached elements per rank, for each tensor-parallel size that both
    models support.
    """
    before, after = (
        record.get("cache_elements_per_rank", {}).get(name, {}) for name in ("from", "to")
    )
    return [
        (ranks, before[ranks], after[ranks]) for ranks in before if ranks in after and ranks != "1"
    ]


def ranks_text(record: Mapping[str, Any]) -> str:
    """One line with the cache size on each tensor-parallel rank."""
    if not (sizes := rank_sizes(record)):
        numbers = f"neither {', '.join(map(str, RANKS[1:-1]))} nor {RANKS[-1]}"
        return f"tensor parallelism: {numbers} ranks divide the heads of both models"
    parts = ", ".join(f"{before} -> {after} on each of {ranks}" for ranks, before, after in sizes)
    return f"tensor parallelism, elements per token per layer: {parts} ranks"


def padding_text(plan: Plan) -> str:
    """One line on padded heads; empty if no heads are padded."""
    if not plan.padding:
        return ""
    config = plan.layout.config
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    stored = sum(math.prod(tensor.shape) for tensor in plan.layout.tensors)
    return (
        f"heads are padded to {nope} + {rope} and {value} dims, sizes that engines' kernels"
        f" support: {plan.padding:,} of {stored:,} parameters are zeros; the cache and the results"
        " do not change"
    )


def plan_text(plan: Plan) -> str:
    """The output of ``--dry-run``: the tensors to compute, the files, and the memory and disk space
    needed.
    """
    request = plan.request
    before = plan.checkpoint.tensors
    needs = needs_of(plan)
    # The split, and so the shapes, are not chosen yet.
    open_split = request.budget is not None
    lines = [headline(plan)]
    if plan.padding and not open_split:
        lines.append(padding_text(plan))
    computed = sum(map(len, plan.layout.computed))
    lines.append(
        f"tensors: {len(plan.layout.tensors) - computed} copied, {computed} computed; in layer 0:"
    )
    for tensor in plan.layout.tensors:
        if tensor.name in plan.layout.computed[0]:
            present = (
                "x".join(map(str, before[tensor.name].shape)) if tensor.name in before else "new"
            )
            shape = "" if open_split else f" -> {'x'.join(map(str, tensor.shape))}"
            lines.append(f"  {tensor.name}  {tensor.dtype} {present}{shape}")
    lines.append(
        f"files: {len(plan.shards)}"
        + (" (sizes depend slightly on the split)" if open_split else "")
    )
    shown = {
        shard.file: sum(tensor.nbytes for tensor in shard.tensors)
        for shard in plan.shards[:_SHOWN_FILES]
    }
    lines += [f"  {file}  {format_bytes(size)}" for file, size in shown.items()]
    if len(plan.shards) > _SHOWN_FILES:
        lines.append(f"  ... and {len(plan.shards) - _SHOWN_FILES} more")
    each = " per process" if processes.world_size() > 1 else ""
    room = needs.disk + needs.scratch
    lines += [
        format_support(plan.engines),
        *(f"  {verdict.to_text()}" for verdict in plan.engines if not verdict.serves),
        calibration_text(plan),
        refine_text(plan),
        polish_text(plan),
        f"disk: {format_bytes(room)} needed{_free_text(room, free_disk(plan))}",
        (
            f"memory: about {format_bytes(needs.memory)}"
            f" needed{each}{_free_text(needs.memory, free_bytes(plan))}"
        ),
    ]
    return "\n".join([*filter(None, lines), "nothing was written (--dry-run)"])


def _free_text(needed: int, free: int | None) -> str:
    return "" if free is None else f", {format_bytes(free)} free{': too little' * (needed > free)}"


def parameters_text(plan: Plan) -> str:
    """The parameters of the source and of the result, such as "134.5 M -> 142.3 M parameters"."""
    before, after = (
        sum(math.prod(tensor.shape) for tensor in tensors) / 1e6
        for tensors in (plan.checkpoint.tensors.values(), plan.layout.tensors)
    )
    return f"{before:.1f} M -> {after:.1f} M parameters"


def absorb_text(plan: Plan) -> str:
    """One line on decoding over the latent cache in transformers; empty unless OUT is of a stock
    MLA class.
    """
    if plan.request.to != "mla" or plan.layout.code is not None:
        return ""
    return (
        "in transformers, call kvfold.attention.absorb(model) before generating: stock code expands"
        " every cached token at every step (Llama-2-7B's shape, context 8192: 0.3 tokens per"
        " second, absorbed 11.6, the source 2.0)"
    )


def calibration_text(plan: Plan) -> str:
    """One line on the text that a calibrated run will read; empty for other runs."""
    request = plan.request
    if not request.calibrated:
        return ""
    texts = [
        with_share(text or BUILT_IN)
        for text in calibration_texts(request.calibration, plan.checkpoint.chats)
    ]
    parts = sum(share for _, share in texts)
    names = (
        f"{name} ({100 * share / parts:.0f} %)" if len(texts) > 1 else name for name, share in texts
    )
    line = f"calibration: {request.samples} x {request.length} tokens of {' + '.join(names)}"
    without = f"--calibration {SELF}:0"
    itself = (
        f"; {SELF} is text that MODEL writes, which keeps it in memory ({without} leaves it out)"
    )
    return line + (itself if writes_text(plan) else "")


def refine_text(plan: Plan) -> str:
    """One line on the steps of refinement; empty without ``--refine``."""
    request = plan.request
    if not request.refine:
        return ""
    steps = (
        "steps for as long as they help," if request.refine == "auto" else f"{request.refine} steps"
    )
    batch = min(refining_batch(request.length), request.samples)
    return f"refinement: {steps} of {batch * request.length} tokens, in each layer"


def polish_text(plan: Plan) -> str:
    """One line on what polishing will train, on how much text; empty without ``--polish``."""
    request = plan.request
    if not request.polish:
        return ""
    steps = steps_of(request.polish, request.length)
    each = step_tokens(request.length)
    return (
        f"polishing: {steps} steps of {each} tokens, {format_tokens(steps * each)} tokens in all,"
        " after the last layer"
    )
