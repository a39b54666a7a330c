"""Seconds and memory of a weights-only conversion next to `cp -r` and `import torch`: Llama-2-7B's
shapes, random.

    python recipes/benchmarks/bench_convert.py --work /scratch --json
    FILE python recipes/benchmarks/bench_convert.py --work
    /scratch --layers 8          # a quarter of it, for a trial python
    recipes/benchmarks/bench_convert.py --work /scratch --pairs 1 --processes 1 2 python
    recipes/benchmarks/bench_convert.py --width 2048 --inner 5632 --layers 18 --warm    # 2.1 GB
    from memory

Makes a bfloat16 checkpoint in several shards (13.5 GB with 32 layers) in a new folder below --work,
converts it from MHA to GQA-8 by each number of --processes (several by torchrun, gloo), copies it
with `cp -r --reflink=never`, imports torch in a process of its own, in turn, each followed by
`sync`. Before each the page cache is dropped where that is permitted, or with --warm the source is
read into it. The first round is discarded. `beyond_torch` is the ratio to `cp` of the seconds that
a conversion takes longer than `import torch`. Every OUT is hashed; needs twice the checkpoint's
size on that disk; removes everything it made. On a machine with other work only the CPU seconds
count, which are also given by what takes them: each part is made once more alone.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measured import conditions

from kvfold.convert.checkpoint.files import copy_range
from kvfold.convert.checkpoint.hashing import file_hashes

HEADS = 32
VOCABULARY = 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Shapes = dict[str, tuple[int, ...]]
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SPARE = 2 * 10**9  # bytes that stay free on the disk
POLL = 0.02  # seconds between two looks at the process's memory


def shapes(width: int, inner: int, layers: int) -> Shapes:
    """Every tensor of the model, in the order in which safetensors stores them: by name."""
    block: Shapes = {f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
    block |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    block |= {"mlp.down_proj.weight": (width, inner)}
    block |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    every = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in block.items()
    }
    every |= {
        "model.embed_tokens.weight": (VOCABULARY, width),
        "lm_head.weight": (VOCABULARY, width),
    }
    every |= {"model.norm.weight": (width,)}
    return dict(sorted(every.items()))


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * torch.Size(shape).numel()


def split(tensors: Shapes, limit: int) -> Iterator[Shapes]:
    """Shards of at most ``limit`` bytes."""
    shard: Shapes = {}
    for name, shape in tensors.items():
        if shard and sum(map(nbytes, shard.values())) + nbytes(shape) > limit:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def make_checkpoint(folder: Path, width: int, inner: int, layers: int, shard_bytes: int) -> int:
    """Write the checkpoint; returns its size. Values: normal, deviation 0.02, drawn once and
    shifted per tensor.
    """
    folder.mkdir()
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}, indent=2))
    torch.manual_seed(0)
    noise = memoryview((torch.randn(1 << 24) * 0.02).bfloat16().view(torch.uint8).numpy())
    tensors = shapes(width, inner, layers)
    shards = list(split(tensors, shard_bytes))
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        write_shard(folder / file, shard, noise)
    index = {
        "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return sum(path.stat().st_size for path in folder.iterdir())


def write_shard(path: Path, shard: Shapes, noise: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shard.items():
        end = position + nbytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, shape in enumerate(shard.values()):
            left = nbytes(shape)
            start = 2 * 997 * index
            while left:
                part = noise[start : start + left]
                file.write(part)
                left = left - len(part)
                start = 0


def check_room(folder: Path, size: int) -> None:
    """End the run rather than fill the disk."""
    if (free := shutil.disk_usage(folder).free) < size + SPARE:
        raise SystemExit(f"{folder}: expected {size + SPARE} bytes free, found {free}")


def prepare(source: Path, warm: bool) -> bool:
    """Write out what is pending, then drop the page cache, or if ``warm`` read ``source``; False if
    it cannot drop.
    """
    subprocess.run(["sync"], check=True)
    if warm:
        file_hashes(source)
        return False
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


def timed(command: list[str], launched: bool = False) -> dict[str, Any]:
    """Seconds until the command and a `sync` after it are done, CPU seconds, and the peaks of its
    memory in bytes.

    ``launched``: the command starts others, and the memory is that of each of them.
    """
    start = time.perf_counter()
    used = children_cpu()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peaks: dict[int, dict[str, int]] = {}
    while process.poll() is None:
        for number in started_by(process.pid) if launched else [process.pid]:
            seen = peaks.setdefault(number, {})
            seen.update(
                {name: max(value, seen.get(name, 0)) for name, value in memory_of(number).items()}
            )
        time.sleep(POLL)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    cpu = children_cpu() - used
    subprocess.run(["sync"], check=True)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu,
        "peaks": list(peaks.values()),
    }


def started_by(process: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [
            int(number)
            for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except OSError:  # it has just ended
        return []


def memory_of(process: int) -> dict[str, int]:
    """VmHWM (peak of all), RssAnon (own memory), RssFile (mapped files) and RssShmem, in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return {}
    names = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
    fields = dict(line.split(":", 1) for line in lines if line.startswith(names))
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def hashed(out: Path) -> tuple[str, float]:
    """A digest of all names and hashes in OUT, and the CPU seconds of hashing it."""
    began = time.process_time()
    hashes = file_hashes(out)
    digest = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    return digest, time.process_time() - began


def copying_cpu(source: Path, work: Path) -> float:
    """CPU seconds of copying all weights as a conversion does."""
    began = time.process_time()
    for path in source.glob("*.safetensors"):
        with (
            path.open("rb", buffering=0) as file,
            (work / "copied").open("wb", buffering=0) as target,
        ):
            copy_range(file, 0, path.stat().st_size, target.fileno(), 0, lambda start, end: None)
    used = time.process_time() - began
    (work / "copied").unlink()
    return used


def convert_command(source: Path, out: Path, processes: int, options: list[str]) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    call = ["-m", "kvfold.convert", "convert", str(source), str(out), *options]
    return [sys.executable, *(launcher if processes > 1 else []), *call]


def measure(
    source: Path, work: Path, pairs: int, counts: list[int], options: list[str], warm: bool
) -> list[dict[str, Any]]:
    """cp, the import of torch and the conversions in turn; one row per round."""
    rows = []
    size = sum(path.stat().st_size for path in source.iterdir())
    for pair in range(pairs):
        row: dict[str, Any] = {
            "caches_dropped": prepare(source, warm),
            "load_average": os.getloadavg()[0],
        }
        check_room(work, size)
        row["cp"] = timed(["cp", "-r", "--reflink=never", str(source), str(work / "copy")])
        shutil.rmtree(work / "copy")
        row["torch"] = timed([sys.executable, "-c", "import torch"])
        parts = {
            "importing torch": row["torch"]["cpu_seconds"],
            "copying": copying_cpu(source, work),
        }
        print(
            f"round {pair}: cp {row['cp']['seconds']:.2f} s, torch {row['torch']['seconds']:.2f} s",
            flush=True,
        )
        for count in counts:
            prepare(source, warm)
            check_room(work, size)
            run = timed(convert_command(source, work / "out", count, options), launched=count > 1)
            run["sha256"], parts["hashing"] = hashed(work / "out")
            row["out_bytes"] = sum(path.stat().st_size for path in (work / "out").iterdir())
            shutil.rmtree(work / "out")
            run["ratio"] = run["seconds"] / row["cp"]["seconds"]
            run["beyond_torch"] = (run["seconds"] - row["torch"]["seconds"]) / row["cp"]["seconds"]
            row[str(count)] = run
            told = f"{run['ratio']:.3f} x cp, beyond torch {run['beyond_torch']:.3f}"
            print(f"round {pair}: {count} processes {run['seconds']:.2f} s, {told}", flush=True)
        row["cpu_parts"] = parts
        rows.append(row)
    return rows


def of_count(rows: list[dict[str, Any]], count: str) -> dict[str, Any]:
    """The figures of the conversions by ``count`` processes, ``peak_bytes`` of each process."""
    runs = [row[count] for row in rows]

    def spread(name: str) -> dict[str, float]:
        values = [run[name] for run in runs]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    peaks = [memory for run in runs for memory in run["peaks"]]
    return {
        "ratio": spread("ratio"),
        "beyond_torch": {**spread("beyond_torch"), "allowed": 1.25},
        "seconds": statistics.median(run["seconds"] for run in runs),
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
        "peak_bytes": {
            "own": max(memory.get("RssAnon", 0) + memory.get("RssShmem", 0) for memory in peaks),
            "mapped_files": max(memory.get("RssFile", 0) for memory in peaks),
            "all": max(memory.get("VmHWM", 0) for memory in peaks),
        },
        "sha256": sorted({run["sha256"] for run in runs}),
    }


def summary(
    rows: list[dict[str, Any]], counts: list[int], width: int, size: int, text: str
) -> dict[str, Any]:
    """The figures without the first round, and the machine they hold for."""
    counted = rows[1:] or rows
    made = {str(count): of_count(counted, str(count)) for count in counts}
    return {
        "what": f"{text} against cp -r --reflink=never",
        "checkpoint_bytes": size,
        "out_bytes": counted[0]["out_bytes"],
        "cp_seconds": statistics.median(row["cp"]["seconds"] for row in counted),
        "torch_seconds": statistics.median(row["torch"]["seconds"] for row in counted),
        "cp_cpu_seconds": statistics.median(row["cp"]["cpu_seconds"] for row in counted),
        "cpu_parts": {
            part: statistics.median(row["cpu_parts"][part] for row in counted)
            for part in counted[0]["cpu_parts"]
        },
        "processes": made,
        "equal_hashes": (
            len({digest for figures in made.values() for digest in figures["sha256"]}) == 1
        ),
        "allowed_bytes": 10**9 + 4 * nbytes((4 * width, width)),  # and of four attention layers
        "caches_dropped": all(row["caches_dropped"] for row in rows),
        **conditions(),
        "cp": (
            subprocess.run(
                ["cp", "--version"], capture_output=True, text=True, check=True
            ).stdout.splitlines()[0]
        ),
        "rounds": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a folder on the disk to measure",
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008, help="width of the MLP")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="read the source before each, instead of dropping caches",
    )
    parser.add_argument(
        "--pairs", type=int, default=6, help="rounds; of several the first is discarded"
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], help="numbers of processes that convert"
    )
    parser.add_argument("--shard-size", type=float, default=5.0, help="GB per shard of the source")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--options", default="--to gqa --kv-heads 8 --method mean", help="of kvfold convert"
    )
    arguments = parser.parse_args()
    options = [*arguments.options.split(), "--quiet"]
    work = Path(tempfile.mkdtemp(prefix="kvfold-bench-", dir=arguments.work))
    try:
        shape = arguments.width, arguments.inner, arguments.layers
        size = make_checkpoint(work / "source", *shape, int(arguments.shard_size * 1e9))
        rows = measure(
            work / "source", work, arguments.pairs, arguments.processes, options, arguments.warm
        )
    finally:
        shutil.rmtree(work)
    what = "Llama, width {}, MLP {}, {} layers, bfloat16: ".format(*shape) + " ".join(options)
    result = summary(rows, arguments.processes, arguments.width, size, what)
    text = json.dumps(result, indent=2) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))


if __name__ == "__main__":
    main()
