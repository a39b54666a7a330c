"""The record of a conversion: ``kvfold.json``, and the summary on the terminal.

``kvfold.json`` holds no dates, timings or paths, so that equal requests give equal bytes.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kvfold.convert import processes
from kvfold.convert.conversion.memory import free_bytes, free_disk, needs_of
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.request import SELF
from kvfold.convert.sizes import bytes_text
from kvfold.convert.targets.engines import folded_result

_SHOWN_FILES = 20
_SERVED = "served by (versions and evidence: kvfold.json)"
_PACKAGES = ("kvfold", "torch", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide a result, None for one that is not installed."""
    found = {package: next(iter(distributions(name=package)), None) for package in _PACKAGES}
    return {package: None if each is None else each.version for package, each in found.items()}


def record(plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``kvfold.json``; ``measured`` are the entries of a calibrated run (empty without one)."""
    origins = _origins(plan)
    return {
        "format": 3,
        "request": plan.request.result_options() | ({} if plan.latent is None else {"layout": plan.latent.layout}),
        "versions": versions(),
        "source": {
            "name": plan.checkpoint.origin,
            "sha256": plan.checkpoint.source_hash(),
            **({"made_of": list(plan.made_of)} if plan.made_of else {}),
        },
        "attention": {"from": plan.source_kind, "to": plan.layout.kind},
        "cache_elements_per_token_per_layer": {"from": plan.cache_elements, "to": plan.layout.cache_elements},
        "cache_elements_per_rank": {"from": folded_result(plan.model).per_rank(), "to": plan.result.per_rank()},
        "engines": [asdict(verdict) for verdict in plan.engines],
        **({"padding_parameters": plan.padding} if plan.padding else {}),
        **measured,
        "tensors": {tensor.name: origins[tensor.name] for tensor in plan.tensors},
    }


def _origins(plan: Plan) -> dict[str, dict[str, Any]]:
    """Origin of every output tensor (``copied``, ``cast``, ... or the method), and the source tensors it is from."""
    origins: dict[str, dict[str, Any]] = {}
    for tensor in plan.tensors:
        if not tensor.computed:
            infos = [tensor.kept or plan.checkpoint.tensors[name] for name in tensor.sources]
            changed = any(tensor.dtype != info.dtype for info in infos)
            kind = next((info.made for info in infos if info.made), "cast" if changed else "copied")
            origins[tensor.name] = {"origin": kind if infos else "zeros", "from": list(tensor.sources)}
    # A computed tensor is from all that the transform of its layer reads.
    for computed, read in zip(plan.layout.computed, plan.reads, strict=True):
        origins |= {name: {"origin": plan.request.resolved_method, "from": list(read)} for name in computed}
    return origins


def headline(plan: Plan) -> str:
    """The conversion in a line: source, target, method, and the cache of both."""
    saved = 1 - plan.layout.cache_elements / plan.cache_elements
    return (
        f"{plan.checkpoint.origin}: {plan.source_kind} -> {plan.layout.kind}, method {plan.request.resolved_method}: "
        f"{plan.cache_elements} -> {plan.layout.cache_elements} KV-cache elements per token per layer "
        f"({100 * abs(saved):.1f} % {'more' if saved < 0 else 'less'})"
    )


def summary_text(plan: Plan, record: Mapping[str, Any], written: Path, seconds: float) -> str:
    """The conversion in a line, its cost and what was chosen, what was written, and what to do next."""
    request, size = plan.request, sum(tensor.nbytes for tensor in plan.tensors)
    compare = shlex.join(["kvfold", "drift", str(request.model), str(request.out)])
    lines = [
        headline(plan),
        cost_text(record),
        chosen_text(plan, record),
        groups_text(plan, record),
        ranks_text(record),
        padding_text(plan),
        engine_cost(record),
        f"wrote {written}: {bytes_text(size)} in {seconds:.1f} s",
        _SERVED,
        *(f"  {verdict.to_text()}" for verdict in plan.engines),
        f"next: {compare} --text FILE measures it on text of yours",
    ]
    return "\n".join(filter(None, lines))


def cost_text(record: Mapping[str, Any]) -> str:
    """The cost of the conversion on held-out text, in a line; empty where nothing was measured."""
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
    """The split that a budget got, among how many, and why it is not the best; empty where the request named it."""
    if plan.request.budget is None or plan.latent is None or "splits" not in record:
        return ""
    split = f"{plan.latent.kv_rank}+{plan.latent.rope_dim}"
    took = f"--budget {plan.request.budget}: took {split} of {len(record['splits'])} splits tried"
    if (taken := record.get("preferred_for_engines")) is None:
        return f"{took}, which drifts least"
    best, engines = taken["instead_of"], " and ".join(taken["engines"])
    return (
        f"{took}, because {engines} would not serve the best: a KL of {taken['kl']:.4f} nats on held-out text; the "
        f"best, {best['kv_rank']}+{best['rope_dim']}, has {best['kl']:.4f}"
    )


def groups_text(plan: Plan, record: Mapping[str, Any]) -> str:
    """The heads that share, and why, in a line; empty where there was nothing to choose: for MQA all of them do."""
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
            f"heads that share: others than neighbors in {len(moved)} of {len(layers)} layers, such as {example} in "
            f"layer {moved[0]}; each layer took the grouping tried whose attention errs least on held-out text (all: "
            "kvfold.json)"
        )
    why = "where no other grouping tried errs less on held-out text"
    if request.group == "contiguous":
        why = "as --group contiguous asks"
    elif not request.chosen_method.reads_text:
        why = f"as --method {request.resolved_method} joins them"
    elif request.group is None and plan.geometry.kv_heads < plan.geometry.heads:
        why = "for heads that share already were trained to (--group similar compares others)"
    return f"heads that share: neighbors in every layer, {why}"


def rank_sizes(record: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Numbers of tensor-parallel ranks that both models divide among, and the cached elements of both on each."""
    before, after = (record.get("cache_elements_per_rank", {}).get(name, {}) for name in ("from", "to"))
    return [(ranks, before[ranks], after[ranks]) for ranks in before if ranks in after and ranks != "1"]


def ranks_text(record: Mapping[str, Any]) -> str:
    """The cache on each tensor-parallel rank, in a line."""
    if not (sizes := rank_sizes(record)):
        return "tensor parallelism: the heads divide among no number of ranks but 1"
    parts = ", ".join(f"{before} -> {after} on each of {ranks}" for ranks, before, after in sizes)
    return f"tensor parallelism, elements per token per layer: {parts} ranks"


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


def plan_text(plan: Plan) -> str:
    """The output of ``--dry-run``: tensors to compute, files, memory and disk space."""
    request, before, needs = plan.request, plan.checkpoint.tensors, needs_of(plan, processes.count())
    # No shape of a split that is yet to be chosen.
    open_split = request.budget is not None
    lines = [headline(plan), *(f"source: {line}" for line in plan.made_of)]
    if plan.keepable and not request.keep_quantized:
        lines.append(f"--keep-quantized would keep {plan.keepable} of these weights as they are stored")
    if plan.padding and not open_split:
        lines.append(padding_text(plan))
    computed = sum(map(len, plan.layout.computed))
    lines.append(f"tensors: {len(plan.tensors) - computed} copied, {computed} computed; in layer 0:")
    for tensor in plan.layout.tensors:
        if tensor.name in plan.layout.computed[0]:
            present = "x".join(map(str, before[tensor.name].shape)) if tensor.name in before else "new"
            shape = "" if open_split else f" -> {'x'.join(map(str, tensor.shape))}"
            lines.append(f"  {tensor.name}  {tensor.dtype} {present}{shape}")
    lines.append(f"files: {len(plan.shards)}" + (" (sizes depend a little on the split)" if open_split else ""))
    shown = {shard.file: sum(tensor.nbytes for tensor in shard.tensors) for shard in plan.shards[:_SHOWN_FILES]}
    lines += [f"  {file}  {bytes_text(size)}" for file, size in shown.items()]
    if len(plan.shards) > _SHOWN_FILES:
        lines.append(f"  ... and {len(plan.shards) - _SHOWN_FILES} more")
    each, free = " per process" if processes.count() > 1 else "", free_bytes(plan)
    found = "" if free is None else f", {bytes_text(free)} free"
    lines += [
        _SERVED,
        *(f"  {verdict.to_text()}" for verdict in plan.engines),
        f"disk: {bytes_text(needs.disk)} needed, {bytes_text(free_disk(plan))} free",
        f"memory: about {bytes_text(needs.memory)} needed{each}{found}",
    ]
    if needs.spilled:
        lines.append(f"disk for --spill: about {bytes_text(needs.spilled)}{each}")
    return "\n".join([*lines, "nothing was written (--dry-run)"])


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
