"""``kvfold bench``: decode speed, cache and memory of models side by side."""

import click

from kvfold.convert.console import check_files, json_option, request_options, tell
from kvfold.convert.request import BenchRequest


@click.command(short_help="Decode speed, cache and memory of MODELs side by side.")
@request_options(BenchRequest)
@json_option()
def bench(request: BenchRequest, json_file: str | None) -> None:
    """Time MODELs side by side: prefill, decoding, cache and memory, with ratios to the first.

    An MLA model is timed both stock and absorbed. Decoding starts from a cache of random values.
    """
    check_files(json_file)
    from kvfold.convert.measure.bench import bench_checkpoints

    report = bench_checkpoints(request)
    tell(json_file, report.to_dict, report.table())
