"""``kvfold eval``: a converted checkpoint and its source on tasks and long contexts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import check_files, json_option, print_result, request_options
from kvfold.convert.formatting import format_table
from kvfold.convert.request import EvalRequest
from kvfold.convert.text.corpus import check_sources

if TYPE_CHECKING:
    from kvfold.convert.measure.eval import Evaluation


@click.command("eval", short_help="Compare OUT with MODEL on tasks and long contexts.")
@request_options(EvalRequest)
@json_option()
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
    print_result(json_file, lambda: vars(evaluation), format_evaluation(evaluation))


def format_evaluation(evaluation: "Evaluation") -> str:
    """The results as text, with a section for each kind of measurement."""
    columns = ("documents", "source", "result", "difference")
    rows: list[Sequence[str]] = []
    if evaluation.retrieval:
        rows.append(("retrieval, right answers", *columns))
        for row in evaluation.retrieval:
            cells = _format_row(f"needle at {row['length']} tokens", row)
            rows.append((*cells[:-1], "the source guesses") if row["guesses"] else cells)
        rows += [(f"(a guess is right in {evaluation.retrieval[0]['chance']:.3f})",), ("",)]
    rows.append(("loss by position, nats", *columns))
    for row in evaluation.positions:
        rows.append(_format_row(f"tokens {row['from']} to {row['to']}", row))
    if evaluation.tasks:
        rows += [("",), ("task", *columns)]
        for row in evaluation.tasks:
            rows.append(_format_row(f"{row['task']}, {row['metric']}", row))
    heading = [
        f"{evaluation.out} against {evaluation.model}",
        f"text: {evaluation.text}",
        "differences are paired by document, with 95 % intervals",
        "",
    ]
    return "\n".join([*heading, *format_table(rows)])


def _format_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    difference = f"{row['difference']:+.4f}"
    if row["margin"] is not None:
        difference += f" ± {row['margin']:.4f}"
    source = f"{row['source']:.3f}"
    return (name, str(row["documents"]), source, f"{row['student']:.3f}", difference)
