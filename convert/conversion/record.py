"""Build ``kvfold.json``, the record of a conversion. It has no dates, timings or local paths, so
equal requests give equal bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from typing import Any

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.request import SELF


def get_package_versions() -> dict[str, str | None]:
    """Return the installed version of each package that affects a conversion's result, by name;
    None if a package is not installed.
    """
    packages = "kvfold", "torch", "transformers", "safetensors", "numpy"
    return {
        name: next((package.version for package in distributions(name=name)), None)
        for name in packages
    }


def make_record(plan: Plan, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of ``kvfold.json``. ``measured`` has the entries of a calibrated run; it
    is empty for a run without text, and None for a dry run.

    The record of a dry run has no SHA-256 of the source, because no weights are read.
    """
    source = {"name": plan.checkpoint.origin}
    if measured is not None:
        source["sha256"] = plan.checkpoint.compute_model_digest()
    return {
        "format": 4,
        "request": (
            plan.request.collect_result_options()
            | ({} if plan.mla_spec is None else {"layout": plan.mla_spec.layout})
        ),
        "versions": get_package_versions(),
        "source": source,
        "attention": {"from": plan.source_kind, "to": plan.output.kind},
        "cache_elements": {
            "from": plan.cache_elements,
            "to": plan.result.count_cache_elements(),
        },
        "engines": [asdict(verdict) for verdict in plan.engines],
        **(measured or {}),
        "tensors": _map_tensors_to_origins(plan),
    }


def _map_tensors_to_origins(plan: Plan) -> dict[str, dict[str, Any]]:
    """Map each output tensor to how it came about (``copied``, ``cast``, ``zeros``, or the method
    that computed it), and to the source tensors it came from.
    """
    # A computed tensor is from all that the transform of its layer reads.
    reads = {
        name: read
        for names, read in zip(plan.output.computed_names, plan.reads, strict=True)
        for name in names
    }
    origins = {}
    for tensor in plan.output.tensors:
        sources = reads.get(tensor.name, tensor.sources)
        if tensor.source is None:
            origin = plan.request.resolved_method
        elif not sources:
            origin = "zeros"
        else:
            dtypes = {plan.checkpoint.tensors[name].dtype for name in sources}
            origin = "copied" if dtypes == {tensor.dtype} else "cast"
        origins[tensor.name] = {"origin": origin, "from": list(sources)}
    return origins


def describe_calibration_text(name: str) -> str:
    """Return the name of a calibration text for users. Text that the source model generated is
    described in words.
    """
    return re.sub(rf"(^| \+ ){SELF}(:[0-9.]+)?$", r"\1text that the source wrote itself", name)
