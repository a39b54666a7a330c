"""``kvfold bench``: decode speed, cache and memory of models side by side."""

from typing import TYPE_CHECKING

import click

from kvfold.convert.console import check_files, json_option, request_options, tell
from kvfold.convert.formatting import format_bytes, format_table
from kvfold.convert.request import BenchRequest

if TYPE_CHECKING:
    from kvfold.convert.measure.bench import Benchmark, BenchRow

_COLUMNS = (
    "model",
    "context",
    "batch",
    "prefill tok/s",
    "decode tok/s",
    "ms/step",
    "attn ms",
    "cache",
    "peak",
    "ratio",
)


@click.command(short_help="Decode speed, cache and memory of MODELs side by side.")
@request_options(BenchRequest)
@json_option()
def bench(request: BenchRequest, json_file: str | None) -> None:
    """Time MODELs side by side: prefill, decoding, cache and memory, with ratios to the first.

    An MLA model is timed both stock and absorbed. Decoding starts from a cache of random values.
    """
    check_files(json_file)
    from kvfold.convert.measure.bench import bench_checkpoints

    benchmark = bench_checkpoints(request)
    tell(json_file, benchmark.to_dict, format_benchmark(benchmark))


def format_benchmark(benchmark: "Benchmark") -> str:
    """A line for each model, context and batch; one that was not measured gives the reason."""
    rows = sorted(benchmark.rows, key=lambda row: (row.context, row.batch))
    lines = [
        f"{benchmark.device}, {benchmark.threads} threads, {benchmark.dtype}, {benchmark.cache}"
        f" cache; kvfold {benchmark.kvfold}, torch {benchmark.torch}, transformers"
        f" {benchmark.transformers}",
        "",
        *format_table([_COLUMNS, *map(_format_row, rows)]),
    ]
    if any(row.form == "absorbed" for row in rows):
        lines.append("\nstock: as transformers loads it; absorbed: after kvfold.attention.absorb")
    return "\n".join(lines)


def _format_row(row: "BenchRow") -> list[str]:
    cells = [row.model, str(row.context), str(row.batch)]
    if row.failed is not None:
        return [*cells, f"does not run: {row.failed.split(': ', 1)[-1]}"]
    if row.needed_bytes is not None:
        free = format_bytes(row.free_bytes or 0)
        return [
            *cells,
            f"does not fit: needs {format_bytes(row.needed_bytes)}, but only {free} is free",
        ]
    return [
        *cells,
        "-" if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:.0f}",
        f"{row.decode_tokens_per_s:.1f}",
        f"{row.step_ms:.1f}",
        f"{row.attention_ms:.1f}",
        format_bytes(row.cache_bytes or 0),
        format_bytes(row.peak_bytes or 0),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
    ]
