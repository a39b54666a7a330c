"""How close calibrated conversions come to the machine's speed: polishing and fitting next to bare
stock passes.

    python recipes/benchmarks/bench_training.py polish MODEL CONVERTED --json
    recipes/results/training_speed.json python recipes/benchmarks/bench_training.py uptrain MODEL
    CONVERTED --batch 1 --seq-len 1024 python recipes/benchmarks/bench_training.py fit MODEL
    --calibration FILE python recipes/benchmarks/bench_training.py against MODEL --calibration FILE
    --other OLD/bin/python

`polish` times steps of polishing CONVERTED (a result of `kvfold convert` of MODEL), and, in turn, a
forward and backward pass of the same checkpoint in stock transformers with the same trained
tensors, in the arithmetic that `convert.device.training_autocast` chooses, on as many tokens. `fit`
divides the processor time of a whole `kvfold convert` to MLA by that of stock forward passes over
the same calibration tokens in that arithmetic. `uptrain` times passes of CONVERTED and its teacher
MODEL as `kvfold uptrain` makes them, with torch's attention and with blocks. `against` divides the
processor time of `kvfold convert` as installed beside the interpreter --other by this version's,
each run once; this version also measures the loss by position, on 4 x 2048 tokens more. All use one
thread unless --threads says otherwise; times are processor seconds, of passes and steps the least
of several rounds.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_walk import timed
from measured import conditions
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.polishing import taught_text
from kvfold.convert.device import training_autocast
from kvfold.convert.stream.stock import attend_in_blocks
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.stream.weights import load_model
from kvfold.convert.text.tokenizer import load_tokenizer
from kvfold.convert.text.windows import load_calibration
from kvfold.convert.training.fit import distillation_loss
from kvfold.convert.training.polish import ModelTrainee, TrainingText
from kvfold.convert.training.steps import has_constant

CPU = torch.device("cpu")
AGAINST = {"fitted": "", "refined and polished": "--refine 5 --polish 15"}


def stock_pass(
    folder: Path, tokens: Tensor, trained: bool, device: torch.device = CPU
) -> Callable[[], None]:
    """A forward pass of the checkpoint over ``tokens [N, T]``, with a backward pass to its
    attention if ``trained``.
    """
    checkpoint = open_checkpoint(str(folder))
    dtype = training_autocast(checkpoint, device) or torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained and ".self_attn." in name)

    def run() -> None:
        with torch.set_grad_enabled(trained):
            logits = model(tokens, use_cache=False).logits
            if trained:
                cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
                ).backward()

    return run


def polishing_step(
    model: Path, converted: Path, tokens: Tensor, device: torch.device = CPU
) -> Callable[[], None]:
    """A step of polishing ``converted`` on ``tokens [N, T]``; the states of ``model`` are computed
    beforehand.
    """
    source = open_checkpoint(str(model))
    written = open_checkpoint(str(converted))
    autocast = training_autocast(written, device)
    stream = CheckpointStream(
        source.config, source.read, list(source.tensors), device, autocast=autocast
    )
    states = taught_text(stream, tokens, autocast).states
    stored = dict.fromkeys(written.tensors, torch.bfloat16)
    constant = has_constant(written)
    attention = [name for name in written.tensors if ".self_attn." in name]
    trainee = ModelTrainee(
        written.config, written.read, stored, attention, device, autocast, constant=constant
    )
    training = TrainingText(tokens, lambda indices: states[indices])
    (batch,) = training.announced(iter([list(range(len(tokens)))]))
    for group in trainee.optimizer.param_groups:
        group["lr"] = 1e-6 * group["size"]

    def run() -> None:
        trainee.optimizer.zero_grad(set_to_none=True)
        trainee.backward(training, batch)
        trainee.optimizer.step()

    return run


def uptraining_step(
    model: Path, converted: Path, tokens: Tensor, in_blocks: bool
) -> Callable[[], None]:
    """A forward pass of both models over ``tokens [N, T]``, and a backward pass to all weights of
    ``converted``.
    """
    source = open_checkpoint(str(model))
    written = open_checkpoint(str(converted))
    dtype = training_autocast(written, CPU)
    teacher = load_model(source, dtype or torch.float32, False).requires_grad_(False)
    student = load_model(written, torch.float32, False)
    if in_blocks:
        attend_in_blocks(student, CPU)

    def run() -> None:
        with torch.no_grad():
            expected = teacher(input_ids=tokens, use_cache=False).logits
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = student(input_ids=tokens, use_cache=False).logits
        distillation_loss(logits.float(), expected, 1.0).backward()
        student.zero_grad()

    return run


def operations(converted: Path, heads: int) -> int:
    """Operations per token of a step that trains the attention; the head is applied ``heads``
    times, once backward.

    Products with weights alone: scores and weighted values are left out, so that shares of a rate
    are too low.
    """
    written = open_checkpoint(str(converted))
    sizes = {
        name: info.shape[0] * info.shape[1]
        for name, info in written.tensors.items()
        if len(info.shape) == 2
    }
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    attention = sum(size for name, size in sizes.items() if ".self_attn." in name)
    head = written.config["vocab_size"] * written.config["hidden_size"]
    # Forward, the gradients of activations, and those of the trained weights.
    return 2 * (2 * layers + attention + (heads + 1) * head)


def least_seconds(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least processor seconds of each call, after a first one, in ``rounds`` rounds of all in
    turn.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.process_time()
            call()
            found[name].append(time.process_time() - started)
    return {name: min(seconds[1:]) for name, seconds in found.items()}


def calibration(model: Path, text: str | None, samples: int, length: int) -> Tensor:
    tokenizer = load_tokenizer(open_checkpoint(str(model)), False, "calibration")
    return load_calibration(text, tokenizer, samples, length).calibration


def bench_polish(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = calibration(arguments.model, arguments.calibration, arguments.batch, arguments.seq_len)
    calls = {
        "stock": stock_pass(arguments.converted, tokens, True),
        "polish": polishing_step(arguments.model, arguments.converted, tokens),
    }
    seconds = least_seconds(calls, arguments.rounds)
    rates = {name: tokens.numel() / spent for name, spent in seconds.items()}
    return {"tokens_per_second": rates, "ratio": rates["polish"] / rates["stock"], "asked": 0.9}


def bench_uptrain(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = calibration(arguments.model, arguments.calibration, arguments.batch, arguments.seq_len)
    models = arguments.model, arguments.converted, tokens
    seconds = least_seconds(
        {name: uptraining_step(*models, name == "blocks") for name in ("torch", "blocks")},
        arguments.rounds,
    )
    return {
        "tokens": list(tokens.shape),
        "seconds": seconds,
        "ratio": seconds["blocks"] / seconds["torch"],
    }


def bench_fit(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = calibration(
        arguments.model, arguments.calibration, arguments.samples, arguments.seq_len
    )
    parts = [stock_pass(arguments.model, part, False) for part in tokens.split(arguments.batch)[:4]]
    seconds = least_seconds({str(i): part for i, part in enumerate(parts)}, arguments.rounds)
    passed = sum(seconds.values()) / len(parts) * len(tokens) / arguments.batch
    sizes = ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
    text = [] if arguments.calibration is None else ["--calibration", arguments.calibration]
    text += ["--calibration", "self:0"]  # writing dialogues is no pass over the text
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as work:
        command = [
            sys.executable,
            "-m",
            "kvfold.convert",
            "convert",
            str(arguments.model),
            f"{work}/out",
            "--quiet",
        ]
        spent = timed([*command, *arguments.options.split(), *sizes, *text])["cpu_seconds"]
        record = json.loads(Path(work, "out", "kvfold.json").read_text())
    drift = {name: record["drift"][name]["value"] for name in ("kl", "excess")}
    found = {"forward_seconds": passed, "fit_seconds": spent, "ratio": spent / passed, "asked": 5.0}
    return {**found, "precision": record["precision"], **drift}


def bench_against(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len), "--quiet"]
    text = [] if arguments.calibration is None else ["--calibration", arguments.calibration]
    found: dict[str, Any] = {"other": arguments.other_name}
    for stage, options in AGAINST.items():
        row: dict[str, Any] = {"options": f"{arguments.options} {options}".strip()}
        # Dialogues that the model writes itself are no part of older versions' default.
        no_dialogues = ["--calibration", "self:0"]
        for name, python, more in (
            ("this", Path(sys.executable), no_dialogues),
            ("other", arguments.other, []),
        ):
            with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as work:
                command = [
                    str(python.with_name("kvfold")),
                    "convert",
                    str(arguments.model),
                    f"{work}/out",
                ]
                spent = timed([*command, *row["options"].split(), *sizes, *text, *more])[
                    "cpu_seconds"
                ]
                drift = json.loads(Path(work, "out", "kvfold.json").read_text())["drift"]
            row[name] = {
                "cpu_seconds": spent,
                **{figure: drift[figure]["value"] for figure in ("kl", "excess")},
            }
        found[stage] = {**row, "ratio": row["other"]["cpu_seconds"] / row["this"]["cpu_seconds"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["polish", "uptrain", "fit", "against"])
    parser.add_argument("model", type=Path)
    parser.add_argument("converted", type=Path, nargs="?", help="of polish and uptrain")
    parser.add_argument(
        "--options", default="--to mla --kv-rank 128 --rope-dim 64", help="of fit and against"
    )
    parser.add_argument(
        "--other",
        type=Path,
        help="of against: the interpreter of an environment with another version",
    )
    parser.add_argument(
        "--other-name", help="of against: what the figures call that version, such as its commit"
    )
    parser.add_argument("--calibration", help="default: the text that ships")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step or pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="adds the figures to this file, under the name of the benchmark"
    )
    arguments = parser.parse_args()
    if arguments.what == "against" and arguments.other is None:
        parser.error("against needs --other")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the commands that are timed
    torch.set_num_threads(arguments.threads)
    benchmarks = {
        "polish": bench_polish,
        "uptrain": bench_uptrain,
        "fit": bench_fit,
        "against": bench_against,
    }
    result = benchmarks[arguments.what](arguments)
    print(json.dumps(result, indent=2))
    if arguments.json:
        rows = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
        arguments.json.write_text(
            json.dumps({**rows, arguments.what: {**result, **conditions()}}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
