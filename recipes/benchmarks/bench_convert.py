"""Seconds of a weights-only conversion beside `cp -r` and `import torch`, for random weights.

    python recipes/benchmarks/bench_convert.py --work /scratch                 # 2 GB, from memory
    python recipes/benchmarks/bench_convert.py --work /scratch --width 4096 --layers 32 --json FILE

Every round copies the source (`cp -r --reflink=never`), imports torch in a process of its own, and
converts MHA to GQA by mean pooling, each followed by `sync`. The first round is discarded.
`beyond_torch` is the time that a conversion takes longer than `import torch`, relative to `cp`.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measured import commit, conditions
from transformers import AutoConfig, AutoModelForCausalLM


def make_source(folder: Path, width: int, layers: int) -> int:
    """Write a llama with heads of 64 in bfloat16; returns its bytes."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_attention_heads=width // 64,
        num_hidden_layers=layers,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    return sum(path.stat().st_size for path in folder.iterdir())


def time_command(command: list[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of a command and of `sync` after it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        source = Path(folder) / "source"
        result = str(Path(folder) / "result")
        size = make_source(source, arguments.width, arguments.layers)
        heads = str(arguments.width // 256)
        options = ["--to", "gqa", "--kv-heads", heads, "--method", "mean", "--quiet"]
        commands = {
            "cp": ["cp", "-r", "--reflink=never", str(source), result],
            "import torch": [sys.executable, "-P", "-c", "import torch"],
            "convert": [sys.executable, "-P", "-m", "kvfold", "convert"],
        }
        commands["convert"] += [str(source), result, *options]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.rounds + 1):
            for name, command in commands.items():
                shutil.rmtree(result, ignore_errors=True)
                times[name].append(time_command(command))
    report = {**conditions(), "commit": commit(), "source_bytes": size}
    for name, rounds in times.items():
        seconds, cpu_seconds = zip(*rounds[1:], strict=True)
        report[name] = {"seconds": seconds, "cpu_seconds": cpu_seconds}
    medians = {name: statistics.median(report[name]["seconds"]) for name in commands}
    report["beyond_torch"] = (medians["convert"] - medians["import torch"]) / medians["cp"]
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
