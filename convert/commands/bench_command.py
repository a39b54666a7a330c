"""``kvfold bench``: decode speed, cache and memory of models side by side."""

from typing import TYPE_CHECKING, Any

import click

from kvfold.convert.console import add_request_options, json_option, print_result
from kvfold.convert.formatting import (
    count_columns,
    format_bytes,
    format_count,
    format_labeled_rows,
    format_table,
    wrap_text,
)
from kvfold.convert.request import BenchRequest

if TYPE_CHECKING:
    from kvfold.convert.measure.bench import Benchmark

_COLUMNS = ("model", "prefill/s", "tokens/s", "ms/step", "cache", "peak", "ratio")
_LONGEST_NAME = 24  # characters; the table then fits a terminal of 80 columns


@click.command(short_help="Decode speed, cache and memory of MODELs side by side.")
@add_request_options(BenchRequest)
@json_option
def bench(request: BenchRequest, json_file: str | None) -> None:
    """Time MODELs side by side: prefill, decoding, cache and memory, with ratios to the first.

    An MLA model is timed both stock, as transformers loads it, and absorbed, after
    `kvfold.attention.absorb`. Decoding starts from a cache of random values.
    """
    from kvfold.convert.measure.bench import bench_checkpoints

    benchmark = bench_checkpoints(request)
    print_result(json_file, lambda: vars(benchmark), format_benchmark(benchmark))


def format_benchmark(benchmark: "Benchmark") -> str:
    """The result as text: a table for each context length and batch size, and below it the reasons
    why models were not timed.
    """
    versions = ", ".join(f"{name} {version}" for name, version in benchmark.versions.items())
    device = f"{benchmark.device}, {format_count(benchmark.threads, 'thread')}, {benchmark.dtype}"
    lines = [format_labeled_rows([("device", device), ("versions", versions)])]
    combinations = {(row["context"], row["batch"]) for row in benchmark.rows}
    for context, batch in sorted(combinations):
        rows = [row for row in benchmark.rows if (row["context"], row["batch"]) == (context, batch)]
        table = [_format_benchmark_row(row) for row in rows if "failed" not in row]
        title = f"{context} tokens in the cache, batch {batch}"
        lines += ["", title, *format_table([_COLUMNS, *table])]
        for row in rows:
            if "failed" in row:
                reason = f"{row['model']} does not run: {row['failed']}"
                lines += wrap_text(reason, count_columns())
    return "\n".join(lines)


def _format_benchmark_row(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a table row with one model's times, speed, cache and memory."""
    name = row["model"]
    if len(name) > _LONGEST_NAME:
        name = f"...{name[3 - _LONGEST_NAME :]}"
    prefill = row.get("prefill_tokens_per_s")
    return (
        name,
        "-" if prefill is None else f"{prefill:.0f}",
        f"{row['decode_tokens_per_s']:.1f}",
        f"{row['step_ms']:.1f}",
        format_bytes(row["cache_bytes"]),
        format_bytes(row["peak_bytes"] or 0),
        f"{row['ratio']:.2f}" if "ratio" in row else "-",
    )
