"""The command ``kvfold eval``. Heavy modules are imported inside it: ``--help`` must be quick."""

from typing import Any

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import check_writable
from kvfold.convert.measure.options import compute_dtype_option, device_option, json_file_option, tell


@click.command(name="eval", short_help="OUT and MODEL on tasks and long contexts, paired.")
@click.argument("model")
@click.argument("out")
@click.option(
    "--tasks",
    metavar="NAME,NAME",
    default="",
    help="Tasks of lm-evaluation-harness, or FILE.yaml of one; needs the eval extra.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Documents of each task; default: all.")
@click.option(
    "--lengths",
    metavar="N,N",
    default="",
    help="Tokens of long contexts; default: MODEL's context (on a CPU at most 1024), and 1/2, 1/4, 1/8.",
)
@click.option("--samples", type=click.IntRange(2), help="Documents of each length; default: 32, on a CPU 16.")
@click.option("--text", metavar="FILE", help="Text to hide words in; default: held-out text that ships with kvfold.")
@click.option("--no-retrieval", is_flag=True, help="Only the loss by position, and --tasks.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Documents of a task at once.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@device_option
@compute_dtype_option
@json_file_option
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code in the checkpoints to run.")
def evaluate(
    model: str, out: str, tasks: str, lengths: str, no_retrieval: bool, json_file: str | None, **options: Any
) -> None:
    """Compare the converted checkpoint OUT with MODEL in use, paired by document with 95 % intervals.

    Without a download: whether words hidden in long texts are found again, and the loss by position. With --tasks also
    those of lm-evaluation-harness. Each model is in memory whole, one at a time.
    """
    from kvfold.convert.measure.bench import numbers
    from kvfold.convert.text.corpus import check_sources

    if json_file is not None:
        check_writable(json_file)
    check_sources(filter(None, [options["text"]]), "text")
    chosen = numbers(lengths, "--lengths") if lengths else ()
    if not options["quiet"]:
        click.echo(f"reading {model}", err=True)
    check_opens(model, out)
    from kvfold.convert.measure.eval import eval_checkpoints

    named = [task.strip() for task in tasks.split(",") if task.strip()]
    found = eval_checkpoints(model, out, tasks=named, lengths=chosen, retrieval=not no_retrieval, **options)
    tell(json_file, found.to_dict, found.table())
