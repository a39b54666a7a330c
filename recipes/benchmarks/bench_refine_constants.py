"""The loss of a refined model as each tuned constant of refinement moves: where their comments get
their figures.

    python recipes/benchmarks/bench_refine_constants.py [--only _REFINED_SEQUENCES] [--json FILE]
    python recipes/benchmarks/bench_refine_constants.py --blocks
    python recipes/benchmarks/bench_refine_constants.py --uptrain
    python recipes/benchmarks/bench_refine_constants.py --attention

converts the model that ships, with the text that ships, or `--model MODEL --calibration FILE`, for
every constant at a few values, the one in the code among them. It prints the excess loss (nats per
token) on sequences that were held out from the fit, the mean number of steps per layer, and CPU
seconds. The runs are small: all of them take some minutes of one core. `--blocks` times the
distance profile with blocks of other sizes instead, `--attention` the bfloat16 attention of a
training step; `--uptrain` moves the learning rate of uptraining, distilled from the model that
ships.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder, read_text

REFINE, FIT, BUDGET = (f"convert.training.{name}" for name in ("refine", "fit", "budget"))
WALK = "convert.walk.walk"
TRIALS = "convert.conversion.latent"
SOURCE: dict[str, Any] = {
    "model": str(demo_folder())
}  # and what the command line adds to every run
SMALL: dict[str, Any] = {"samples": 64, "seq_len": 64}
RUNS: dict[str, dict[str, Any]] = {
    "MQA, 40 steps": {"to": "mqa", "refine": 40, **SMALL},
    "MLA 24+8, 40 steps": {"to": "mla", "kv_rank": 24, "rope_dim": 8, "refine": 40, **SMALL},
    "MQA, auto": {"to": "mqa", "refine": "auto", **SMALL},
    "MLA of 16, 20 steps": {"to": "mla", "budget": 16, "refine": 20, "samples": 16, "seq_len": 64},
    "GQA-2": {"to": "gqa", "kv_heads": 2, "samples": 32, "seq_len": 256},
}
AUTO_STEPS = 400  # the most that auto spends on a layer here, for the sake of time
SHORT = ("MQA, 40 steps", "MLA 24+8, 40 steps")
AUTO = ("MQA, auto",)
CONSTANTS: list[
    tuple[str, tuple[str, ...], list[Any], tuple[str, ...]]
] = [  # module, names, values, runs
    (BUDGET, ("_REFINED_SEQUENCES",), [2, 8, 32], SHORT),
    (REFINE, ("_RELATIVE_LR",), [0.0125, 0.05], SHORT),
    (
        REFINE,
        ("_RELATIVE_LR", "_WIDTH_LR"),
        [(0.05, 0.8), (0.2, 3.2)],
        SHORT,
    ),  # the smaller of the two decides
    (REFINE, ("_ERROR_POWER",), [0.0, 0.5, 0.75], SHORT),
    (FIT, ("BETAS",), [(0.9, 0.95), (0.9, 0.98), (0.9, 0.999)], SHORT),
    (REFINE, ("_RETRY_LR",), [(1.0,), (1.0, 0.25, 0.0625)], SHORT[:1]),
    (REFINE, ("_DECAY_STEPS",), [50, 100, 200], AUTO),
    (REFINE, ("MIN_GAIN",), [0.003, 0.01, 0.03], AUTO),
    (TRIALS, ("_TRIAL_STEPS",), [5, 20], ("MLA of 16, 20 steps",)),
    (WALK, ("_JUDGED_TOKENS",), [256, 1024, 2048], ("GQA-2",)),
    ("convert.walk.passes", ("_CPU_TOKENS",), [512, 4096, 16384], ("GQA-2",)),
]

Measured = dict[str, Any]


def convert(run: str) -> Measured:
    """Excess loss of the converted model on the held-out sequences, mean steps per layer, the
    split, CPU seconds.
    """
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        request = ConvertRequest(
            out=str(Path(place) / "out"), quiet=True, **{**SOURCE, **RUNS[run]}
        )
        record = convert_checkpoint(request).record
    steps = [layer["steps"] for layer in record.get("refinement", [])]
    return {
        "excess": float(record["drift"]["excess"]["value"]),
        "steps": sum(steps) / max(1, len(steps)),
        "splits": record.get("splits"),
        "seconds": round(time.process_time() - started, 1),
    }


def rows(only: str) -> Iterator[Measured]:
    """One row per constant, value and run. What is in the code is run once and stands for every
    constant.
    """
    usual: dict[str, Measured] = {}
    for place, names, values, runs in CONSTANTS:
        module = import_module(f"kvfold.{place}")
        label = " and ".join(names)
        before = tuple(getattr(module, name) for name in names)
        for run in runs if only in label else ():
            for value in values:
                changed = value if len(names) > 1 else (value,)
                same = changed == before
                if not same or run not in usual:
                    found = replaced(module, names, changed, run)
                    usual |= {run: found} if same else {}
                found = usual[run] if same else found
                yield {"constant": label, "run": run, "value": value, "usual": same, **found}


def replaced(module: Any, names: tuple[str, ...], values: tuple[Any, ...], run: str) -> Measured:
    """The run with the constants of ``module`` replaced."""
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, values, strict=True):
        setattr(module, name, value)
    try:
        return convert(run)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)


def time_blocks() -> None:
    """CPU seconds and growth of the peak memory of a distance profile, by the number of scores held
    at once.
    """
    import resource

    import torch

    from kvfold.attention import blocked
    from kvfold.attention.drift import profile

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 8, 2048, 64, generator=generator) for _ in range(2))
    profile.distance_profile(query, key, 0.125)
    for block in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
        blocked._CPU_SCORES = block
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        for _ in range(3):
            profile.distance_profile(query, key, 0.125)
        seconds = time.process_time() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{block:9} scores at once: {seconds / 3:.2f} CPU s, {(after - before) / 1024:.0f} MB"
            " more",
            flush=True,
        )


def time_attention() -> None:
    """CPU milliseconds of the attention of a training step in bfloat16, by the queries of a block
    and weights kept.
    """
    import torch

    from kvfold.attention import blocked
    from kvfold.attention.mask import Visibility

    for length, groups, dims in [
        (256, 9, (128, 64)),
        (256, 1, (64, 64)),
        (512, 9, (128, 64)),
        (512, 1, (64, 64)),
    ]:
        shapes = (9, dims[0]), (groups, dims[0]), (groups, dims[1])
        parts = [
            torch.randn(8, heads, length, dim).bfloat16().requires_grad_() for heads, dim in shapes
        ]
        query = torch.unflatten(parts[0], 1, (groups, -1))
        for block, kept in ((32, 1 << 25), (64, 1 << 25), (128, 1 << 25), (256, 1 << 25), (128, 0)):
            blocked._MOST_ROWS = block
            blocked._KEPT_WEIGHTS = kept
            seconds = []
            for _ in range(5):
                started = time.process_time()
                blocked.blocked_attention(query, *parts[1:], Visibility(), 0.1).sum().backward(
                    retain_graph=True
                )
                seconds.append(time.process_time() - started)
            each = min(seconds)
            case = (
                f"8 x {length} tokens, {groups} key heads, {dims}, block {block:3}, at most {kept}"
                " weights kept"
            )
            print(f"{case}: {1000 * each:.0f} ms", flush=True)


def uptrain() -> None:
    """Drift on the held-out text that ships after 40 steps of uptraining, by the learning rate."""
    from kvfold.convert.uptrain import trainer
    from kvfold.convert.uptrain.request import UptrainRequest
    from kvfold.convert.uptrain.run import uptrain_checkpoint

    batch: dict[str, Any] = {"batch_tokens": 512, "seq_len": 64, "micro_batch": 8, "device": "cpu"}
    steps: dict[str, Any] = {"steps": 40, "warmup": 0.1, "eval_every": 40, "eval_sequences": 32}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        texts = {"text": place / "text.txt", "eval_text": place / "eval.txt"}
        texts["text"].write_text(read_text("calibration"))
        texts["eval_text"].write_text(read_text("held_out"))
        options: dict[str, Any] = {
            **batch,
            **steps,
            **{key: str(path) for key, path in texts.items()},
        }
        model = str(place / "model")
        teacher = str(demo_folder())
        target: dict[str, Any] = {
            "to": "mla",
            "kv_rank": 24,
            "rope_dim": 8,
            "samples": 16,
            "seq_len": 64,
        }
        convert_checkpoint(ConvertRequest(teacher, model, quiet=True, **target))
        for trainer._AT_WIDTH_ONE in (0.0125, 0.05, 0.2):
            out = str(place / str(trainer._AT_WIDTH_ONE))
            found = uptrain_checkpoint(
                UptrainRequest(model, out, teacher=teacher, quiet=True, **options)
            ).rows[-1]
            shown = f"KL {found.eval_kl:.4f}, excess {found.eval_excess:+.4f}"
            print(f"_AT_WIDTH_ONE {trainer._AT_WIDTH_ONE:6}: {shown}", flush=True)


def show(row: Measured) -> None:
    mark = "*" if row["usual"] else " "
    best = (
        ""
        if row["splits"] is None
        else f"  rope {min(row['splits'], key=lambda each: each['kl'])['rope_dim']}"
    )
    print(
        f"{row['constant']:26} {row['run']:19} {row['value']!s:>20}{mark} {row['excess']:+.4f}"
        f"  {row['steps']:.0f} steps  {row['seconds']} s{best}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="constants whose name holds this")
    parser.add_argument("--blocks", action="store_true", help="time the distance profile's blocks")
    parser.add_argument(
        "--attention", action="store_true", help="time the attention of a training step"
    )
    parser.add_argument(
        "--uptrain", action="store_true", help="move the learning rate of uptraining"
    )
    parser.add_argument("--json", type=Path, help="results file")
    parser.add_argument(
        "--model", type=Path, help="convert this one instead of the model that ships"
    )
    parser.add_argument("--calibration", help="text for --model")
    parser.add_argument("--seed", type=int, default=0, help="for drawing sequences")
    args = parser.parse_args()
    SOURCE["seed"] = args.seed
    if args.model is not None:
        SOURCE.update(
            model=str(args.model), calibration=[*filter(None, [args.calibration]), "self:0"]
        )
    for wanted, measure in (
        (args.blocks, time_blocks),
        (args.attention, time_attention),
        (args.uptrain, uptrain),
    ):
        if wanted:
            measure()
            return
    import_module(f"kvfold.{REFINE}").MOST_STEPS = AUTO_STEPS
    done: list[Measured] = []
    for row in rows(args.only):
        show(row)
        done.append(row)
        if args.json is not None:
            args.json.write_text(
                json.dumps({"auto_steps": AUTO_STEPS, "rows": done}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
