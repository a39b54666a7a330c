"""``kvfold eval``: a converted checkpoint and its source on tasks and long contexts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import check_files, json_option, print_result, request_options
from kvfold.convert.formatting import format_table
from kvfold.convert.request import EvalRequest
from kvfold.convert.text.corpus import check_sources

if TYPE_CHECKING:
    from kvfold.convert.measure.eval import Evaluation, Paired

_WIDTHS = (27, 9, 7, 7, 17)


@click.command("eval", short_help="Compare OUT with MODEL on tasks and long contexts.")
@request_options(EvalRequest, before={"quiet": [json_option()]})
def evaluate(request: EvalRequest, json_file: str | None) -> None:
    """Compare the converted checkpoint OUT with MODEL on the same documents, with 95 % intervals of
    the differences.

    Measures whether each model finds a word hidden in long texts, and its loss by position; neither
    needs a download. With --tasks, also compares the models' replies, or runs tasks of
    lm-evaluation-harness. The models are loaded one at a time, each as a whole.
    """
    check_files(json_file)
    check_sources(filter(None, [request.text]), "text")
    if not request.quiet:
        click.echo(f"reading {request.model}", err=True)
    check_opens(request.model, request.out)
    from kvfold.convert.measure.eval import eval_checkpoints

    evaluation = eval_checkpoints(request)
    print_result(json_file, evaluation.to_dict, format_evaluation(evaluation))


def format_evaluation(evaluation: "Evaluation") -> str:
    """The results as text, with a section for each kind of measurement."""
    rows: list[Sequence[str]] = []
    if evaluation.retrieval:
        rows.append(("retrieval, right answers", "documents", "source", "result", "difference"))
        for answers in evaluation.retrieval:
            name = f"{answers.task} at {answers.length} tokens"
            cells = _format_row(name, answers, ".1f", ".1f", percent=True)
            rows.append((*cells[:-1], "the source guesses") if answers.guesses else cells)
        chance = 100 * evaluation.retrieval[0].chance
        rows += [(f"(a guess is right in {chance:.1f} %)",), ("",)]
    rows.append(("perplexity by position", "windows", "source", "result", "excess, nats"))
    for losses in evaluation.positions:
        name = f"tokens {losses.start} to {losses.end}"
        rows.append(_format_row(name, losses, ".2f", ".4f"))
    if evaluation.tasks:
        rows += [("",), ("task", "documents", "source", "result", "difference")]
        for scores in evaluation.tasks:
            rows.append(_format_row(f"{scores.task}, {scores.metric}", scores, ".3f", ".3f"))
    heading = [
        f"{evaluation.out} against {evaluation.model}",
        f"text: {evaluation.text}",
        "differences are paired by document, with 95 % intervals",
        "",
    ]
    return "\n".join([*heading, *format_table(rows, _WIDTHS)])


def _format_row(
    name: str, row: "Paired", mean_format: str, difference_format: str, percent: bool = False
) -> tuple[str, ...]:
    scale = 100 if percent else 1
    unit = " %" if percent else ""
    difference = f"{scale * row.difference:+{difference_format}}"
    if row.margin is not None:
        difference += f" ± {scale * row.margin:{difference_format}}"
    return (
        name,
        f"{row.documents}",
        f"{scale * row.source:{mean_format}}{unit}",
        f"{scale * row.student:{mean_format}}{unit}",
        difference,
    )
