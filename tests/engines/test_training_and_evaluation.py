"""lm-eval and peft on results: they take a converted checkpoint for what it is, an ordinary
one.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import stock_model
from transformers import AutoTokenizer

RESULTS = ("gqa-2", "mla-free", "mla-engine")
TEXTS = (
    "The function returns the number of items in a list, or zero if the list is empty.",
    "She opened the letter slowly and read it twice.",
)
TASK = """task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def run(*call):
    done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@torch.no_grad()
def bits_per_byte(folder):
    """Of ``TEXTS``, each behind the token that lm-eval puts before a text: the first one, else the
    end token.
    """
    model = stock_model(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    nats = 0.0
    for text in TEXTS:
        ids = torch.tensor([[before, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        nats += torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"
        ).item()
    return nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("name", RESULTS)
def test_lm_eval_measures_what_transformers_does(name, made, python_with, tmp_path):
    python = python_with("KVFOLD_EVAL_PYTHON")
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "local.yaml").write_text(TASK.format(file=rows))
    model = f"pretrained={made(name)},dtype=float32"
    options = f"--model hf --tasks local --device cpu --batch_size 1 --include_path {tmp_path}"
    call = [python, "-m", "lm_eval", "run", "--model_args", model, *options.split()]
    run(*call, "--output_path", tmp_path / "found")
    found = json.loads(next((tmp_path / "found").rglob("*.json")).read_text())["results"]["local"]
    assert found["bits_per_byte,none"] == pytest.approx(bits_per_byte(made(name)), rel=1e-4)


@pytest.mark.parametrize("name", RESULTS)
def test_three_steps_with_peft(name, made, python_with, tmp_path):
    """Fails if a step does not lower the loss in the end, or if what peft merges and saves is
    another model.
    """
    script = Path(__file__).parent / "train_steps.py"
    run(python_with("KVFOLD_EVAL_PYTHON"), script, made(name), tmp_path / "losses.json")
    result = json.loads((tmp_path / "losses.json").read_text())
    assert result["losses"][-1] < result["losses"][0]
    assert result["apart"] < 1e-4


def test_scripts_run_alone():
    """The engines' scripts import nothing of kvfold: their Pythons do not have it."""
    recipes = Path(__file__).resolve().parents[2] / "recipes" / "serve"
    for script in recipes.glob("*.py"):
        code = f"import sys; sys.path.insert(0, {str(recipes)!r}); import {script.stem}"
        call = [sys.executable, "-S", "-c", code]
        subprocess.run(call, check=True)
