"""The stored tensors of a checkpoint by the names of its model's class.

Stock transformers also reads files that name their tensors in other ways: without the prefix of the
base model, a tied head in place of the embedding, all experts of a layer in one tensor, and with
tensors that the class does not load.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvfold.convert.families.model import Model

# Heads that predict several tokens ahead, whose names have a component such as ``mtp_layers``
_PREDICTION_HEAD = re.compile(r"(^|\.)mtp[._]")


def match_stored_tensors(model: Model, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``stored`` (a `TensorInfo` for each name in the files) by the names of the model's
    class, in the order of the files. Names that nothing explains stay as they are.

    A tensor of all experts becomes one `TensorInfo` per expert, each a range of the stored bytes.
    """
    family = model.family
    prefix = family.prefix
    if model.tower is None and not any(name.startswith(prefix) for name in stored):
        heads = {spec.name for spec in family.tensors.values() if not spec.name.startswith(prefix)}
        stored = {name if name in heads else prefix + name: info for name, info in stored.items()}
    renamed = dict(_list_other_names(model, stored))
    matched: dict[str, Any] = {}
    for name, info in stored.items():
        names = (name,) if name in model.tensors else renamed.get(name, (name,))
        if len(names) == 1:
            matched[names[0]] = info
            continue
        shapes = [model.tensors[part].shape for part in names]
        sizes = sum(map(math.prod, shapes)), shapes[0][-1]
        if (math.prod(info.shape), info.shape[-1]) != sizes:
            matched[name] = info
            continue
        step = info.nbytes // len(names)
        for at, (part, shape) in enumerate(zip(names, shapes, strict=True)):
            start = info.start + at * step
            matched[part] = replace(info, name=part, shape=shape, start=start, end=start + step)
    return matched


def _list_other_names(
    model: Model, stored: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each name in the files that differs from the class's names, and the class's names of
    the tensors that it contains, in order.
    """
    embedding = model.list_names("embedding")
    head = model.family.tensors.get("head")
    if head is not None:
        tied = model.block.tied and embedding[0] not in stored
        # transformers 5 calls every head lm_head unless it is told to keep the original format
        for name in (head.name, "lm_head.weight"):
            yield name, embedding if tied else (head.name,)
    # and saves all experts of a layer together
    root = model.family.attention.module.partition("{layer}")[0]
    for layer in range(model.geometry.layers):
        gates = model.list_names("expert_gate", layer)
        pairs = zip(gates, model.list_names("expert_up", layer), strict=True)
        gates_and_ups = tuple(name for pair in pairs for name in pair)
        router = model.list_names("router", layer)
        downs = model.list_names("expert_down", layer)
        parts = {
            "gate.weight": router,
            "router.weight": router,
            "experts.gate_up_proj": gates_and_ups or model.list_names("experts_gate_up", layer),
            "experts.down_proj": downs or model.list_names("experts_down", layer),
        }
        for suffix, targets in parts.items():
            if targets:
                yield f"{root}{layer}.mlp.{suffix}", targets
                yield f"{root}{layer}.block_sparse_moe.{suffix}", targets


def list_unused_tensors(model: Model, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the stock class leaves unread: of layers beyond the number in
    config.json, and of heads that predict several tokens ahead.
    """
    root = re.escape(model.family.attention.module.partition("{layer}")[0])
    unused = []
    for name in names:
        if name in model.tensors or not name.startswith(model.tower or ""):
            continue
        layer = re.match(rf"{root}(\d{{1,9}})\.", name)
        beyond = layer is not None and int(layer[1]) >= model.geometry.layers
        if beyond or _PREDICTION_HEAD.search(name):
            unused.append(name)
    return unused
