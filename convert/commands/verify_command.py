"""``kvfold verify``: whether a converted checkpoint is intact."""

import click

from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.console import check_output_files, json_option, print_result
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_labeled_rows
from kvfold.convert.progress import ProgressStages


@click.command(short_help="Check that OUT is intact: hashes, shapes, finite numbers.")
@click.argument("out")
@json_option
def verify(out: str, json_file: str | None) -> None:
    """Check that OUT is intact: hashes, shapes, loading, finite numbers.

    Reads every byte of OUT but runs no model. Compares the files with the hashes in kvfold.json,
    and the tensors with the class that config.json names (built on the meta device), and lists
    every difference.
    """
    from kvfold.convert.measure.verify import verify_checkpoint

    check_output_files(json_file)
    with ProgressStages()(f"verifying {out}"):
        verification = verify_checkpoint(out)
    files = f"no {RECORD} with hashes to compare files to"
    if verification.files:
        files = f"{verification.files} files match {RECORD}"
    rows = [
        ("intact", verification.origin),
        ("files", files),
        ("tensors", f"{verification.tensors} tensors match config.json"),
        ("values", f"all {verification.elements:,} are finite"),
    ]
    summary = "" if verification.problems else format_labeled_rows(rows)
    print_result(json_file, lambda: vars(verification), summary)
    if verification.problems:
        raise InputError(
            f"{verification.origin} is not what {RECORD} and config.json say; make it again",
            verification.problems,
        )
