"""``kvfold eval``: a converted checkpoint and its source on tasks and long contexts."""

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import check_files, json_option, request_options, tell
from kvfold.convert.request import EvalRequest
from kvfold.convert.text.corpus import check_sources


@click.command("eval", short_help="Compare OUT with MODEL on tasks and long contexts.")
@request_options(EvalRequest, before={"quiet": [json_option()]})
def evaluate(request: EvalRequest, json_file: str | None) -> None:
    """Compare the converted checkpoint OUT with MODEL on the same documents, with 95 % intervals of
    the differences.

    Measures whether each model finds words hidden in long texts, and its loss by position; neither
    needs a download. With --tasks, also runs tasks of lm-evaluation-harness. The models are loaded
    one at a time, each as a whole.
    """
    check_files(json_file)
    check_sources(filter(None, [request.text]), "text")
    if not request.quiet:
        click.echo(f"reading {request.model}", err=True)
    check_opens(request.model, request.out)
    from kvfold.convert.measure.eval import eval_checkpoints

    comparison = eval_checkpoints(request)
    tell(json_file, comparison.to_dict, comparison.table())
