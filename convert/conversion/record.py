"""The record of a conversion, ``kvfold.json``, which contains no dates, timings or paths: equal
requests produce equal bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from typing import Any

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.request import SELF


def get_package_versions() -> dict[str, str | None]:
    """The installed versions of the packages that affect a result; None means not installed."""
    packages = "kvfold", "torch", "transformers", "safetensors", "numpy"
    found = {name: next(iter(distributions(name=name)), None) for name in packages}
    return {name: package.version if package else None for name, package in found.items()}


def make_record(plan: Plan, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of ``kvfold.json``. ``measured`` contains the entries from a calibrated run, or
    is empty.

    A dry run, which reads no weights and so has no hash of the source, passes None.
    """
    hashed = {} if measured is None else {"sha256": plan.checkpoint.compute_model_digest()}
    origins = _map_origins(plan)
    measured = measured or {}
    return {
        "format": 4,
        "request": (
            plan.request.result_options()
            | ({} if plan.latent is None else {"layout": plan.latent.layout})
        ),
        "versions": get_package_versions(),
        "source": {
            "name": plan.checkpoint.origin,
            **hashed,
        },
        "attention": {"from": plan.source_kind, "to": plan.output.kind},
        "cache_elements": {
            "from": plan.cache_elements,
            "to": plan.output.cache_elements,
        },
        "engines": [asdict(verdict) for verdict in plan.engines],
        **measured,
        "tensors": {tensor.name: origins[tensor.name] for tensor in plan.output.tensors},
    }


def _map_origins(plan: Plan) -> dict[str, dict[str, Any]]:
    """Map each output tensor to its origin (``copied``, ``cast``, ... or the method) and its source
    tensors.
    """
    origins: dict[str, dict[str, Any]] = {}
    for tensor in plan.output.tensors:
        if tensor.source is not None:
            infos = [plan.checkpoint.tensors[name] for name in tensor.sources]
            changed = any(tensor.dtype != info.dtype for info in infos)
            kind = "cast" if changed else "copied"
            origins[tensor.name] = {
                "origin": kind if infos else "zeros",
                "from": list(tensor.sources),
            }
    # A computed tensor is from all that the transform of its layer reads.
    for computed, read in zip(plan.output.computed, plan.reads, strict=True):
        origins |= {
            name: {"origin": plan.request.resolved_method, "from": list(read)} for name in computed
        }
    return origins


def format_text_name(source: str) -> str:
    """The name of a calibration text as shown to users."""
    return re.sub(rf"(^| \+ ){SELF}(:[0-9.]+)?$", r"\1text that the source wrote itself", source)
