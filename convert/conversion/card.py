"""The model card of a converted checkpoint. It holds no dates, timings or paths: equal requests give equal bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import engine_cost, rank_sizes, text_name, versions
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.hub import parse_hub_id
from kvfold.convert.targets.engines import Verdict

_CARD = """---
{front}
---

# {name}, {kind}

Converted from `{name}` by kvfold {version}: {before} attention became {kind}.

| | source | this checkpoint |
|---|---|---|
| attention | {before} | {kind} |
| KV-cache elements per token per layer | {cached} | {cached_now} |
{measured}{ranks}
## Use

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```
{usage}
## Engines

Cache in KV-cache elements per token per layer, on one device.

| engine | serves it | cache | how, or why not |
|---|---|---|---|
{engines}

## How it was made

{method}.{refined}{polished}{made_of}
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

_UNKNOWN = """
`AutoModelForCausalLM` of transformers 5.23 does not know this stock class yet. One line tells it, for programs that
load by it:

```python
from transformers import AutoModelForCausalLM, Mistral4Config

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM)
```
"""

_METHODS = {
    "mean": "Keys and values are the mean of the heads that they replace (Ainslie et al., 2023); it needs uptraining",
    "first": "Each group keeps its first head (a baseline of Ainslie et al., 2023); it needs uptraining",
    "random": "Keys and values are drawn at random (a baseline of Ainslie et al., 2023); it must be trained before use",
    "principal": "Shared keys and values are principal components over text; queries and the output absorb the change",
    "svd": "Keys and values were factored by a singular value decomposition of their weights; it needs uptraining",
}


_REFINED = """
Then each layer's attention was refined to reproduce the source's residual stream on the calibration text, no labels."""
_POLISHED = """
Then all of it was trained together for {steps} steps to give the source's next-token distributions there, no labels."""


def _rest(plan: Plan) -> str:
    """How tensors that no transform touches are stored."""
    if plan.request.dtype != "auto":
        return f"stored as {plan.request.dtype}"
    return f"stored as {plan.layout.config['dtype']}" if plan.checkpoint.made_of else "byte for byte"


def _usage(plan: Plan) -> str:
    return (_UNKNOWN if plan.result.experts else "") + (_ABSORB if plan.request.to == "mla" else "")


def _engine_row(verdict: Verdict) -> str:
    evidence = "run" if verdict.ran else "read in its sources, not run"
    how = f"{verdict.how}; instead: `{verdict.instead}`" if verdict.instead else verdict.how
    serves = "yes" if verdict.serves else "no"
    return f"| {verdict.engine} {verdict.version} ({evidence}) | {serves} | {verdict.cache or ''} | {how} |"


def _measured(record: Mapping[str, Any]) -> str:
    """Rows of the card's table, and the text that they were measured on."""
    drift = record["drift"]
    perplexity, size = drift["perplexity"], drift["cache_bytes_per_token"]
    return f"""| cache, bytes per token | {size["source"]} | {size["student"]} |
| perplexity | {perplexity["source"]:.3f} | {perplexity["student"]:.3f} |
| KL of next-token distributions, nats | | {drift["kl"]["value"]:.4f} |
| top-1 agreement | | {100 * drift["agreement"]["value"]:.1f} % |

Measured on {drift["sequences"]} x {drift["length"]} held-out tokens of {text_name(record)}.
{engine_cost(record)}
"""


def _rank_table(record: Mapping[str, Any]) -> str:
    """The cache on tensor-parallel ranks, empty where the heads divide among none."""
    rows = [f"| {ranks} | {before} | {after} |" for ranks, before, after in rank_sizes(record)]
    heading = ["", "| tensor-parallel ranks | source, elements on each | this checkpoint |", "|---|---|---|"]
    return "\n".join([*heading, *rows, ""]) if rows else ""


def model_card(plan: Plan, record: Mapping[str, Any]) -> str:
    """README.md of the converted checkpoint; ``record`` is the content of its ``kvfold.json``."""
    return _CARD.format(
        front=front_matter(plan.checkpoint),
        name=plan.source_name,
        version=versions()["kvfold"],
        before=plan.source_kind,
        kind=plan.layout.kind,
        cached=plan.cache_elements,
        cached_now=plan.layout.cache_elements,
        measured=_measured(record) if "drift" in record else "",
        ranks=_rank_table(record),
        loader="Mistral4ForCausalLM" if plan.result.experts else "AutoModelForCausalLM",
        usage=_usage(plan),
        engines="\n".join(map(_engine_row, plan.engines)),
        method=_METHODS[plan.request.resolved_method],
        refined=_REFINED if plan.request.refine else "",
        polished=_POLISHED.format(steps=record["polish"]["kept"]) if record.get("polish", {}).get("kept") else "",
        made_of="".join(f"\nThe source: {line}." for line in plan.checkpoint.made_of),
        rest=_rest(plan),
    )


def front_matter(source: Checkpoint) -> str:
    """The card's metadata as YAML: the source's license, and the model on the hub that it is or comes from."""
    from huggingface_hub import ModelCardData

    known = card_metadata(source.folder)
    metadata = ModelCardData(
        base_model=source.hub_id or _hub_ids(known.get("base_model")),
        library_name="transformers",
        license=_texts(known.get("license")),
        license_name=_texts(known.get("license_name")),
        license_link=_texts(known.get("license_link")),
        tags=["kvfold"],
    )
    return str(metadata.to_yaml())


def card_metadata(folder: Path) -> dict[str, Any]:
    """The front matter of the model card in ``folder``, empty when there is none that parses."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except Exception:  # no card, or no YAML in it, whatever its parser raises: no reason to stop a conversion
        return {}


def _texts(value: Any) -> str | list[str] | None:
    """A string or a list of strings as it is, None for anything else."""
    if isinstance(value, list):
        return [item for item in value if isinstance(item, str)] or None
    return value if isinstance(value, str) else None


def _hub_ids(value: Any) -> str | list[str] | None:
    """``base_model`` as a card gives it, None if it is (as trainers write it) a path on the machine that trained it."""
    texts = _texts(value)
    names = [texts] if isinstance(texts, str) else texts or []
    return texts if names and all(parse_hub_id(name) for name in names) else None
