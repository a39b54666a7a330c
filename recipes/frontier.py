"""What a rounded cache, a converted model, and both together lose at how many bytes: a table and a
figure.

    python recipes/frontier.py MODEL NAME --text FILE --json recipes/results/frontier.json \\
        --result "MLA 128+64 thorough=OUT" --figure docs/frontier.svg

Each row is one checkpoint, MODEL itself or a result, under one cache (`kvfold drift --cache`,
simulated): KL and excess loss against MODEL with its own cache, on 24 x 256 tokens of FILE, and the
bytes per token per layer. Rows that the file holds already are not measured again, and it may hold
several models: the figure has a panel for each.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvfold.convert import DriftRequest, drift_checkpoints, inspect_checkpoint

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from measured import commit, conditions, continue_rows

SAMPLES = 24
LENGTH = 256
ORIGINAL = "original"
UNROUNDED = "16 bits"
# Markers in the figure.
CACHES = {UNROUNDED: "o", "fp8": "s", "int4": "^", "int3": "D", "int2": "v"}
# Mid-tones, because the figure is shown on white and on near-black.
ORIGINAL_COLOR = "#4C7FB8"
RESULT_COLOR = "#D0703C"
GRAY = "#7C828C"


def measure_row(args: argparse.Namespace, name: str, folder: Path, cache: str) -> dict[str, Any]:
    """The row of the checkpoint ``name`` in ``folder`` under ``cache``."""
    request = DriftRequest(
        args.model,
        folder,
        text=args.text,
        samples=SAMPLES,
        seq_len=LENGTH,
        cache=None if cache == UNROUNDED else cache,
        quiet=True,
    )
    report = drift_checkpoints(request)
    figures = {"kl": report.kl, "excess": report.excess, "top_1_agreement": report.agreement}
    if cache == UNROUNDED:  # the checkpoint may be stored in float32
        size = 2 * inspect_checkpoint(folder).cache.cache_elements
    else:
        size = report.student_cache_bytes // len(report.layers)
    return {"model": args.name, "checkpoint": name, "cache": cache, "bytes": size, **figures}


def measure_missing_rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Any:
    """Yield the rows that ``done`` lacks, with the conditions of their measurement."""
    known = {(row["model"], row["checkpoint"], row["cache"]) for row in done}
    checkpoints = [(ORIGINAL, args.model), *((name, Path(out)) for name, out in args.result)]
    for name, folder in checkpoints:
        for cache in CACHES:
            exact = name == ORIGINAL and cache == UNROUNDED
            if not exact and (args.name, name, cache) not in known:
                yield measure_row(args, name, folder, cache) | conditions() | {"commit": commit()}


def show_row(row: dict[str, Any]) -> None:
    """Print a row."""
    print(
        f"{row['model']:16} {row['checkpoint']:24} {row['cache']:8} {row['bytes']:6.0f} bytes  KL"
        f" {row['kl']:.4f}  excess {row['excess']:+.4f}",
        flush=True,
    )


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the figure: KL over bytes, blue for the original, orange for results, a marker for
    each cache.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(row["model"] for row in rows))
    style = {
        "font.size": 11,
        "svg.fonttype": "none",
        "svg.hashsalt": "kvfold",
        **{f"{part}.color": GRAY for part in ("text", "xtick", "ytick")},
        "axes.labelcolor": GRAY,
        "axes.edgecolor": GRAY,
    }
    with rc_context(style):
        figure = Figure(figsize=(6, 3.4 * len(models)), layout="constrained")
        for model, axes in zip(
            models, figure.subplots(len(models), squeeze=False)[:, 0], strict=True
        ):
            for row in (row for row in rows if row["model"] == model):
                color = ORIGINAL_COLOR if row["checkpoint"] == ORIGINAL else RESULT_COLOR
                marker = CACHES[row["cache"]]
                axes.plot(row["bytes"], max(row["kl"], 1e-4), marker, color=color, markersize=6)
            axes.set(title=model, xscale="log", yscale="log", ylabel="KL, nats per token")
            axes.set_facecolor("none")
            sizes = sorted({round(row["bytes"]) for row in rows if row["model"] == model})
            ticks = [2**n for n in range(4, 16) if sizes[0] / 1.5 < 2**n < sizes[-1] * 1.5]
            axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
        axes.set_xlabel("bytes of the cache per token per layer")
        names = {ORIGINAL: ORIGINAL_COLOR, "converted by kvfold": RESULT_COLOR}
        handles = [Line2D([], [], color=color, label=name, lw=4) for name, color in names.items()]
        handles += [
            Line2D([], [], color=GRAY, marker=marker, label=name, ls="")
            for name, marker in CACHES.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("name", help="of the model, in the table and the figure")
    parser.add_argument(
        "--text", type=Path, help="held-out text; default: that which ships with kvfold"
    )
    parser.add_argument(
        "--result",
        action="append",
        type=lambda text: text.split("=", 1),
        default=[],
        metavar="NAME=FOLDER",
        help="a converted checkpoint",
    )
    parser.add_argument("--json", type=Path, required=True, help="continued where it exists")
    parser.add_argument("--figure", type=Path, help="SVG or PNG")
    args = parser.parse_args()
    header = {"samples": SAMPLES, "length": LENGTH}
    continue_rows(args.json, header, lambda done: measure_missing_rows(args, done), show_row)
    if args.figure is not None:
        draw_figure(json.loads(args.json.read_text())["rows"], args.figure)


if __name__ == "__main__":
    main()
