"""The command ``kvfold eval``. Heavy modules are imported inside it: ``--help`` must be quick."""

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import check_writable, request_options
from kvfold.convert.measure.options import json_file_option, tell
from kvfold.convert.request import EvalRequest


@click.command(name="eval", short_help="OUT and MODEL on tasks and long contexts, paired.")
@request_options(EvalRequest, before={"quiet": [json_file_option]})
def evaluate(request: EvalRequest, json_file: str | None) -> None:
    """Compare the converted checkpoint OUT with MODEL in use, paired by document with 95 % intervals.

    Without a download: whether words hidden in long texts are found again, and the loss by position. With --tasks also
    those of lm-evaluation-harness. Each model is in memory whole, one at a time.
    """
    from kvfold.convert.text.corpus import check_sources

    if json_file is not None:
        check_writable(json_file)
    check_sources(filter(None, [request.text]), "text")
    if not request.quiet:
        click.echo(f"reading {request.model}", err=True)
    check_opens(request.model, request.out)
    from kvfold.convert.measure.eval import eval_checkpoints

    found = eval_checkpoints(request)
    tell(json_file, found.to_dict, found.table())
