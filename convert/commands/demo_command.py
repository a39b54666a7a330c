"""``kvfold demo``: convert the shipped model to every target, load each result with transformers,
and measure it.
"""

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.commands.inspect_command import format_inspection
from kvfold.convert.console import STDOUT, check_files, json_option, print_result
from kvfold.convert.formatting import format_table
from kvfold.convert.options import format_argv

_WINDOWS = 32
_LENGTH = 256
_TEXT = {"samples": 16, "seq_len": 256}
_MLA = {"to": "mla", "kv_rank": 32, "rope_dim": 32}
# As options of `kvfold convert`, by folder: published baselines beside kvfold's own method.
CONVERSIONS: dict[str, dict[str, Any]] = {
    "gqa-4-mean": {"to": "gqa", "kv_heads": 4, "method": "mean"},
    "gqa-4-principal": {"to": "gqa", "kv_heads": 4, **_TEXT},
    "gqa-2-mean": {"to": "gqa", "kv_heads": 2, "method": "mean"},
    "gqa-2-principal": {"to": "gqa", "kv_heads": 2, **_TEXT},
    "mqa-mean": {"to": "mqa", "method": "mean"},
    "mqa-principal": {"to": "mqa", **_TEXT},
    "mla-32-32-svd": {**_MLA, "method": "svd"},
    "mla-32-32-principal": {**_MLA, **_TEXT},
    "mla-32-32-principal-engine": {**_MLA, "layout": "engine", **_TEXT},
}


@click.command(short_help="Convert the small shipped model to every target and measure.")
@click.argument("folder", metavar="[DIR]", required=False)
@json_option()
def demo(folder: str | None, json_file: str | None) -> None:
    """Convert the small trained model that ships with kvfold to every target, and measure every
    result.

    The converted checkpoints are kept in DIR; without DIR they are written to a temporary folder
    and removed.
    """
    check_files(json_file)
    if folder is not None:
        check_output(folder, overwrite=None)
    measured_on = f"{_WINDOWS} x {_LENGTH} held-out tokens"
    with (
        redirect_stdout(sys.stderr if json_file == STDOUT else sys.stdout),
        tempfile.TemporaryDirectory(prefix="kvfold-demo-") as temporary,
    ):
        rows = _convert_and_measure(Path(folder or temporary))
        print("", *_format_rows(rows), sep="\n")
        print(f"\nMeasured on {measured_on}, which no conversion was calibrated on.")
        if folder is not None:
            print(f"The converted checkpoints are in {folder}: AutoModelForCausalLM loads them.")
        print("next: kvfold sweep MODEL compares suitable targets of a model of your own")
    print_result(json_file, lambda: {"measured_on": measured_on, "targets": rows}, "")


def _convert_and_measure(folder: Path) -> list[dict[str, Any]]:
    """Rows with target, cache elements and perplexity of the original and of every conversion,
    which are written to ``folder``; prints each command.
    """
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.data import demo_folder, read_text
    from kvfold.convert.measure.inspect import inspect_checkpoint
    from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows
    from kvfold.convert.request import ConvertRequest

    model = demo_folder()
    print(
        "A small Llama-architecture model, trained on the Python library's documentation. The demo"
        f" takes about\ntwo minutes on one core: {len(CONVERSIONS)} conversions, with a measurement"
        " of each.\n"
    )
    inspection = inspect_checkpoint(model)
    print(format_inspection(inspection) + "\n")
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    # The model is so small that several threads would mostly wait for one another.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = token_windows(tokenizer, read_text("held_out"), _WINDOWS, _LENGTH)
    rows: list[dict[str, Any]] = [
        {
            "target": "the original (MHA)",
            "cache_elements": inspection.cache.cache_elements,
            "perplexity": checkpoint_perplexity(model, tokens),
        }
    ]
    for name, options in CONVERSIONS.items():
        print(f"kvfold convert MODEL {name} {' '.join(format_argv(options))}", flush=True)
        request = ConvertRequest(model=str(model), out=str(folder / name), quiet=True, **options)
        output = convert_checkpoint(request).plan.output
        label = f"{output.kind}, {request.resolved_method}"
        if request.layout:
            label += f", layout {request.layout}"
        rows.append(
            {
                "target": label,
                "cache_elements": output.cache_elements,
                "perplexity": checkpoint_perplexity(folder / name, tokens),
            }
        )
    torch.set_num_threads(threads)
    return rows


def _format_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of a table; savings and perplexities are relative to the first row, the
    original model.
    """
    before = f"{rows[0]['perplexity']:.2f}"
    cells = [["target", "cache elements per", "cache", "held-out", "perplexity"]]
    cells += [["", "token per layer", "saving", "before", "after"]]
    for row in rows:
        elements = row["cache_elements"]
        saving = f"{100 * (1 - elements / rows[0]['cache_elements']):.1f} %"
        cells.append([row["target"], str(elements), saving, before, f"{row['perplexity']:.2f}"])
    return format_table(cells)
