"""The model card of a converted checkpoint. It holds no dates, timings or paths: equal requests give equal bytes.

Its commands load, serve, measure, train further and repeat what it describes. They run in the card's folder, so that
there is nothing to fill in.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.hub import parse_hub_id
from kvfold.convert.checkpoint.json_text import portable_name
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import engine_cost, rank_sizes, text_name, versions
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.options import command_words, run_only
from kvfold.convert.request import SELF, ConvertRequest
from kvfold.convert.targets.engines import Verdict

_CARD = """---
{front}
---

# {name}, {kind}

Converted from `{name}` by kvfold {version}: {before} attention became {kind}.

| | source | this checkpoint |
|---|---|---|
| attention | {before} | {kind} |
{cache}{measured}{ranks}
## Use

{usage}
## Engines

Cache in KV-cache elements per token per layer, on one device.

| engine | serves it | cache | how, or why not |
|---|---|---|---|
{engines}

## How it was made

{method}.{refined}{polished}{made_of}
{untouched} `kvfold.json` holds the request, the versions, a hash of the source and where
each tensor came from. The command that makes it again:

```sh
{command}
```
"""

_UNTOUCHED = "Everything else is the source's, {rest}."
_TRAINED_ALL = "Everything else was the source's before the uptraining, which changed it."
_TRAINED_ATTENTION = "Everything else was the source's before the uptraining, which trained the attention alone."
_BEFORE = "## Before the uptraining"

_REFINED = """
Then each layer's attention was refined to reproduce the source's residual stream on the calibration text, no labels."""
_POLISHED = """
Then all of it was trained together for {steps} steps to give the source's next-token distributions there, no labels."""

_TRAINING_TEXT = "HuggingFaceFW/fineweb-edu:sample-10BT"

_LOAD = """Run in this folder:

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained(".", dtype="auto"{options})
tokenizer = AutoTokenizer.from_pretrained(".")
```
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

_OWN_CODE = """
No stock class holds this model: `{file}.py` builds the source's class and changes its attention. Read it
before you trust it. Without `trust_remote_code` kvfold's own copy loads the model, where it is installed and this runs
first:

```python
from kvfold.attention import register_models

register_models()
```
"""

_SERVE = """
To serve it from this folder:

```sh
{commands}
```
"""

_TRAIN = """
To train it a little further against its source{beside}, on a dataset of the hub (`pip install 'kvfold[train,data]'`):

```sh
kvfold uptrain . ../trained --teacher {source} --text {text} --steps 1000
```
"""


def _rest(plan: Plan) -> str:
    """How tensors that no transform touches are stored."""
    if plan.request.dtype != "auto":
        return f"stored as {plan.request.dtype}"
    if plan.request.keep_quantized:
        return f"{plan.keepable} weights quantized as it has them, byte for byte, and the rest in bfloat16"
    return f"stored as {plan.layout.config['dtype']}" if plan.checkpoint.made_of else "byte for byte"


def _engine_row(verdict: Verdict) -> str:
    evidence = "run" if verdict.ran else "read in its sources, not run"
    how = f"{verdict.how}; instead: `{verdict.instead}`" if verdict.instead else verdict.how
    serves = "yes" if verdict.serves else "no"
    return f"| {verdict.engine} {verdict.version} ({evidence}) | {serves} | {verdict.cache or ''} | {how} |"


def _measured(record: Mapping[str, Any], source: str) -> str:
    """Rows of the card's table, and the text that they were measured on."""
    drift = record["drift"]
    both, size = drift["perplexity"], drift["cache_bytes_per_token"]
    return f"""| cache, bytes per token | {size["source"]} | {size["student"]} |
| perplexity | {both["source"]:.3f} | {both["student"]:.3f} |
{_excess_row(drift["excess"])}| KL of next-token distributions, nats | | {drift["kl"]["value"]:.4f} |
| top-1 agreement | | {100 * drift["agreement"]["value"]:.1f} % |

Measured on {drift["sequences"]} x {drift["length"]} held-out tokens of {text_name(record)}.
These were kept aside from what was fitted, but they also chose among groups, splits and steps: the figures flatter a
little. `kvfold drift {source} .` measures on text that chose nothing.
{engine_cost(record)}
"""


def _excess_row(excess: Mapping[str, Any]) -> str:
    if excess["value"] is None or excess["margin"] is None:
        return ""
    return f"| excess loss, nats per token, 95 % interval | | {excess['value']:+.4f} ± {excess['margin']:.4f} |\n"


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
        cache=f"| KV-cache elements per token per layer | {plan.cache_elements} | {plan.layout.cache_elements} |\n",
        measured=_measured(record, source_name(plan)) if "drift" in record else "",
        ranks=_rank_table(record),
        usage=usage(plan),
        engines="\n".join(map(_engine_row, plan.engines)),
        method=plan.request.chosen_method.card,
        refined=_REFINED if plan.request.refine else "",
        polished=_POLISHED.format(steps=record["polish"]["kept"]) if record.get("polish", {}).get("kept") else "",
        made_of="".join(f"\nThe source: {line}." for line in plan.checkpoint.made_of),
        untouched=_UNTOUCHED.format(rest=_rest(plan)),
        command=repeating(plan),
    )


def trained_card(card: str, name: str, section: str, *, attention_only: bool) -> str:
    """The ``card`` of a converted checkpoint after uptraining: the trained model first, then what it was made from.

    ``section`` tells of the training. Bytes are no longer said to be the source's.
    """
    found = re.match(r"(---\n.*?\n---\n)?\s*(#[^\n]*\n)?(.*)", card, re.DOTALL)
    front, title, rest = ("", "", card) if found is None else (found[1] or "", found[2] or "", found[3])
    title = f"{title.rstrip()}, trained further" if title else f"# {name}"
    bytes_of_source = re.escape(_UNTOUCHED).replace(r"\{rest\}", "[^.]*")
    rest = re.sub(bytes_of_source, _TRAINED_ATTENTION if attention_only else _TRAINED_ALL, rest)
    rest = rest.replace("| source | this checkpoint |", "| source | before the uptraining |")
    before = f"\n{_BEFORE}\n\n{rest.strip()}\n" if rest.strip() else ""
    return f"{front}\n{title}\n\n{section.strip()}\n{before}".lstrip("\n")


def front_matter(source: Checkpoint) -> str:
    """The card's metadata as YAML: the source's license and languages, and the model on the hub that it comes from."""
    from huggingface_hub import ModelCardData

    known = card_metadata(source.folder)
    base = source.hub_id or _hub_ids(known.get("base_model"))
    metadata = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,  # the hub's others: adapter, merge, quantized
        language=_languages(known.get("language")),
        library_name="transformers",
        pipeline_tag=_task(source.config),
        tags=["kvfold"],
        **{name: _texts(known.get(name)) for name in ("license", "license_name", "license_link")},
    )
    return str(metadata.to_yaml())


def _task(config: Mapping[str, Any]) -> str:
    """The hub's name of what a model of ``config`` does."""
    return "image-text-to-text" if config.get("model_type") in WRAPPERS else "text-generation"


def card_metadata(folder: Path) -> dict[str, Any]:
    """The front matter of the model card in ``folder``, empty when there is none that parses."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except Exception:  # no card, or no YAML in it, whatever its parser raises: no reason to stop a conversion
        return {}


def _languages(value: Any) -> str | list[str] | None:
    """Codes of languages as the hub takes them: two or three letters, or one of its two words; None for others."""
    texts = _texts(value)
    names = [texts] if isinstance(texts, str) else texts or []
    return texts if names and all(re.fullmatch("[a-z]{2,3}|code|multilingual", name) for name in names) else None


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


def usage(plan: Plan) -> str:
    """How to load the result, decode quickly, serve it and train it further."""
    experts, own_code = plan.result.experts, plan.layout.code is not None
    latent = plan.request.to == "mla" and not own_code
    loader = "Mistral4ForCausalLM" if experts else "AutoModelForCausalLM"
    parts = [
        _LOAD.format(loader=loader, options=", trust_remote_code=True" if own_code else ""),
        _OWN_CODE.format(file=plan.layout.code.rpartition(".")[2]) if plan.layout.code is not None else "",
        _UNKNOWN if experts else "",
        _ABSORB if latent else "",
        _SERVE.format(commands=served) if (served := _serving(plan)) else "",
        _training(plan) if _trains(plan) else "",
    ]
    return "".join(parts)


def _training(plan: Plan) -> str:
    beside = "" if plan.checkpoint.hub_id else ", whose folder lies beside this one"
    return _TRAIN.format(source=source_name(plan), text=_TRAINING_TEXT, beside=beside)


def _trains(plan: Plan) -> bool:
    """Whether `kvfold uptrain` takes the result: a plain model that writes text, of dense weights."""
    wrapper = plan.checkpoint.config.get("model_type") in WRAPPERS
    return not wrapper and not plan.request.keep_quantized


def _serving(plan: Plan) -> str:
    """The command of every engine that serves the result; the table of engines says under which conditions."""
    latent = plan.request.to == "mla"
    lines = []
    for verdict in plan.engines:
        if not verdict.serves:
            continue
        if verdict.engine == "vLLM":
            lines.append(
                "vllm serve ." + (" --model-impl transformers" if "Transformers backend" in verdict.how else "")
            )
        elif verdict.engine == "SGLang":
            lines.append("python -m sglang.launch_server --model-path .")
        elif verdict.engine == "llama.cpp":
            exact = " --flash-attn off" if latent else ""  # its flash attention rounds more than its plain one
            lines += ["python convert_hf_to_gguf.py . --outfile model.gguf", f"llama-server -m model.gguf{exact}"]
        elif verdict.engine == "mlx-lm":
            lines.append("mlx_lm.server --model .")
    return "\n".join(lines)


def source_name(plan: Plan) -> str:
    """The source as a word of a command in this folder: its hub id and commit, or its folder beside this one."""
    return shlex.quote(plan.source_name if plan.checkpoint.hub_id else f"../{plan.source_name}")


def repeating(plan: Plan) -> str:
    """The command that makes the same checkpoint again: every option that decides it and is not at its default."""
    given = {name: value for name, value in plan.request.given().items() if name not in run_only(ConvertRequest)}
    if plan.request.texts:  # files by their names alone
        named = tuple(
            portable_name(Path(text)) if text != SELF and Path(text).exists() else text for text in plan.request.texts
        )
        given["calibration"] = named
    return f"kvfold convert {source_name(plan)} {shlex.join(['converted', *command_words(given)])}"
