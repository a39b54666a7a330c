"""Saving against drift: the model that ships, converted to many sizes, refined and not, as figures
and as a picture.

    python recipes/benchmarks/curve.py --json recipes/results/curve.json --plot
    recipes/results/curve.png python recipes/benchmarks/curve.py --from recipes/results/curve.json
    --plot curve.svg  # draw it again

Every conversion is written, loaded by stock transformers in float32 and measured as `kvfold demo`
does: 32 windows of 256 held-out tokens. Calibration: 128 x 256 tokens of the text that ships.
Excess loss is ln(perplexity / perplexity of the original), nats per token. One thread; about ten
minutes on an idle machine.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from measured import conditions
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint, inspect_checkpoint
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows

WINDOWS = 32
LENGTH = 256
STEPS = 150
LINEAR = 1e-3  # nats: smaller losses are drawn on a linear scale
TEXT = {"samples": 128, "seq_len": 256}
FOLDS: tuple[dict[str, Any], ...] = (
    {"to": "gqa", "kv_heads": 4},
    {"to": "gqa", "kv_heads": 2},
    {"to": "mqa"},
)
LATENTS: tuple[dict[str, Any], ...] = tuple(
    {"to": "mla", "kv_rank": rank, "rope_dim": rope} for rank, rope in ((48, 80), (32, 32), (24, 8))
)
ENGINES: tuple[dict[str, Any], ...] = (
    {"to": "mla", "kv_rank": 32, "rope_dim": 32, "layout": "engine"},
)
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "principal"},
    {"method": "principal", "refine": STEPS},
)
STYLES = {  # color and marker of a kind of attention; dashes tell how it was made
    "GQA, MQA": ("#5E81AC", "o"),
    "MLA": ("#BF616A", "s"),
    "MLA, layout engine": ("#A3BE8C", "^"),
}
DASHES = {"mean": ":", "principal": "--", f"refined, {STEPS} steps": "-"}


def conversions() -> list[tuple[str, str, dict[str, Any]]]:
    """Series, method and options of every conversion."""
    found = [("GQA, MQA", "mean", {**target, "method": "mean"}) for target in FOLDS]
    for series, targets in zip(STYLES, (FOLDS, LATENTS, ENGINES), strict=True):
        for method in METHODS:
            name = f"refined, {STEPS} steps" if "refine" in method else "principal"
            found += [(series, name, {**target, **method, **TEXT}) for target in targets]
    return found


def measure() -> Iterator[dict[str, Any]]:
    """A row per conversion; the original comes first."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = demo_folder()
    tokens = token_windows(
        AutoTokenizer.from_pretrained(model), read_text("held_out"), WINDOWS, LENGTH
    )
    before = checkpoint_perplexity(model, tokens)
    present = inspect_checkpoint(str(model)).cache.numbers_per_token_and_layer
    yield {"series": "original", "target": "MHA", "numbers": present, "perplexity": before}
    with tempfile.TemporaryDirectory(prefix="kvfold-curve-") as work:
        for index, (series, method, options) in enumerate(conversions()):
            out = Path(work) / str(index)
            request = ConvertRequest(model=str(model), out=str(out), quiet=True, **options)
            layout = convert_checkpoint(request).plan.layout
            after = checkpoint_perplexity(out, tokens)
            row = {"series": series, "method": method, "target": layout.kind, "options": options}
            row |= {
                "numbers": layout.cache_elements,
                "perplexity": after,
                "excess": math.log(after / before),
            }
            print(
                f"{series}, {row['target']}, {method}: {row['numbers']} elements,"
                f" {row['excess']:+.4f}",
                flush=True,
            )
            yield row


def report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and the machine and versions they hold for."""
    return {
        "what": (
            f"the model that ships with kvfold; excess loss in nats on {WINDOWS} x {LENGTH}"
            " held-out tokens"
        ),
        **conditions(),
        "rows": list(rows),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line per target, its excess before and after refinement."""
    first = rows[0]
    found = {}
    for row in rows[1:]:
        found.setdefault((row["series"], row["numbers"]), {})[row["method"]] = row
    lines = [
        "| target | cache elements | saving | mean | principal | refined |",
        "|---|---|---|---|---|---|",
    ]
    for (series, numbers), methods in found.items():
        some = methods.values()
        kinds = dict.fromkeys(row["target"] for row in some)
        cells = [f"{methods[name]['excess']:+.4f}" if name in methods else "" for name in DASHES]
        label = ", then ".join(kinds) + (", layout engine" if series.endswith("engine") else "")
        lines.append(
            f"| {label} | {numbers} | {100 * (1 - numbers / first['numbers']):.1f} % |"
            f" {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def mark_break(axes: Any) -> None:
    """Show where the logarithmic axis becomes linear: a shaded band, and two strokes through the
    axis at its ends.
    """
    axes.axhspan(-LINEAR, LINEAR, color="#ECEFF4", zorder=0)
    place = {
        "transform": axes.get_yaxis_transform(),
        "clip_on": False,
        "color": "#2E3440",
        "lw": 1.2,
    }
    for edge in (-LINEAR, LINEAR):
        for shift in (-0.06, 0.06):
            at = edge * (1 + shift)
            axes.plot((-0.012, 0.012), (at - 0.04 * LINEAR, at + 0.04 * LINEAR), **place)
    axes.text(
        0.995,
        -0.9 * LINEAR,
        f"linear between -{LINEAR:g} and {LINEAR:g}",
        ha="right",
        va="bottom",
        fontsize=7,
        color="#777777",
        transform=axes.get_yaxis_transform(),
    )


def draw(report_data: dict[str, Any], path: Path) -> None:
    """Excess loss against cache elements, both on logarithmic axes (linear below a thousandth of a
    nat).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first = report_data["rows"][0]
    rows = report_data["rows"][1:]
    for series, (color, marker) in STYLES.items():
        for method, dashes in DASHES.items():
            points = sorted(
                (row["numbers"], row["excess"])
                for row in rows
                if (row["series"], row["method"]) == (series, method)
            )
            if points:
                face = color if method.startswith("refined") else "white"
                style = {
                    "color": color,
                    "marker": marker,
                    "linestyle": dashes,
                    "markerfacecolor": face,
                }
                axes.plot(*zip(*points, strict=True), label=f"{series}: {method}", **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.axhline(0, color="#777777", lw=0.8)
    excess = [1.5 * row["excess"] for row in rows]
    axes.set_ylim(min(-LINEAR, *excess), max(excess))
    ticks = sorted({row["numbers"] for row in rows}, reverse=True)
    axes.set_xticks(ticks, [f"{n}\n{100 * (1 - n / first['numbers']):.4g} %" for n in ticks])
    axes.invert_xaxis()
    axes.set_xlabel(
        f"KV-cache elements per token per layer (the original: {first['numbers']}), and the saving"
    )
    axes.set_ylabel("excess loss on held-out text, nats per token")
    mark_break(axes)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    machine = report_data["machine"]
    versions = report_data["versions"]
    note = (
        f"the model that ships; {machine['processor']}, {report_data['date']}, torch"
        f" {versions['torch']}"
    )
    axes.set_title(note, loc="left", fontsize=7, color="#777777")
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="measured", type=Path, help="figures of an earlier run instead of a new one"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--plot", type=Path, help="where to write the picture (.png, .svg); needs matplotlib"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in () if arguments.measured else measure():
        rows.append(row)
        if arguments.json:  # after every row: what was measured stays when the rest is not
            arguments.json.write_text(json.dumps(report(rows), indent=2) + "\n")
    found = json.loads(arguments.measured.read_text()) if arguments.measured else report(rows)
    if arguments.plot:
        draw(found, arguments.plot)
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
