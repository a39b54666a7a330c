"""``kvfold demo``: convert the shipped model to every target, load each result with transformers,
and measure it.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.options import command_words
from kvfold.convert.sizes import table

_WINDOWS = 32
_LENGTH = 256


@dataclass(frozen=True)
class DemoRow:
    """A row of the table: one target."""

    target: str
    cache_elements_per_token_per_layer: int
    perplexity: float


# As options of `kvfold convert`.
_TEXT = {"samples": 16, "seq_len": 256}
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


def run_demo(folder: str | None, echo: Callable[[str], None]) -> dict[str, Any]:
    """Inspect, convert and measure; returns JSON values. ``echo`` prints a line. InputError if
    ``folder`` has files.
    """
    import torch

    from kvfold.convert.data import demo_folder
    from kvfold.convert.measure.inspect import inspect_checkpoint

    model = demo_folder()
    echo(
        "A small Llama-architecture model, trained on the Python library's documentation. The demo"
        " takes about"
    )
    echo(f"two minutes on one core: {len(CONVERSIONS)} conversions, with a measurement of each.\n")
    facts = inspect_checkpoint(str(model))
    echo(facts.summary() + "\n")
    if folder is not None:
        place = Path(folder)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InputError(f"{place} must be a new or empty folder; name another folder")
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{place}: cannot be created ({error.strerror}); name another folder"
            ) from error
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="kvfold-demo-") as temporary:
        # The model is so small that several threads would mostly wait for one another.
        torch.set_num_threads(1)
        try:
            rows = _measure_all(
                model, facts.cache.numbers_per_token_and_layer, Path(folder or temporary), echo
            )
        finally:
            torch.set_num_threads(threads)
    echo("\n" + "\n".join(_compared(rows)))
    echo(
        f"\nMeasured on {_WINDOWS} x {_LENGTH} held-out tokens, which no conversion was"
        " calibrated on."
    )
    if folder is not None:
        echo(
            f"\nThe converted checkpoints are in {folder}: load them with transformers'"
            " AutoModelForCausalLM."
        )
    echo(
        f"next: kvfold sweep {model} compares suitable targets; replace the path by your own model"
    )
    return {
        "measured_on": f"{_WINDOWS} x {_LENGTH} held-out tokens",
        "targets": list(map(asdict, rows)),
    }


def _measure_all(
    model: Path, elements: int, place: Path, echo: Callable[[str], None]
) -> list[DemoRow]:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.data import read_text
    from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows
    from kvfold.convert.request import ConvertRequest

    logging.disable_progress_bar()
    tokens = token_windows(
        AutoTokenizer.from_pretrained(model), read_text("held_out"), _WINDOWS, _LENGTH
    )
    rows = [DemoRow("the original (MHA)", elements, checkpoint_perplexity(model, tokens))]
    for options in CONVERSIONS:
        name = "-".join(str(value) for option, value in options.items() if option not in _TEXT)
        echo(f"kvfold convert MODEL {name} {' '.join(command_words(options))}")
        request = ConvertRequest(model=str(model), out=str(place / name), quiet=True, **options)
        layout = convert_checkpoint(request).plan.layout
        label = f"{layout.kind}, {request.resolved_method}" + (
            f", layout {request.layout}" if request.layout else ""
        )
        rows.append(
            DemoRow(label, layout.cache_elements, checkpoint_perplexity(place / name, tokens))
        )
    return rows


def _compared(rows: Sequence[DemoRow]) -> list[str]:
    """The rows as lines of a table; savings and perplexities are relative to the first row, the
    original model.
    """
    whole = rows[0].cache_elements_per_token_per_layer
    before = f"{rows[0].perplexity:.2f}"
    cells = [["target", "cache elements per", "cache", "held-out", "perplexity"]]
    cells += [["", "token per layer", "saving", "before", "after"]]
    for row in rows:
        elements = row.cache_elements_per_token_per_layer
        saving = f"{100 * (1 - elements / whole):.1f} %"
        cells.append([row.target, str(elements), saving, before, f"{row.perplexity:.2f}"])
    return table(cells)
