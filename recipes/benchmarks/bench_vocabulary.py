"""Peak memory and CPU seconds of every part of kvfold that computes logits, with the vocabularies
of Qwen2.5 and Gemma 2.

    python recipes/benchmarks/bench_vocabulary.py --before CHECKOUT \
        --json recipes/results/vocabulary.json

The model has two layers of width 128 and random weights, so that little but the vocabulary counts.
Every part runs in a process of its own, from the sources of this repository and, with ``--before``,
from those of another checkout of it. A part of a conversion is a stage of its progress.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VOCABULARIES = (151_936, 262_144)
WIDTH = 128
TEXT = {"samples": 8, "seq_len": 256}
PARTS: dict[str, dict[str, Any]] = {
    "convert": {"to": "mqa", "polish": 2, **TEXT},
    "drift": {"samples": 8, "seq_len": 512},
    # One sequence: all logits of more took over 4 GB before.
    "uptrain": {"steps": 2, "seq_len": 256, "batch_tokens": 256, "eval_sequences": 1},
    "eval": {"samples": 2, "lengths": [1024], "retrieval": False},
}


class Meter:
    """The CPU seconds and the peak memory of each stage of a command, from its progress."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._stage = ""
        self._seconds = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        """Count what was used since the last call for the stage that was open."""
        self.add()
        if stage != self._stage:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._stage = stage

    def add(self) -> None:
        """Add the time since the last call, and the peak, to the open stage."""
        now = sum(os.times()[:2])
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        peak = int(status["VmHWM"].split()[0]) / 1e6
        figures = self.stages.setdefault(self._stage, {"seconds": 0.0, "gigabytes": 0.0})
        figures["seconds"] = round(figures["seconds"] + now - self._seconds, 1)
        figures["gigabytes"] = round(max(figures["gigabytes"], peak), 2)
        self._seconds = now


def run_part(part: str, folder: Path) -> dict[str, Any]:
    """The stages of one part, run in this process, on the models in ``folder``."""
    import torch

    from kvfold import convert

    torch.set_num_threads(1)
    model, out, result = (str(folder / name) for name in ("model", "mqa", part))
    options = {**PARTS[part], "device": "cpu", "quiet": True}
    meter = Meter()
    if part == "convert":
        request = convert.ConvertRequest(model, out=result, **options)
        convert.convert_checkpoint(request, meter.report)
    elif part == "drift":
        convert.drift_checkpoints(convert.DriftRequest(model, out=out, **options), meter.report)
    elif part == "eval":
        convert.eval_checkpoints(convert.EvalRequest(model, out=out, **options), meter.report)
    else:
        meter.report("uptrain", 0, 0)
        request = convert.UptrainRequest(
            out, result, text=str(folder / "text.txt"), teacher=model, **options
        )
        convert.uptrain_checkpoint(request)
    meter.add()
    del meter.stages[""]
    return meter.stages


def make_models(vocabulary: int, folder: Path) -> None:
    """A model of random weights with the tokenizer of the one that ships, and its MQA."""

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvfold.convert import ConvertRequest, convert_checkpoint
    from kvfold.convert.data import demo_folder, read_text

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / "model")
    convert_checkpoint(
        ConvertRequest(
            folder / "model", out=str(folder / "mqa"), to="mqa", method="mean", quiet=True
        )
    )
    (folder / "text.txt").write_text(read_text("calibration")[:400_000])


def measure_rows(before: Path | None, parts: list[str]) -> Iterator[dict[str, Any]]:
    """One row for each vocabulary, part, stage and checkout."""
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_models(vocabulary, folder)
            for part in parts:
                for checkout in filter(None, (before, ROOT)):
                    command = [sys.executable, __file__, "--part", part, "--folder", name]
                    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
                    done = subprocess.run(
                        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                    )
                    for path in folder.glob(f"{part}*"):
                        shutil.rmtree(path)
                    for stage, figures in json.loads(done.stdout.splitlines()[-1]).items():
                        yield {
                            "vocabulary": vocabulary,
                            "part": part,
                            "stage": stage,
                            "code": "now" if checkout == ROOT else "before",
                            **figures,
                        }


def main() -> None:
    """Measure, or run one part in a process that another one started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(run_part(options.part, options.folder)))
        return
    from measured import conditions

    rows = []
    for row in measure_rows(options.before, [options.part] if options.part else list(PARTS)):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json is not None:
            report = {**conditions(), "width": WIDTH, "rows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
