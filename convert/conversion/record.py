"""The record of a conversion: ``kvfold.json``, and the summary on the terminal.

``kvfold.json`` holds no dates, timings or paths, so that equal requests give equal bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvfold.convert import processes
from kvfold.convert.conversion.memory import free_bytes, needs_of
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.request import SELF
from kvfold.convert.sizes import bytes_text
from kvfold.convert.targets.engines import folded_result

_PACKAGES = ("kvfold", "torch", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide a result, None for one that is not installed."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: installed(package) for package in _PACKAGES}


def record(plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``kvfold.json``; ``measured`` are the entries of a calibrated run (empty without one)."""
    return {
        "format": 3,
        "request": plan.request.result_options() | ({} if plan.latent is None else {"layout": plan.latent.layout}),
        "versions": versions(),
        "source": {
            "name": plan.source_name,
            "sha256": plan.checkpoint.source_hash(),
            **({"made_of": list(plan.made_of)} if plan.made_of else {}),
        },
        "attention": {"from": plan.source_kind, "to": plan.layout.kind},
        "cache_elements_per_token_per_layer": {"from": plan.cache_elements, "to": plan.layout.cache_elements},
        **_sharing(plan),
        "engines": [asdict(verdict) for verdict in plan.engines],
        **({"padding_parameters": plan.padding} if plan.padding else {}),
        **measured,
        "tensors": {name: {"origin": kind, "from": list(names)} for name, (kind, names) in plan.origins().items()},
    }


def _sharing(plan: Plan) -> dict[str, Any]:
    """The cache on tensor-parallel ranks."""
    return {"cache_elements_per_rank": {"from": folded_result(plan.model).per_rank(), "to": plan.result.per_rank()}}


def saving(plan: Plan) -> float:
    """The fraction of the cache that the target saves, up to 1; below 0 where it grows."""
    return 1 - plan.layout.cache_elements / plan.cache_elements


def headline(plan: Plan) -> str:
    """The conversion in a line: source, target, method, and the cache of both."""
    return _headline(plan, plan.layout.kind)


def _headline(plan: Plan, kind: str) -> str:
    saved = saving(plan)
    return (
        f"{plan.source_name}: {plan.source_kind} -> {kind}, method {plan.request.resolved_method}: "
        f"{plan.cache_elements} -> {plan.layout.cache_elements} KV-cache elements per token per layer "
        f"({100 * abs(saved):.1f} % {'more' if saved < 0 else 'less'})"
    )


def cost_text(record: Mapping[str, Any]) -> str:
    """What the conversion cost on held-out text, in a line; empty where nothing was measured."""
    if (drift := record.get("drift")) is None:
        return ""
    excess, both = drift["excess"], drift["perplexity"]
    if None in (excess["value"], excess["margin"], both["source"], both["student"]):
        return "on held-out text the converted model gives numbers that are not finite, or there is one sequence only"
    values = (excess["value"] + side * excess["margin"] for side in (0, -1, 1))
    lost, low, high = (f"{100 * math.expm1(value):+.1f}" for value in values)
    change = f"{both['source']:.2f} -> {both['student']:.2f} ({lost} %, 95 % interval {low} to {high})"
    return (
        f"on {drift['sequences']} x {drift['length']} held-out tokens of {text_name(record)}: perplexity {change}, KL "
        f"{drift['kl']['value']:.4f} nats, top-1 agreement {100 * drift['agreement']['value']:.1f} %"
    )


def text_name(record: Mapping[str, Any]) -> str:
    """The name of the calibration text for users."""
    source: str = record["calibration"]["source"]
    return "text that the source wrote itself" if source == SELF else source


def chosen_text(plan: Plan, record: Mapping[str, Any]) -> str:
    """The split that a budget got, and among how many; empty where the request named it."""
    if plan.request.budget is None or "splits" not in record:
        return ""
    target = plan.latent_target()
    split = f"{target.kv_rank}+{target.rope_dim}"
    least = "" if "preferred_for_engines" in record else ", which drifts least"
    return f"--budget {plan.request.budget}: took {split} of {len(record['splits'])} splits tried{least}"


def groups_text(plan: Plan, record: Mapping[str, Any]) -> str:
    """Which heads share, and why, in a line; empty where there was nothing to choose: for MQA all of them do."""
    if not (layers := record.get("groups")) or len(layers[0]) == 1:
        return ""
    moved = [index for index, groups in enumerate(layers) if not all(map(_neighbors, groups))]
    if not moved:
        return f"heads that share: neighbors in every layer, {_why_neighbors(plan)}"
    example = " | ".join(" ".join(map(str, group)) for group in layers[moved[0]])
    return (
        f"heads that share: others than neighbors in {len(moved)} of {len(layers)} layers, such as {example} in layer "
        f"{moved[0]}; each layer took the grouping tried whose attention errs least on held-out text (all: kvfold.json)"
    )


def _neighbors(group: Sequence[int]) -> bool:
    return list(group) == list(range(group[0], group[0] + len(group)))


def _why_neighbors(plan: Plan) -> str:
    request = plan.request
    if request.group == "contiguous":
        return "as --group contiguous asks"
    if not request.chosen_method.reads_text:
        return f"as --method {request.resolved_method} joins them"
    if request.group is None and plan.geometry.kv_heads < plan.geometry.heads:
        return "for heads that share already were trained to (--group similar compares others)"
    return "where no other grouping tried errs less on held-out text"


def rank_sizes(record: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Tensor-parallel ranks that both models can be shared out to, and the cached elements of both on each."""
    before, after = (record.get("cache_elements_per_rank", {}).get(name, {}) for name in ("from", "to"))
    return [(ranks, before[ranks], after[ranks]) for ranks in before if ranks in after and ranks != "1"]


def ranks_text(record: Mapping[str, Any]) -> str:
    """The cache on each tensor-parallel rank, in a line."""
    if not (sizes := rank_sizes(record)):
        return "tensor parallelism: the heads divide among no number of ranks but 1"
    parts = ", ".join(f"{before} -> {after} on each of {ranks}" for ranks, before, after in sizes)
    return f"tensor parallelism, elements per token per layer: {parts} ranks"


def preference_text(record: Mapping[str, Any]) -> str:
    """A sentence on a split of a budget that was taken because engines serve it; empty where the best was taken."""
    if (taken := record.get("preferred_for_engines")) is None:
        return ""
    best, engines = taken["instead_of"], " and ".join(taken["engines"])
    return (
        f"this split was taken because {engines} would not serve the best: a KL of {taken['kl']:.4f} nats on held-out "
        f"text; the best, {best['kv_rank']}+{best['rope_dim']}, has {best['kl']:.4f}"
    )


def engines_text(plan: Plan) -> str:
    """Which engines serve the output, and how."""
    lines = [f"  {verdict.to_text()}" for verdict in plan.engines]
    return "\n".join(["served by (versions and evidence: kvfold.json)", *lines])


def padding_text(plan: Plan) -> str:
    """A sentence on padded heads; empty where there are none."""
    if not plan.padding:
        return ""
    config = plan.layout.config
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    stored = sum(math.prod(tensor.shape) for tensor in plan.layout.tensors)
    return (
        f"heads are padded to {nope} + {rope} and {value} dims, which engines have kernels for: {plan.padding:,} zeros "
        f"among {stored:,} parameters; cache and results stay the same"
    )


def planned_kind(plan: Plan) -> str:
    """The attention that a plan will make, before a budget has its split."""
    return plan.layout.kind if plan.request.budget is None else "MLA, split by measured drift"


def plan_text(plan: Plan) -> str:
    """The output of ``--dry-run``: tensors to compute, files, and disk space. No shape of a split yet to be chosen."""
    open_split = plan.request.budget is not None
    computed = {name for names in plan.layout.computed for name in names}
    first = [tensor for tensor in plan.layout.tensors if tensor.name in plan.layout.computed[0]]
    before = plan.checkpoint.tensors
    lines = [
        _headline(plan, planned_kind(plan)),
        *(f"source: {line}" for line in plan.made_of),
        *filter(None, [_keepable_text(plan), "" if open_split else padding_text(plan)]),
        f"tensors: {len(plan.tensors) - len(computed)} copied, {len(computed)} computed; in layer 0:",
        *(
            f"  {t.name}  {t.dtype} {_shape(before[t.name].shape) if t.name in before else 'new'}"
            + ("" if open_split else f" -> {_shape(t.shape)}")
            for t in first
        ),
        f"files: {len(plan.shards)}" + (" (sizes depend a little on the split)" if open_split else ""),
        *(f"  {shard.file}  {bytes_text(sum(t.nbytes for t in shard.tensors))}" for shard in plan.shards[:20]),
        *([f"  ... and {len(plan.shards) - 20} more"] if len(plan.shards) > 20 else []),
        engines_text(plan),
        f"disk: {bytes_text(plan.disk_bytes)} needed, {bytes_text(plan.free_bytes)} free",
        *_memory_lines(plan),
        "nothing was written (--dry-run)",
    ]
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> list[str]:
    """Memory at the peak of a process, and the hidden states that it spills."""
    needs, free = needs_of(plan, processes.count()), free_bytes(plan)
    found = "" if free is None else f", {bytes_text(free)} free"
    each = " per process" if processes.count() > 1 else ""
    lines = [f"memory: about {bytes_text(needs.memory)} needed{each}{found}"]
    return lines + ([f"disk for --spill: about {bytes_text(needs.spilled)}{each}"] if needs.spilled else [])


def _keepable_text(plan: Plan) -> str:
    """That weights could stay quantized, where they could and do not."""
    if plan.request.keep_quantized or not plan.keepable:
        return ""
    return f"--keep-quantized would keep {plan.keepable} of these weights as they are stored"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def engine_cost(record: Mapping[str, Any]) -> str:
    """A sentence on the drift of layout engine and of layout free; empty for other conversions."""
    if "free_layout" not in record or "drift" not in record:
        return ""
    other = record["free_layout"]
    engine = other.get("engine_kl", record["drift"]["kl"]["value"])
    after = f" after {other['steps']} steps of refinement" if "steps" in other else ""
    tried = len(other.get("layers", []))
    where = f" and with {tried} layers converted" if tried < len(record["drift"]["layers"]) and tried else ""
    return (
        f"layout engine drifts by a KL of {engine:.4f} nats, layout free would by {other['kl']:.4f} "
        f"(same split, same text{after}{where})"
    )
