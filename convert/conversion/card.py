"""The model card of a converted checkpoint. It has no dates, timings or paths, so equal requests
give equal bytes.

Its commands load, serve, measure, further train and reproduce the checkpoint. They run in the
card's folder and have no placeholders to fill in.
"""

import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.files import portable_name
from kvfold.convert.checkpoint.folder import CARD, read_member
from kvfold.convert.checkpoint.hub import HUB_ID
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.judgment import loss_of, verdict_of
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import by_text, rank_sizes, text_name, versions
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.options import run_only, to_argv
from kvfold.convert.request import SELF, ConvertRequest
from kvfold.convert.signals import limited
from kvfold.convert.text.corpus import with_share

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

_CARD_SECONDS = 3.0
_CARD = """---
{front}
---

# {name}, {kind}

Converted from `{name}` by kvfold {version}: {before} attention became {kind}.

| | source | this checkpoint |
|---|---|---|
| attention | {before} | {kind} |
| KV-cache elements per token per layer | {cache_before} | {cache} |
{measured}{ranks}
## Use

{usage}
## Engines

The cache size is in KV-cache elements per token per layer, on one device.

| engine | serves it | cache | how, or why not |
|---|---|---|---|
{engines}

## How it was made

{method}.{refined}{polished}
{untouched} `kvfold.json` contains the request, the versions, a hash of the source's config and weights, and
the origin of each tensor. This command reproduces the checkpoint:

```sh
{command}
```
"""

_RANKS = """
| tensor-parallel ranks | source, elements per rank | this checkpoint |
|---|---|---|
{rows}
"""

_UNTOUCHED = "Everything else comes from the source, {rest}."
_TRAINED_ALL = "Everything else came from the source, but the uptraining changed it."
_TRAINED_ATTENTION = (
    "Everything else came from the source; the uptraining trained only the attention."
)

_REFINED = """
Then each layer's attention was refined to reproduce the source's residual stream on the calibration text,
without labels."""
_POLISHED = """
Then all converted attention was trained together for {steps} steps to reproduce the next-token
distributions of the source on this text, without labels."""

_LOAD = """Run in this folder:

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained(".", dtype="auto"{options})
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

_ABSORB = """
Before generating, let transformers decode directly from the latent cache. Its own code expands every cached token at
every step: at the shape of Llama-2-7B and a context of 8192 it decodes 0.3 tokens per second, 11.6 after `absorb`, and
the source 2.0 (docs/serving.md of kvfold; `kvfold bench {source} .` measures this model):

```python
from kvfold.attention import absorb

absorb(model)
```
"""

_UNKNOWN = """
`AutoModelForCausalLM` in transformers 5.23 does not support this stock class yet. Programs that load models with it
must register the class first:

```python
from transformers import AutoModelForCausalLM, Mistral4Config

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM)
```
"""

_OWN_CODE = """
No stock class supports this model: `{file}.py` builds the source's class and replaces its attention. Read
this file before you trust it. If kvfold is installed, its own copy can load the model without `trust_remote_code`; run
this first:

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
To train it a little further against its source{beside}, on a dataset from the hub (`pip install 'kvfold[train,data]'`):

```sh
kvfold uptrain . ../trained --teacher {source} --text HuggingFaceFW/fineweb-edu:sample-10BT --steps 1000
```
"""


def model_card(plan: Plan, record: Mapping[str, Any], drift: "DriftReport | None") -> str:
    """Return the text of README.md for the converted checkpoint; ``record`` is the content of its
    ``kvfold.json``.
    """
    request = plan.request
    # Tensors that no transform touches.
    rest = "byte for byte" if request.dtype == "auto" else f"stored as {request.dtype}"
    engines = []
    for verdict in plan.engines:
        engine = (
            f"{verdict.engine} {verdict.version}"
            f" ({'run' if verdict.ran else 'read in its sources, not run'})"
        )
        how = f"{verdict.how}; instead: `{verdict.instead}`" if verdict.instead else verdict.how
        engines.append(
            f"| {engine} | {'yes' if verdict.serves else 'no'} | {verdict.cache or ''} | {how} |"
        )
    ranks = [f"| {ranks} | {before} | {after} |" for ranks, before, after in rank_sizes(record)]
    polish = record.get("polish", {})
    untouched = _UNTOUCHED.format(rest=rest)
    return _CARD.format(
        front=front_matter(plan.checkpoint),
        name=plan.checkpoint.origin,
        version=versions()["kvfold"],
        before=plan.source_kind,
        kind=plan.layout.kind,
        cache_before=plan.cache_elements,
        cache=plan.layout.cache_elements,
        measured="" if drift is None else _measured(record, drift, source_name(plan)),
        ranks=_RANKS.format(rows="\n".join(ranks)) if ranks else "",
        usage=_usage(plan),
        engines="\n".join(engines),
        method=request.chosen_method.card,
        refined=_REFINED if request.refine else "",
        polished=("" if not polish.get("kept") else _POLISHED.format(steps=polish["kept"])),
        untouched=untouched,
        command=_repeating(plan),
    )


def front_matter(source: Checkpoint) -> str:
    """Return the card's metadata as YAML: the source's license and languages, and its base model on
    the hub.
    """
    import yaml
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    known: dict[str, Any] = {}
    try:
        block = REGEX_YAML_BLOCK.search(read_member(source.folder, CARD).decode())
        with limited(_CARD_SECONDS):  # YAML takes a minute for a few megabytes
            known = {} if block is None else dict(yaml.safe_load(block[2]))
    except (
        Exception
    ):  # no card, or no YAML in it, whatever its parser raises: no reason to stop a conversion
        pass

    def texts(name: str, sound: Callable[[str], object] = bool) -> str | list[str] | None:
        """Return the string or strings under ``name``; None for any other value, or if a string is
        not ``sound``.
        """
        value = known.get(name)
        found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        strings = [each for each in found if isinstance(each, str)]
        if not strings or not all(map(sound, strings)):
            return None
        return value if isinstance(value, str) else strings

    # Trainers write the path on the machine that trained a model as its base.
    base = source.hub_id or texts("base_model", HUB_ID.fullmatch)
    metadata = ModelCardData(
        base_model=base,
        # The other relations of the hub are adapter, merge and quantized.
        base_model_relation="finetune" if base else None,
        # The hub accepts codes of two or three letters, and two words.
        language=texts("language", re.compile("([a-z]{2,3}|code|multilingual)$").match),
        library_name="transformers",
        pipeline_tag=(
            "image-text-to-text"
            if source.config.get("model_type") in WRAPPERS
            else "text-generation"
        ),
        tags=["kvfold"],
        **{name: texts(name) for name in ("license", "license_name", "license_link")},
    )
    return str(metadata.to_yaml())


def _measured(record: Mapping[str, Any], drift: "DriftReport", source: str) -> str:
    """Return the measured rows of the card's table and a paragraph on the text used."""
    (before, after), margin, loss = drift.perplexities, drift.measured.excess_margin, ""
    if margin is not None and math.isfinite(drift.excess + margin):
        loss = (
            f"| excess loss, nats per token, 95 % interval | | {drift.excess:+.4f} ±"
            f" {margin:.4f} |\n"
        )
    return f"""| cache, bytes per token | {drift.source_cache_bytes} | {drift.student_cache_bytes} |
| perplexity | {before:.3f} | {after:.3f} |
{loss}| KL of next-token distributions, nats | | {drift.kl:.4f} |
| top-1 agreement | | {100 * drift.agreement:.1f} % |

Measured on {drift.sequences} x {drift.length} held-out tokens of {text_name(record["calibration"]["source"])}.
Verdict: {verdict_of(loss_of(drift))} (limits: docs/choosing.md of kvfold).
These tokens were not used for fitting, but groups, splits and steps were chosen by them, so the figures are slightly
optimistic. `kvfold drift {source} .`{_beside(source)} measures on text that played no part in any choice.
{by_text(record)}
{drift.positions_text()}
"""


def _usage(plan: Plan) -> str:

    experts = plan.result.experts
    code = plan.layout.code
    latent = plan.request.to == "mla"
    loader = "Mistral4ForCausalLM" if experts else "AutoModelForCausalLM"
    parts = [
        _LOAD.format(loader=loader, options="" if code is None else ", trust_remote_code=True")
    ]
    if code is not None:
        parts.append(_OWN_CODE.format(file=code.rpartition(".")[2]))
    if experts:
        parts.append(_UNKNOWN)
    if latent and code is None:
        parts.append(_ABSORB.format(source=source_name(plan)))
    # The table of engines says under which conditions they serve it.
    how = {verdict.engine: verdict.how for verdict in plan.engines if verdict.serves}
    commands = []
    if "vLLM" in how:
        backend = " --model-impl transformers" if "Transformers backend" in how["vLLM"] else ""
        commands.append(f"vllm serve .{backend}")
    if "SGLang" in how:
        commands.append("python -m sglang.launch_server --model-path .")
    if "llama.cpp" in how:
        # For MLA its flash attention rounds more than its plain one.
        exact = " --flash-attn off" if latent else ""
        commands += [
            "python convert_hf_to_gguf.py . --outfile model.gguf",
            f"llama-server -m model.gguf{exact}",
        ]
    if "mlx-lm" in how:
        commands.append("mlx_lm.server --model .")
    if commands:
        parts.append(_SERVE.format(commands="\n".join(commands)))
    # `kvfold uptrain` trains a plain model that writes text.
    if plan.checkpoint.config.get("model_type") not in WRAPPERS:
        source = source_name(plan)
        parts.append(_TRAIN.format(source=source, beside=_beside(source)))
    return "".join(parts)


def source_name(plan: Plan) -> str:
    """The source as a shell word for commands in the card's folder: a hub id with commit, or the
    folder next to it.
    """
    name = plan.checkpoint.origin
    return shlex.quote(name if plan.checkpoint.hub_id else f"../{name}")


def _beside(source: str) -> str:
    """Says where the folder ``source`` must be, for commands in the card's folder; empty for a hub
    id.
    """
    return " (whose folder must be next to this one)" if "../" in source else ""


def _repeating(plan: Plan) -> str:
    """The command that reproduces the checkpoint, with every option that affects it and differs
    from its default.
    """
    given = {
        name: value
        for name, value in plan.request.given().items()
        if name not in run_only(ConvertRequest)
    }
    if plan.request.calibration:
        # Files by their names alone: no path of this machine is in the card.
        named = [(text, with_share(text)[0]) for text in plan.request.calibration]
        given["calibration"] = tuple(
            (
                portable_name(Path(name)) + text.removeprefix(name)
                if name != SELF and Path(name).exists()
                else text
            )
            for text, name in named
        )
    return f"kvfold convert {source_name(plan)} {shlex.join(['converted', *to_argv(given)])}"


def trained_card(card: str, name: str, section: str, *, attention_only: bool) -> str:
    """Return the ``card`` of a checkpoint after uptraining: ``section`` first, then the card's
    earlier content.
    """
    front, title, rest = re.findall(r"\A(---\n.*?\n---\n)?\s*(#[^\n]*\n)?(.*)", card, re.DOTALL)[0]
    title = f"{title.rstrip()}, trained further" if title else f"# {name}"
    bytes_of_source = re.escape(_UNTOUCHED).replace(r"\{rest\}", "[^.]*")
    rest = re.sub(bytes_of_source, _TRAINED_ATTENTION if attention_only else _TRAINED_ALL, rest)
    rest = rest.replace("| source | this checkpoint |", "| source | before the uptraining |")
    before = f"\n## Before the uptraining\n\n{rest.strip()}\n" if rest.strip() else ""
    return f"{front}\n{title}\n\n{section.strip()}\n{before}".lstrip("\n")
