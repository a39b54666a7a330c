"""Greedy tokens of checkpoints in an inference engine side by side with transformers', cache sizes,
and speeds.

    python recipes/serve_check.py SOURCE OUT ... --engine vllm|mlx|llama.cpp [--prompts N] [--json
    FILE]

Eight prompts of 16 tokens, or with --prompts N so many windows of held-out text, 32 greedy tokens
each, float32. At the first difference in a prompt transformers is asked about both tokens: where
their logits are within 1e-3 the prompt counts as equal so far (a tie). A checkpoint is equal,
wrong, or refused with the engine's message. The cache is what the engine itself reports, beside
what kvfold.json promises. Engines run in the Python that --python names (requirements-engines.txt
says how each is installed); rows replace those of the same engine, checkpoint and options in FILE.
Exits with 1 if any checkpoint is served wrongly.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parent / "benchmarks"), str(Path(__file__).parent / "serve")]
from measured import conditions
from worker import batches

SCRIPTS = {"vllm": "engine_vllm.py", "mlx": "engine_mlx.py", "llama.cpp": "engine_llama_cpp.py"}
PYTHONS = {
    "vllm": "KVFOLD_VLLM_PYTHON",
    "mlx": "KVFOLD_MLX_PYTHON",
    "llama.cpp": "KVFOLD_LLAMA_CPP_PYTHON",
}
SOURCES = "KVFOLD_LLAMA_CPP"  # the folder of llama.cpp's sources
LENGTH = 16
NEW_TOKENS = 32
TIE = 1e-3  # logits
TEXT = """The river was high that spring, and the road to the village lay under water for most of a week.
She opened the letter slowly, read it twice, and put it back into the drawer without a word.
In the first chapter the author explains how the machine was built and why it was never used.
A list holds values in order; the method append adds one to its end and returns nothing.
It had been raining since the morning, and the men who worked on the bridge had gone home.
The function returns the number of bytes that were written, or raises an error if the file is closed.
Nobody in the town could remember a winter as long as this one, or a summer that came so late.
When the train stopped at the small station, only one passenger got out, and he carried no luggage.""".splitlines()
Tokens = list[list[int]]


class Reference:
    """transformers' float32 model of a checkpoint, and its greedy tokens."""

    def __init__(
        self, checkpoint: Path, prompts: int | None = None, text: Path | None = None
    ) -> None:
        from transformers import AutoTokenizer

        from kvfold.attention import register_models
        from kvfold.convert.data import read_documents
        from kvfold.convert.stream.stock import AutoModelForCausalLM

        register_models()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = (
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).float().eval()
        )
        if prompts is None:
            self.prompts: Tokens = [tokenizer(line)["input_ids"][:LENGTH] for line in TEXT]
        else:
            told = (
                "".join(read_documents("held_out"))
                if text is None
                else text.read_text(encoding="utf-8")
            )
            self.prompts = windows(tokenizer(told)["input_ids"], prompts)
        self.tokens = [row for each in batches(self.prompts) for row in self._greedy(each)]

    @torch.no_grad()
    def _greedy(self, prompts: Tokens) -> Tokens:
        made = self.model.generate(
            torch.tensor(prompts),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            suppress_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows: Tokens = made[:, len(prompts[0]) :].tolist()
        return rows

    @torch.no_grad()
    def gap(self, row: int, at: int, token: int) -> float:
        """How far below the best logit that of ``token`` is at place ``at`` of the continuation."""
        ids = self.prompts[row] + self.tokens[row][:at]
        logits = self.model(torch.tensor([ids])).logits[0, -1]
        return float(logits.max() - logits[token])


def windows(ids: list[int], count: int) -> Tokens:
    """``count`` prompts, as far apart in ``ids`` as they can be."""
    if len(ids) < count * LENGTH:
        raise SystemExit(
            f"--prompts {count} need {count * LENGTH} tokens of text, which has {len(ids)}"
        )
    return [
        ids[at : at + LENGTH]
        for at in (row * (len(ids) - LENGTH) // max(count - 1, 1) for row in range(count))
    ]


def compare(reference: Reference, tokens: Tokens) -> dict[str, Any]:
    """Prompts served equally, tokens until the first difference, and ties (first differences within
    TIE).
    """
    same = 0
    equal = 0
    ties = 0
    differences = []
    for row, (wanted, found) in enumerate(zip(reference.tokens, tokens, strict=True)):
        at = next(
            (at for at, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]),
            NEW_TOKENS,
        )
        same += at
        gap = 0.0 if at == NEW_TOKENS else reference.gap(row, at, found[at])
        ties += 0 < gap <= TIE
        equal += gap <= TIE
        if gap > TIE:
            differences.append({"prompt": row, "token": at, "logits_apart": gap})
    return {
        "verdict": "equal" if equal == len(tokens) else "wrong",
        "prompts_equal": f"{equal} of {len(tokens)}",
        "tokens_equal": f"{same} of {len(tokens) * NEW_TOKENS}",
        "ties": ties,
        "differences": differences,
    }


def ask(engine: str, python: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The engine's answer (``serve/worker.py``); what it died of is an ``error`` too."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "request.json")
        answer = Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        script = Path(__file__).parent / "serve" / SCRIPTS[engine]
        call = [python, str(script), str(asked), str(answer)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=timeout, check=False)
        if answer.exists():
            return json.loads(answer.read_text())
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        died = f"{signal.Signals(-done.returncode).name} after: " if done.returncode < 0 else ""
        return {"error": next((line for line in lines if "ASSERT" in line), died + lines[-1])}


def about(checkpoint: Path) -> dict[str, Any]:
    """What kvfold.json says of a result; of a source, which has none, its attention and cache."""
    record = checkpoint / "kvfold.json"
    if not record.exists():
        from kvfold.convert import inspect_checkpoint

        promised = inspect_checkpoint(str(checkpoint)).cache.cache_elements
        return {"attention": "source", "layout": None, "cache_promised": promised}
    told = json.loads(record.read_text())
    layout = told["request"].get("layout") if told["request"]["to"] == "mla" else None
    promised = told["cache_elements"]["to"]
    return {
        "attention": told["attention"]["to"],
        "layout": layout,
        "cache_promised": promised,
        "source": told["source"]["name"],
    }


def row_of(checkpoint: Path, chosen: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    reference = Reference(checkpoint, chosen.prompts, chosen.text)
    speed = (
        dict(zip(("batch", "context", "new_tokens"), chosen.speed, strict=True))
        if chosen.speed
        else None
    )
    request = {
        "model": str(checkpoint.resolve()),
        "prompts": reference.prompts,
        "new_tokens": NEW_TOKENS,
        "dtype": chosen.dtype,
        "options": options,
        "speed": speed,
    }
    answer = ask(chosen.engine, chosen.python, request, chosen.timeout)
    row = {
        "engine": chosen.engine,
        "checkpoint": checkpoint.name,
        "model_type": reference.model.config.model_type,
    }
    if chosen.prompts:
        row["prompts_of"] = chosen.text.name if chosen.text else "the held-out text that ships"
    row |= about(checkpoint) | {
        "dtype": chosen.dtype,
        "options": {k: v for k, v in options.items() if k != "sources"},
    }
    if "error" in answer:
        message = re.sub(r"/\S*/", "", " ".join(str(answer["error"]).split()))[:400]
        return row | {"verdict": "refused", "message": message}
    row |= compare(reference, answer.pop("tokens"))
    row["engine_versions"] = answer.pop("versions")  # beside those of the reference
    return row | {"speed_of": speed} | answer


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Beside each result: the source's cache by its own, as reported and as promised; its speed by
    the source's.
    """
    source = rows[0]
    for row in rows:
        if "cache" not in row or "cache" not in source or source["attention"] != "source":
            continue
        row["cache_ratio"] = source["cache"] / row["cache"]
        row["cache_ratio_promised"] = source["cache_promised"] / row["cache_promised"]
        if row.get("speed") and source.get("speed"):
            row["speed_ratio"] = {
                name: row["speed"][name] / source["speed"][name]
                for name in ("prefill_tokens_per_s", "decode_tokens_per_s")
            }


def line_of(row: dict[str, Any]) -> str:
    name = (
        f"{row['engine']:10} {row['checkpoint']:24} {row['attention']:12} {row['layout'] or '':9}"
    )
    if row["verdict"] == "refused":
        return f"{name} refused: {row['message'][:160]}"
    text = (
        f"{name} {row['verdict']:6} {row['tokens_equal']} tokens, {row['ties']} ties, cache"
        f" {row['cache']:g}"
    )
    text += f" (promised {row['cache_promised']})"
    if speed := row.get("speed_ratio"):
        text += (
            f", decodes {row['speed']['decode_tokens_per_s']:.1f} tokens/s"
            f" ({speed['decode_tokens_per_s']:.2f} x)"
        )
    return text


def merge(file: Path, rows: list[dict[str, Any]]) -> None:
    """Puts ``rows`` in the place of those of the same engine, checkpoint, dtype, options and
    prompts.
    """

    def key(row: dict[str, Any]) -> str:
        names = ("engine", "checkpoint", "layout", "dtype", "options", "prompts_of")
        return json.dumps([row.get(name) for name in names])

    old = json.loads(file.read_text())["rows"] if file.exists() else []
    kept = {key(row): row for row in old} | {key(row): row for row in rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": sorted(kept.values(), key=key)}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CHECKPOINT",
        help="the source first, for ratios",
    )
    parser.add_argument("--engine", choices=SCRIPTS, required=True)
    parser.add_argument(
        "--python",
        help="the Python that has the engine (default: an environment variable, or this)",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="an option of the engine"
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="N windows of a text, not eight sentences"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="the text of --prompts (default: the one that ships)",
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--speed",
        nargs=3,
        type=int,
        metavar=("BATCH", "CONTEXT", "TOKENS"),
        help="measure speeds too",
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one checkpoint")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    chosen.python = chosen.python or os.environ.get(PYTHONS[chosen.engine]) or sys.executable
    options = {
        name: json.loads(value)
        for name, _, value in (text.partition("=") for text in chosen.option)
    }
    if chosen.engine == "llama.cpp":
        options.setdefault("sources", os.environ.get(SOURCES, ""))
    rows = []
    for checkpoint in chosen.checkpoints:
        rows.append(row_of(checkpoint, chosen, options) | conditions())
        add_ratios(rows)
        print(line_of(rows[-1]), flush=True)
        if chosen.json:
            merge(chosen.json, rows)
    if any(row["verdict"] == "wrong" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
