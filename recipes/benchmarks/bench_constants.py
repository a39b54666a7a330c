"""The loss of a converted model as each tuned constant of the transforms moves: where their
comments get their figures.

    python recipes/benchmarks/bench_constants.py MODEL [--calibration FILE] [--only als] [--json
    FILE] python recipes/benchmarks/bench_constants.py MODEL --channel python
    recipes/benchmarks/bench_constants.py --distances

converts MODEL with every constant at a few values, the one in the code among them, and prints the
excess loss (nats per token) on sequences of the calibration file that were held out from the fit.
The conversions run in this process, with the constant replaced in its module; nothing is refined.
The targets are meant for a model that caches 512 elements per token per layer; `--target` takes
another for all constants. `--text` measures the loss elsewhere, for example on windows longer than
the calibration's sequences. `--channel` converts MODEL to an MLA that can be exact, with other
values of the constant channel, and prints how far the logits are off; `--distances` times the sum
over distances.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from measured import continue_rows

from kvfold.convert import ConvertRequest, convert_checkpoint

TRANSFORMS = "kvfold.convert.transforms."
TARGETS: dict[str, dict[str, Any]] = {
    "GQA-2": {"to": "gqa", "kv_heads": 2},
    "MLA 48+16": {"to": "mla", "kv_rank": 48, "rope_dim": 16},
    "MLA 48+16 engine": {"to": "mla", "kv_rank": 48, "rope_dim": 16, "layout": "engine"},
    "MLA 128+64": {"to": "mla", "kv_rank": 128, "rope_dim": 64},
}
CONSTANTS: list[tuple[str, str, list[float], str]] = [  # module, name, values, target
    ("latent.als", "VALUE_WEIGHT", [1.0, 3.0, 5.0, 10.0, 20.0, 50.0], "MLA 48+16"),
    ("latent.als", "LATENT_UNIFORM", [0.0, 0.02, 0.05, 0.1, 0.2, 0.5], "MLA 48+16"),
    ("latent.als", "LATENT_TAIL", [0.0, 0.25, 0.5, 0.75, 1.0], "MLA 48+16"),
    ("latent.als", "ALS_ROUNDS", [0, 1, 4, 8, 16], "MLA 48+16"),
    ("latent.als", "ALS_DAMPING", [1e-9, 1e-6, 1e-4, 1e-2], "MLA 48+16"),
    ("latent.slots", "SLOT_UNIFORM", [0.0, 0.25, 0.5, 0.75], "MLA 48+16"),
    ("distances", "TAIL", [0.0, 0.25, 0.5, 0.75, 1.0], "GQA-2"),
    ("fold.heads", "WEAKEST_QUERY", [1e-9, 1e-6, 1e-3], "GQA-2"),
    ("fold.score_fit", "SCORE_ROUNDS", [0, 3, 10, 30], "GQA-2"),
    ("fold.score_fit", "SCORE_DAMPING", [1e-9, 1e-6, 1e-3], "GQA-2"),
    ("fold.grouping", "PAIR_ROUNDS", [0, 1, 3], "GQA-2"),
    ("latent.variants", "STEPS", [0, 10, 40, 80], "MLA 48+16 engine"),
    ("latent.variants", "FLATTEST", [1e-6, 1e-3, 1e-1], "MLA 48+16 engine"),
]


def excess(args: argparse.Namespace, target: str) -> float:
    """Loss of the converted model less that of MODEL on the held-out sequences, nats per token."""
    with tempfile.TemporaryDirectory(dir=args.work) as place:
        out = Path(place) / "out"
        request = ConvertRequest(
            model=str(args.model),
            out=str(out),
            calibration=[
                *filter(None, [args.calibration]),
                "self:0",
            ],  # constants were measured on prose
            samples=args.samples,
            seq_len=args.seq_len,
            seed=args.seed,
            quiet=True,
            **TARGETS[target],
        )
        convert_checkpoint(request)
        if args.text is not None:
            return math.log(perplexity(args, out) / perplexity(args, args.model))
        return float(json.loads((out / "kvfold.json").read_text())["drift"]["excess"]["value"])


def perplexity(args: argparse.Namespace, folder: Path) -> float:
    """Of the checkpoint in ``folder`` on windows of ``--text``, with the tokenizer of MODEL."""
    from transformers import AutoTokenizer

    from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return checkpoint_perplexity(
        folder, token_windows(tokenizer, args.text.read_text("utf-8"), 24, args.text_len)
    )


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per constant, value and target that ``done`` lacks."""
    known = {(row["constant"], row["value"], row["target"]) for row in done}
    for name, constant, values, usual_target in CONSTANTS:
        target = args.target or usual_target
        module = import_module(TRANSFORMS + name)
        label = f"{name}.{constant}"
        usual = getattr(module, constant)
        for value in values:
            if args.only not in label or (label, value, target) in known:
                continue
            setattr(module, constant, value)
            try:
                measured = excess(args, target)
            finally:
                setattr(module, constant, usual)
            yield {
                "constant": label,
                "target": target,
                "value": value,
                "usual": value == usual,
                "excess": measured,
            }


def compare_channels(model: Path) -> None:
    """Largest and root mean square difference of the logits, by the value of the latents' constant
    channel.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kvfold.convert.targets.mla import tensors

    def logits(folder: Path) -> torch.Tensor:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokens = torch.randint(
            3, loaded.config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            found: torch.Tensor = loaded(tokens).logits
        return found

    rank = json.loads((model / "config.json").read_text())["hidden_size"]
    original = logits(model)
    exact: dict[str, Any] = {
        "to": "mla",
        "kv_rank": rank,
        "rope_dim": rank,
        "method": "svd",
        "allow_growth": True,
    }
    for tensors.CONSTANT in (64.0, 256.0, 1024.0, 4096.0, 65536.0):
        with tempfile.TemporaryDirectory() as place:
            convert_checkpoint(
                ConvertRequest(model=str(model), out=f"{place}/out", quiet=True, **exact)
            )
            off = logits(Path(place) / "out") - original
        print(
            f"constant {tensors.CONSTANT:7g}: {off.abs().max():.1e} at most,"
            f" {off.square().mean().sqrt():.1e} rms"
        )


def time_distances() -> None:
    """Seconds and growth of the peak memory of the sum over distances, for heads of 128 dims."""
    import resource

    import torch

    from kvfold.convert.transforms import distances

    theta = 5e5 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    profile = torch.full((32, 512), 1 / 512, dtype=torch.float64)
    for farthest in (512, 8192, 131072):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        distances.rotary_moments(
            distances.mixed_distances(profile, farthest), torch.cat([theta, -theta])
        )
        seconds = time.process_time() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"distances up to {farthest:6}: {seconds:.2f} CPU s, {(after - before) / 1024:.0f} MB"
            " more"
        )


def show(row: dict[str, Any]) -> None:
    mark = "*" if row["usual"] else " "
    print(
        f"{row['constant']:26} {row['target']:17} {row['value']:9g}{mark} {row['excess']:+.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--calibration", help="default: the text that ships with kvfold")
    parser.add_argument(
        "--channel", action="store_true", help="compare values of the constant channel"
    )
    parser.add_argument(
        "--distances", action="store_true", help="time the sum over distances; needs no model"
    )
    parser.add_argument("--only", default="", help="constants whose name holds this")
    parser.add_argument(
        "--target", choices=TARGETS, help="convert to this one, whatever the constant's own"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=32,
        help="calibration sequences; at least 8 more are held out",
    )
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="for drawing sequences")
    parser.add_argument(
        "--text", type=Path, help="measure the loss on windows of this file instead"
    )
    parser.add_argument(
        "--text-len", type=int, default=512, help="their length: beyond that of the calibration"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for converted checkpoints; default: the system's"
    )
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    if args.distances:
        time_distances()
        return
    if args.model is None:
        parser.error("expected MODEL")
    if args.channel:
        compare_channels(args.model)
        return
    header = {
        "model": args.model.name,
        "samples": args.samples,
        "length": args.seq_len,
        "seed": args.seed,
    }
    if args.text is not None:
        header |= {"text_length": args.text_len}
    continue_rows(args.json, header, lambda done: rows(args, done), show)


if __name__ == "__main__":
    main()
