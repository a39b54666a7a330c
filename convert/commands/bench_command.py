"""``kvfold bench``: decode speed, cache and memory of models side by side."""

from typing import TYPE_CHECKING

import click

from kvfold.convert.console import check_files, json_option, print_result, request_options
from kvfold.convert.formatting import format_bytes, format_table
from kvfold.convert.request import BenchRequest

if TYPE_CHECKING:
    from kvfold.convert.measure.bench import Benchmark, BenchRow

_COLUMNS = ("model", "prefill/s", "tokens/s", "ms/step", "cache", "peak", "ratio")
_LONGEST_NAME = 24  # characters; the table then fits a terminal of 80 columns


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
    print_result(json_file, benchmark.to_dict, format_benchmark(benchmark))


def format_benchmark(benchmark: "Benchmark") -> str:
    """A table for each context and batch; a model that was not measured gives the reason."""
    lines = [
        f"{benchmark.device}, {benchmark.threads} threads, {benchmark.dtype}",
        f"{benchmark.cache} cache, kvfold {benchmark.kvfold}, torch {benchmark.torch},"
        f" transformers {benchmark.transformers}",
    ]
    for context, batch in sorted({(row.context, row.batch) for row in benchmark.rows}):
        rows: list[tuple[str, ...]] = [_COLUMNS]
        rows += [
            _format_row(row)
            for row in benchmark.rows
            if (row.context, row.batch) == (context, batch)
        ]
        lines += ["", f"{context} tokens in the cache, batch {batch}", *format_table(rows)]
    if any(row.form == "absorbed" for row in benchmark.rows):
        lines.append("\nstock: as transformers loads it; absorbed: after kvfold.attention.absorb")
    return "\n".join(lines)


def _format_row(row: "BenchRow") -> tuple[str, ...]:
    name = row.model if len(row.model) <= _LONGEST_NAME else f"...{row.model[3 - _LONGEST_NAME :]}"
    if row.failed is not None:
        return (name, f"does not run: {row.failed}")
    if row.needed_bytes is not None:
        needed = format_bytes(row.needed_bytes)
        return (name, f"does not fit: needs {needed}, {format_bytes(row.free_bytes or 0)} is free")
    return (
        name,
        "-" if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:.0f}",
        f"{row.decode_tokens_per_s:.1f}",
        f"{row.step_ms:.1f}",
        format_bytes(row.cache_bytes or 0),
        "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
    )
