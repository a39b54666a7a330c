"""The cost of a calibrated conversion: against one plain forward pass, and in memory for a 70B
model's shapes.

    python recipes/benchmarks/bench_walk.py convert --work /scratch --json
    recipes/results/walk_1b.json python recipes/benchmarks/bench_walk.py refine --model MODEL --json
    recipes/results/refine_cost.json python recipes/benchmarks/bench_walk.py walk --layers 2 --json
    recipes/results/walk_70b.json

`convert` makes a random bfloat16 Llama of 1B shape (16 layers, E 2048, 32 heads; 2.5 GB with 128256
tokens) and, in their own processes, runs one stock forward pass over 32 x 512 tokens in float32
(loading not counted) and `kvfold convert --method principal` with that many calibration tokens
(everything counted: start, reading, the held-out sequences, drift, writing). `refine` converts
MODEL with and without `--refine STEPS`, and divides the difference by the time of stock forward
passes over as many tokens as the steps took. `walk` takes a few layers of Llama-3-70B's shapes
through the walk, folding 8 key/value heads to 4; its weights are made when they are read, so that
nothing is on disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measured import conditions
from torch import Tensor

ONE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
SEVENTY = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "head_dim": 128,
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BATCH = 8
NOISE = 1 << 24
REFINE_BATCH = 8  # sequences in a step of refinement


def config_of(
    shape: dict[str, Any], layers: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    return {**COMMON, **shape, **sizes, "tie_word_embeddings": tied}


def weights(config: dict[str, Any]) -> "Weights":
    from kvfold.convert.families.model import model_of

    return Weights({name: tensor.shape for name, tensor in model_of(config).tensors.items()})


class Weights:
    """Random bfloat16 tensors with deviation 0.02, made again whenever one is read: stretches of
    one drawn vector.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._noise = (
            torch.randn(NOISE, generator=torch.Generator().manual_seed(0)) * 0.02
        ).bfloat16()

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        tensor = torch.empty(torch.Size(shape).numel(), dtype=torch.bfloat16)
        shift = 997 * sorted(self.shapes).index(name)
        for start in range(0, len(tensor), NOISE):
            part = tensor[start : start + NOISE]
            part.copy_(self._noise.roll(shift + start // NOISE)[: len(part)])
        return tensor.view(shape)


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """The random model with a tokenizer of one token per byte."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    source = weights(config)
    save_file(
        {name: source.read(name) for name in source.shapes},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: index for index, char in enumerate(alphabet, 2)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def forward(folder: Path, samples: int, length: int) -> dict[str, float]:
    """Wall and processor seconds of one stock forward pass over the calibration tokens, after a
    first small one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvfold.convert.text.windows import load_calibration

    tokens = load_calibration(
        None, AutoTokenizer.from_pretrained(folder), samples, length
    ).calibration
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model(tokens[:1, :32], use_cache=False)
        started = time.perf_counter()
        worked = time.process_time()
        for batch in torch.split(tokens, BATCH):
            model(batch, use_cache=False)
        return {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - worked,
        }


def timed(command: list[str]) -> dict[str, Any]:
    """Wall and processor seconds and peak memory of a process, and the last line that it printed."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = "" if process.stdout is None else process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "printed": (printed.splitlines() or [""])[-1],
    }


def bench_convert(arguments: argparse.Namespace) -> dict[str, Any]:
    config = config_of(ONE, arguments.layers or 16, arguments.kv_heads, arguments.vocabulary, True)
    samples = str(arguments.samples)
    length = str(arguments.seq_len)
    work = Path(tempfile.mkdtemp(prefix="kvfold-bench-", dir=arguments.work))
    rows = []
    try:
        make_checkpoint(work / "source", config)
        for _ in range(arguments.rounds):
            plain = timed(
                [sys.executable, __file__, "forward", str(work / "source"), samples, length]
            )
            options = [
                "--to",
                "gqa",
                "--kv-heads",
                str(arguments.to),
                "--samples",
                samples,
                "--seq-len",
                length,
            ]
            options += [*arguments.options.split(), "--quiet"]
            command = [
                sys.executable,
                "-m",
                "kvfold.convert",
                "convert",
                str(work / "source"),
                str(work / "out"),
            ]
            converted = timed([*command, *options])
            shutil.rmtree(work / "out")
            passed = json.loads(plain.pop("printed"))
            rows.append(
                {
                    "forward": passed,
                    "forward_process": plain,
                    "convert": {key: value for key, value in converted.items() if key != "printed"},
                    "ratio": converted["seconds"] / passed["seconds"],
                    "cpu_ratio": converted["cpu_seconds"] / passed["cpu_seconds"],
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
    finally:
        shutil.rmtree(work)
    what = (
        f"{arguments.kv_heads} -> {arguments.to} key/value heads, {samples} x {length} tokens"
        f" {arguments.options}"
    )
    return {"what": what.strip(), "config": config, "allowed_ratio": 3.0, "rounds": rows}


def bench_refine(arguments: argparse.Namespace) -> dict[str, Any]:
    """``ratio``: what 100 steps in every layer cost, in forward passes of the model over the tokens
    that they take.
    """
    samples = arguments.samples
    length = arguments.seq_len
    steps = arguments.steps
    options = arguments.options or "--to mqa"
    shape = ["--samples", str(samples), "--seq-len", str(length), "--quiet", *options.split()]
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-", dir=arguments.work) as work:
        command = [sys.executable, "-m", "kvfold.convert", "convert", str(arguments.model)]
        passed = forward(arguments.model, samples, length)
        fitted = timed([*command, f"{work}/fitted", *shape])
        refined = timed([*command, f"{work}/refined", *shape, "--refine", str(steps)])
    pass_tokens = samples * length
    cost = (refined["cpu_seconds"] - fitted["cpu_seconds"]) / passed["cpu_seconds"]
    return {
        "what": f"{arguments.model.name}, {options}, {samples} x {length} tokens, --refine {steps}",
        "allowed_ratio": 6.0,
        "ratio": cost * pass_tokens / (steps * REFINE_BATCH * length),
        "threads": torch.get_num_threads(),
        "forward": passed,
        "fitted": {key: value for key, value in fitted.items() if key != "printed"},
        "refined": {key: value for key, value in refined.items() if key != "printed"},
    }


def bench_walk(arguments: argparse.Namespace) -> dict[str, Any]:
    import resource

    from kvfold.convert.checkpoint.shards import OutputTensor
    from kvfold.convert.families.layout import layer_rotary, read_layer, write_layer
    from kvfold.convert.families.model import Model, model_of
    from kvfold.convert.stream.stream import CheckpointStream
    from kvfold.convert.text.windows import held_out_count
    from kvfold.convert.transforms.fold import grouping, principal
    from kvfold.convert.walk.walk import Student, Teacher, Walk

    config = config_of(SEVENTY, arguments.layers or 2, 8, arguments.vocabulary, False)
    model = model_of(config)
    source = weights(config)
    target = Model(model.family, config | {"num_key_value_heads": 4})
    planned = [
        OutputTensor(name, "BF16", tensor.shape, None if "self_attn" in name else name)
        for name, tensor in target.tensors.items()
    ]
    tokens = torch.randint(
        0,
        arguments.vocabulary,
        (arguments.samples + held_out_count(arguments.samples), arguments.seq_len),
    )
    started = time.perf_counter()
    stream = CheckpointStream(config, source.read, source.shapes)
    teacher = Teacher(stream, tokens[arguments.samples :], tokens[: arguments.samples])
    walk = Walk(teacher, Student(stream, target.config, planned))
    marks = [time.perf_counter()]
    for step in walk:
        layer = read_layer(model, step.index, source.read)
        rotary = layer_rotary(model, step.index)
        assert step.statistics is not None
        folded = principal.fold(layer, step.statistics, rotary, grouping.contiguous(8, 4))
        step.convert(write_layer(target, step.index, folded))
        marks.append(time.perf_counter())
    walk.measurement()
    return {
        "what": (
            f"70B shapes, {len(marks) - 1} layers, {arguments.samples} x {arguments.seq_len}"
            " tokens, 8 -> 4 heads"
        ),
        "config": config,
        "seconds": time.perf_counter() - started,
        "seconds_per_layer": [after - before for before, after in pairwise(marks)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "allowed_bytes": 16 * 10**9,
    }


def main() -> None:
    if sys.argv[1:2] == ["forward"]:
        print(json.dumps(forward(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["convert", "refine", "walk"])
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder with 8 GB free"
    )
    parser.add_argument("--layers", type=int, help="16 for convert, 2 for walk")
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=32,
        help="of the 1B model: 32 is MHA, 8 is as in Llama-3.2-1B",
    )
    parser.add_argument(
        "--to", type=int, default=4, help="key/value heads after the conversion of the 1B model"
    )
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--model", type=Path, help="of refine: a folder")
    parser.add_argument("--steps", type=int, default=100, help="of refine")
    parser.add_argument("--rounds", type=int, default=1, help="of forward and convert in turn")
    parser.add_argument("--options", default="", help="further options of kvfold convert")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    result = {"convert": bench_convert, "refine": bench_refine, "walk": bench_walk}[arguments.what](
        arguments
    )
    text = json.dumps({**result, **conditions()}, indent=2) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
