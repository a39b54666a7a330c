"""``kvfold demo``: convert the shipped model to every target, load each result with transformers,
and measure it.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvfold.convert.commands.inspect_command import format_inspection
from kvfold.convert.console import STDOUT, check_files, json_option, print_result
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_table
from kvfold.convert.options import to_argv

_WINDOWS = 32
_LENGTH = 256
_TEXT = {"samples": 16, "seq_len": 256}
# As options of `kvfold convert`.
CONVERSIONS: tuple[dict[str, Any], ...] = (
    {"to": "gqa", "kv_heads": 4, "method": "mean"},
    {"to": "gqa", "kv_heads": 4, "method": "principal", **_TEXT},
    {"to": "gqa", "kv_heads": 2, "method": "mean"},
    {"to": "gqa", "kv_heads": 2, "method": "principal", **_TEXT},
    {"to": "mqa", "method": "mean"},
    {"to": "mqa", "method": "principal", **_TEXT},
    {"to": "mla", "kv_rank": 32, "rope_dim": 32, "method": "svd"},
    {"to": "mla", "kv_rank": 32, "rope_dim": 32, "method": "principal", **_TEXT},
    {
        "to": "mla",
        "kv_rank": 32,
        "rope_dim": 32,
        "method": "principal",
        "layout": "engine",
        **_TEXT,
    },
)


@dataclass(frozen=True)
class DemoRow:
    """A row of the table: one target."""

    target: str
    cache_elements: int
    perplexity: float


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
        _create_empty(Path(folder))
    measured_on = f"{_WINDOWS} x {_LENGTH} held-out tokens"
    with (
        redirect_stdout(sys.stderr if json_file == STDOUT else sys.stdout),
        tempfile.TemporaryDirectory(prefix="kvfold-demo-") as temporary,
    ):
        rows = _convert_and_measure(Path(folder or temporary))
        print("", *_format_rows(rows), sep="\n")
        print(f"\nMeasured on {measured_on}, which no conversion was calibrated on.")
        if folder is not None:
            print(
                f"\nThe converted checkpoints are in {folder}: load them with transformers'"
                " AutoModelForCausalLM."
            )
        print("next: kvfold sweep MODEL compares suitable targets of a model of your own")
    print_result(
        json_file, lambda: {"measured_on": measured_on, "targets": list(map(asdict, rows))}, ""
    )


def _create_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} must be a new or empty folder; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be created ({error.strerror}); name another folder"
        ) from error


def _convert_and_measure(folder: Path) -> list[DemoRow]:
    """Rows of the original and of every conversion, written to ``folder``; prints each command."""
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
    facts = inspect_checkpoint(str(model))
    print(format_inspection(facts) + "\n")
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    # The model is so small that several threads would mostly wait for one another.
    torch.set_num_threads(1)
    try:
        tokens = token_windows(
            AutoTokenizer.from_pretrained(model), read_text("held_out"), _WINDOWS, _LENGTH
        )
        elements = facts.cache.cache_elements
        rows = [DemoRow("the original (MHA)", elements, checkpoint_perplexity(model, tokens))]
        for options in CONVERSIONS:
            name = "-".join(str(value) for option, value in options.items() if option not in _TEXT)
            print(f"kvfold convert MODEL {name} {' '.join(to_argv(options))}", flush=True)
            request = ConvertRequest(
                model=str(model), out=str(folder / name), quiet=True, **options
            )
            layout = convert_checkpoint(request).plan.layout
            label = f"{layout.kind}, {request.resolved_method}"
            if request.layout:
                label += f", layout {request.layout}"
            perplexity = checkpoint_perplexity(folder / name, tokens)
            rows.append(DemoRow(label, layout.cache_elements, perplexity))
    finally:
        torch.set_num_threads(threads)
    return rows


def _format_rows(rows: Sequence[DemoRow]) -> list[str]:
    """The rows as lines of a table; savings and perplexities are relative to the first row, the
    original model.
    """
    source_elements = rows[0].cache_elements
    before = f"{rows[0].perplexity:.2f}"
    cells = [["target", "cache elements per", "cache", "held-out", "perplexity"]]
    cells += [["", "token per layer", "saving", "before", "after"]]
    for row in rows:
        elements = row.cache_elements
        saving = f"{100 * (1 - elements / source_elements):.1f} %"
        cells.append([row.target, str(elements), saving, before, f"{row.perplexity:.2f}"])
    return format_table(cells)
