"""``kvfold demo``: convert the model that ships with kvfold to every target, load each with transformers, measure."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.options import command_words

_WINDOWS, _LENGTH = 32, 256


@dataclass(frozen=True)
class Row:
    """One target of the table. ``elements``: KV-cache elements per token per layer."""

    target: str
    elements: int
    perplexity: float


# Options of `kvfold convert`.
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
    {"to": "mla", "kv_rank": 32, "rope_dim": 32, "method": "principal", "layout": "engine", **_TEXT},
)


def run_demo(folder: str | None, echo: Callable[[str], None]) -> list[Row]:
    """Inspect, convert and measure; ``echo`` gets every line. Raises InputError when ``folder`` is not empty."""
    from kvfold.convert.data import demo_folder
    from kvfold.convert.measure.inspect import inspect_checkpoint

    model = demo_folder()
    echo("A small Llama-architecture model, trained on the Python library's documentation. What follows takes about")
    echo(f"two minutes of one core: {len(CONVERSIONS)} conversions, each measured.\n")
    facts = inspect_checkpoint(str(model))
    echo(facts.summary() + "\n")
    with _workplace(folder) as place, _one_thread():
        rows = _measure_all(model, facts.cache.numbers_per_token_and_layer, place, echo)
    echo("\n" + table(rows))
    echo(f"\nMeasured on {_WINDOWS} x {_LENGTH} tokens of text that no conversion read.")
    if folder is not None:
        echo(f"\nThe converted checkpoints are in {folder}: load one with transformers' AutoModelForCausalLM.")
    echo(f"next: kvfold sweep {model} compares targets that suit a model; put yours in its place")
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread in the block: the model is so small that several would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _workplace(folder: str | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="kvfold-demo-") as temporary:
            yield Path(temporary)
        return
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{place}: expected a new or an empty folder, found it in use; name another")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be made ({error.strerror}); name another folder") from error
    yield place


def _measure_all(model: Path, elements: int, place: Path, echo: Callable[[str], None]) -> list[Row]:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from kvfold.convert.conversion.run import convert_checkpoint
    from kvfold.convert.data import read_text
    from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows
    from kvfold.convert.request import ConvertRequest

    logging.disable_progress_bar()
    tokens = token_windows(AutoTokenizer.from_pretrained(model), read_text("held_out"), _WINDOWS, _LENGTH)
    rows = [Row("the original (MHA)", elements, checkpoint_perplexity(model, tokens))]
    for options in CONVERSIONS:
        name = "-".join(str(value) for option, value in options.items() if option not in _TEXT)
        echo(f"kvfold convert MODEL {name} {' '.join(command_words(options))}")
        request = ConvertRequest(model=str(model), out=str(place / name), quiet=True, **options)
        layout = convert_checkpoint(request).plan.layout
        rows.append(
            Row(_label(layout.kind, request), layout.cache_elements, checkpoint_perplexity(place / name, tokens))
        )
    return rows


def _label(kind: str, request: Any) -> str:
    return f"{kind}, {request.resolved_method}" + (f", layout {request.layout}" if request.layout else "")


def rows_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as ``--json`` has them, the original first."""
    return {
        "measured_on": f"{_WINDOWS} x {_LENGTH} held-out tokens",
        "targets": [
            {
                "target": row.target,
                "cache_elements_per_token_per_layer": row.elements,
                "perplexity": row.perplexity,
            }
            for row in rows
        ],
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as text; savings and perplexities are compared with the first, the original."""
    width = max(len(row.target) for row in rows)
    first = rows[0]
    lines = [
        f"{'target':{width}}  {'cache elements per':>18}  {'cache':>7}  {'held-out perplexity':>22}",
        f"{'':{width}}  {'token per layer':>18}  {'saving':>7}  {'before':>10}  {'after':>10}",
    ]
    lines += [
        f"{row.target:{width}}  {row.elements:18}  {100 * (1 - row.elements / first.elements):5.1f} %"
        f"  {first.perplexity:10.2f}  {row.perplexity:10.2f}"
        for row in rows
    ]
    return "\n".join(lines)
