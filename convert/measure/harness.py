"""Tasks of lm-evaluation-harness (Gao et al., 2024), paired by document. Needs the extra ``eval``."""

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, tensor

from kvfold.convert.errors import InputError, one_line

# What the harness names by their mean over all texts: the name and unit of one text's share of it
_LOSSES = {
    "bits_per_byte": ("bits_per_byte", -1 / math.log(2)),
    "byte_perplexity": ("nats_per_byte", -1.0),
    "word_perplexity": ("nats_per_word", -1.0),
}

Scores = dict[tuple[str, str], dict[str, float]]  # (task, metric) -> document -> value


def check_harness() -> None:
    """Raises InputError when lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError(
            "--tasks: needs lm-evaluation-harness, which is not installed: pip install 'kvfold[eval]'; without --tasks "
            "the long-context checks run alone"
        )


def scores(model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None, batch: int, seed: int) -> Scores:
    """Every number that the harness gives for a document of ``tasks``. Raises InputError for an unknown task."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    try:
        done = lm_eval.simple_evaluate(
            model=wrapped, tasks=[_task(name) for name in tasks], limit=limit, log_samples=True, bootstrap_iters=0,
            random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed, fewshot_random_seed=seed,
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise InputError(f"--tasks {','.join(tasks)}: the harness refuses them: {one_line(error)[:300]}") from error
    return document_scores(done["samples"])


def _task(name: str) -> str | dict[str, Any]:
    """The name of a task of the harness, or what a .yaml file says of one's own."""
    if Path(name).suffix != ".yaml":
        return name
    import yaml

    try:
        described = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--tasks {name}: expected a task in YAML, found: {one_line(error)[:200]}") from error
    if not isinstance(described, dict):
        raise InputError(f"--tasks {name}: expected a task in YAML, found a {type(described).__name__}")
    return described


def document_scores(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Scores:
    """The numbers of every document. Of a text the harness gives log-likelihood and length in words or bytes."""
    found: Scores = {}
    for task, documents in samples.items():
        for document in documents:
            for metric in document.get("metrics", ()):
                value = document.get(metric)
                name = metric
                if isinstance(value, (tuple, list)) and len(value) == 2 and value[1]:
                    name, unit = _LOSSES.get(metric, (metric, 1.0))
                    value = value[0] / value[1] * unit
                if isinstance(value, (bool, int, float)):
                    key = f"{document['doc_id']}/{document.get('filter', '')}"
                    found.setdefault((task, name), {})[key] = float(value)
    return found


def paired(source: Scores, student: Scores) -> list[tuple[str, str, Tensor, Tensor]]:
    """Task, metric, and the values ``[n]`` of both models on the documents that both were given."""
    rows = []
    for (task, metric), values in source.items():
        others = student.get((task, metric), {})
        shared = sorted(values.keys() & others.keys())
        if shared:
            before, after = ([each[document] for document in shared] for each in (values, others))
            rows.append((task, metric, tensor(before).double(), tensor(after).double()))
    return rows
