"""``kvfold demo``: convert the shipped model to every target, load each result with transformers,
and measure it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from kvfold.convert.checkpoint.atomic import resolve_output_path
from kvfold.convert.commands.inspect_command import format_inspection
from kvfold.convert.console import check_output_files, json_option, print_result
from kvfold.convert.formatting import format_table
from kvfold.convert.options import format_argv

_WINDOWS = 32
_LENGTH = 256
# Options of `kvfold convert`, by folder: published baselines beside kvfold's own method.
TARGETS = json.loads(Path(__file__).with_name("demo_targets.json").read_text())


@click.command(short_help="Convert the small shipped model to every target and measure.")
@click.argument("folder", metavar="[DIR]", required=False)
@json_option
def demo(folder: str | None, json_file: str | None) -> None:
    """Convert the small trained model that ships with kvfold to every target, and measure every
    result. It takes about two minutes on one core.

    The converted checkpoints are kept in DIR; without DIR they are written to a temporary folder
    and removed.
    """
    check_output_files(json_file)
    if folder is not None:
        resolve_output_path(folder, overwrite=None)
    with tempfile.TemporaryDirectory(prefix="kvfold-demo-") as temporary:
        rows = _convert_to_all_targets(Path(folder or temporary))
    lines = [
        "",
        *_format_demo_table(rows),
        "",
        "cache: elements per token per layer; perplexity: on"
        f" {_WINDOWS} x {_LENGTH} tokens, on which no conversion was calibrated",
        "next: kvfold sweep MODEL compares suitable targets of a model of your own",
    ]
    print_result(json_file, lambda: {"targets": rows}, "\n".join(lines))


def _convert_to_all_targets(folder: Path) -> list[dict[str, Any]]:
    """Rows with target, cache elements and perplexity: the original model, then each conversion,
    which is written to ``folder``. Prints each command.
    """
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.data import demo_folder, read_text
    from kvfold.convert.measure.inspect import inspect_checkpoint
    from kvfold.convert.measure.losses import cut_token_windows, measure_perplexity
    from kvfold.convert.request import ConvertRequest

    model = demo_folder()
    inspection = inspect_checkpoint(model)
    click.echo(
        "A small Llama-architecture model, trained on the Python library's documentation.\n\n"
        f"{format_inspection(inspection)}\n",
        err=True,
    )
    logging.disable_progress_bar()
    # The model is so small that several threads would mostly wait for one another.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = cut_token_windows(tokenizer, read_text("held_out"), _WINDOWS, _LENGTH)
    rows = [
        {
            "target": "the original (MHA)",
            "cache_elements": inspection.cache.cache_elements,
            "perplexity": measure_perplexity(model, tokens),
        }
    ]
    for name, options in TARGETS.items():
        click.echo(f"kvfold convert MODEL {name} {' '.join(format_argv(options))}", err=True)
        request = ConvertRequest(model=str(model), out=str(folder / name), quiet=True, **options)
        plan = convert_checkpoint(request).plan
        rows.append(
            {
                "target": name,
                "cache_elements": plan.result.count_cache_elements(),
                "perplexity": measure_perplexity(folder / name, tokens),
            }
        )
    return rows


def _format_demo_table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of a table; savings are relative to the first row, the original model."""
    cells = [("target", "cache", "saving", "perplexity")]
    for row in rows:
        elements = row["cache_elements"]
        saving = f"{100 * (1 - elements / rows[0]['cache_elements']):.1f} %"
        cells.append((row["target"], str(elements), saving, f"{row['perplexity']:.2f}"))
    return format_table(cells)
