"""What a conversion tells: ``kvfold.json``, the model card, and the lines on the terminal. Pure formatting.

``kvfold.json`` and the card hold no dates, timings or paths, so that equal requests give equal bytes.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.sizes import bytes_text

_PACKAGES = ("kvfold", "torch", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Installed versions of what decides a result."""

    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: found(package) for package in _PACKAGES}


def record(plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``kvfold.json``; ``measured`` holds what calibration and drift found (empty without them)."""
    return {
        "format": 1,
        "request": plan.request.result_options(),
        "versions": versions(),
        "source": {"name": plan.source_name, "sha256": plan.checkpoint.source_hash()},
        "attention": {"from": plan.source_kind, "to": plan.layout.kind},
        "numbers_cached_per_token_and_layer": {"from": plan.numbers_cached, "to": plan.layout.numbers_cached},
        **measured,
        "tensors": {name: {"origin": kind, "from": list(names)} for name, (kind, names) in plan.origins().items()},
    }


def saving(plan: Plan) -> float:
    """The share of the cache that the target saves, 0 to 1."""
    return 1 - plan.layout.numbers_cached / plan.numbers_cached


def headline(plan: Plan) -> str:
    return (
        f"{plan.source_name}: {plan.source_kind} -> {plan.layout.kind}, method {plan.request.resolved_method}: "
        f"{plan.numbers_cached} -> {plan.layout.numbers_cached} numbers cached per token and layer "
        f"({100 * saving(plan):.1f} % less)"
    )


def plan_text(plan: Plan) -> str:
    """What ``--dry-run`` prints: what would be computed, the files, and the disk space."""
    computed = {name for names in plan.layout.computed for name in names}
    first = [tensor for tensor in plan.layout.tensors if tensor.name in plan.layout.computed[0]]
    before = plan.checkpoint.tensors
    lines = [
        headline(plan),
        f"tensors: {len(plan.layout.tensors) - len(computed)} copied, {len(computed)} computed; in layer 0:",
        *(
            f"  {t.name}  {t.dtype} {_shape(before[t.name].shape) if t.name in before else 'new'} -> {_shape(t.shape)}"
            for t in first
        ),
        f"files: {len(plan.shards)}",
        *(f"  {shard.file}  {bytes_text(sum(t.nbytes for t in shard.tensors))}" for shard in plan.shards[:20]),
        *([f"  ... and {len(plan.shards) - 20} more"] if len(plan.shards) > 20 else []),
        f"disk: {bytes_text(plan.disk_bytes)} needed, {bytes_text(plan.free_bytes)} free",
        "nothing was written (--dry-run)",
    ]
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


_CARD = """---
{front}---

# {name}, {kind}

Converted from `{name}` by kvfold {version}: {before} attention became {kind}.

| | source | this checkpoint |
|---|---|---|
| attention | {before} | {kind} |
| numbers cached per token and layer | {cached} | {cached_now} |
{measured}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```
{usage}
## How it was made

{method}.{refined}
Everything else is the source's, {rest}. `kvfold.json` holds the request, the versions, a hash of the source and where
each tensor came from.
"""

_ABSORB = """
Stock transformers expands every cached token at every step. To decode over the latent cache itself:

```python
from kvfold.attention import absorb

absorb(model)
```
"""

_ENGINES = """
Inference engines read this layout as a DeepSeek model whose layers are all dense (read off their sources, not run
here): vLLM accepts one from 0.11.1 on (0.11.0 raises an error); SGLang makes layers dense by `first_k_dense_replace`
(0.4.6 and 0.5.5 do); llama.cpp's loader (at 01a723dc630d) asks for a query latent too: convert with `--q-rank` for it.
"""

_METHODS = {
    "mean": "Keys and values are the mean of the heads they replace (Ainslie et al., 2023); it needs uptraining",
    "first": "Each group keeps its first head (a baseline of Ainslie et al., 2023); it needs uptraining",
    "random": "Keys and values are freshly drawn (a baseline of Ainslie et al., 2023); it must be trained before use",
    "principal": "Shared keys and values are principal components over text; queries and the output absorb the change",
    "svd": "Keys and values were factored by a singular value decomposition of their weights; it needs uptraining",
}


_REFINED = """
Then each layer's attention was refined to reproduce the source's residual stream on the calibration text, no labels."""


def _usage(plan: Plan) -> str:
    if plan.request.to != "mla":
        return ""
    return _ABSORB + (_ENGINES if plan.request.layout == "engine" else "")


def engine_cost(found: Mapping[str, Any]) -> str:
    """What the engine layout costs against the deepseek layout, as a sentence; empty for other conversions."""
    if "deepseek_layout" not in found or "drift" not in found:
        return ""
    other = found["deepseek_layout"]
    engine = other.get("engine_kl", found["drift"]["kl"]["value"])
    after = f" after {other['steps']} steps of refinement" if "steps" in other else ""
    return (
        f"layout engine drifts by a KL of {engine:.4f} nats, layout deepseek would by {other['kl']:.4f} "
        f"(same split, same text{after})"
    )


def _measured(found: Mapping[str, Any]) -> str:
    """Rows of the card's table, and what they were measured on."""
    drift, text = found["drift"], found["calibration"]
    perplexity, size = drift["perplexity"], drift["cache_bytes_per_token"]
    return f"""| cache, bytes per token | {size["source"]} | {size["student"]} |
| perplexity | {perplexity["source"]:.3f} | {perplexity["student"]:.3f} |
| KL of next-token distributions, nats | | {drift["kl"]["value"]:.4f} |
| same most likely token | | {100 * drift["agreement"]["value"]:.1f} % |

Measured on {drift["sequences"]} x {drift["length"]} tokens of {text["source"]} that were kept out of the calibration.
{engine_cost(found)}
"""


def model_card(plan: Plan, license_id: str | None, found: Mapping[str, Any]) -> str:
    """README.md of the converted checkpoint; ``found`` is the content of its ``kvfold.json``."""
    front = "library_name: transformers\n" + (f"license: {license_id}\n" if license_id else "") + "tags:\n- kvfold\n"
    return _CARD.format(
        front=front,
        name=plan.source_name,
        version=versions()["kvfold"],
        before=plan.source_kind,
        kind=plan.layout.kind,
        cached=plan.numbers_cached,
        cached_now=plan.layout.numbers_cached,
        measured=_measured(found) if "drift" in found else "",
        usage=_usage(plan),
        method=_METHODS[plan.request.resolved_method],
        refined=_REFINED if plan.request.refine else "",
        rest="byte for byte" if plan.request.dtype == "auto" else f"stored as {plan.request.dtype}",
    )
