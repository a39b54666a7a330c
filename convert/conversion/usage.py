"""The commands on a model card: how to load, serve, measure, train further and repeat what it describes.

They are to be run in the card's own folder, so that none has a place to fill in; no path of this machine is in them.
"""

import shlex
from pathlib import Path

from kvfold.convert.checkpoint.json_text import portable_name
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.options import command_words, run_only
from kvfold.convert.request import SELF, ConvertRequest

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
