"""CPU seconds that a plan takes by depth: Llama-3.1-405B's shapes, headers in memory, no weights.

    python recipes/benchmarks/bench_plan.py --json plan.json

A plan names every output tensor with its dtype, shape, source and shard; it is all that `--dry-run`
does, and a `--budget` makes one per split. Each figure is the smallest of --repeats.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.families.model import model_of
from kvfold.convert.request import ConvertRequest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "vocab_size": 128256,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "gqa": {"to": "gqa", "kv_heads": 4},
    "mla": {"to": "mla", "kv_rank": 512, "rope_dim": 64},
    "mla budget": {"to": "mla", "budget": 576},
}


def checkpoint(layers: int) -> Checkpoint:
    """A checkpoint of which there are headers only."""
    config = {**CONFIG, "num_hidden_layers": layers}
    position = 0
    infos: dict[str, TensorInfo] = {}
    for tensor in model_of(config).tensors.values():
        end = position + 2 * math.prod(tensor.shape)
        infos[tensor.name] = TensorInfo(
            tensor.name, "BF16", tensor.shape, "model.safetensors", position, end
        )
        position = end
    return Checkpoint(Path(), config, infos, "hollow", {}, None, {})  # type: ignore[arg-type]


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def bench(layers: int, repeats: int) -> dict[str, float]:
    source = checkpoint(layers)
    seconds = {}
    for name, options in REQUESTS.items():
        request = ConvertRequest(model="hollow", out="out", **options)
        seconds[name] = min(
            cpu_seconds(lambda request=request: make_plan(request, source)) for _ in range(repeats)
        )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80, 126])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print("layers" + "".join(f"{name:>12}" for name in REQUESTS) + "   CPU seconds")
    rows = {}
    for layers in arguments.layers:
        rows[layers] = bench(layers, arguments.repeats)
        print(f"{layers:6}" + "".join(f"{seconds:12.4f}" for seconds in rows[layers].values()))
    if arguments.json:
        from measured import conditions  # torch, which planning does without

        arguments.json.write_text(
            json.dumps({"config": CONFIG, "seconds": rows, **conditions()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
