"""``kvfold eval``: a converted checkpoint and its source on tasks and long contexts."""

from typing import TYPE_CHECKING

import click

from kvfold.convert.console import (
    add_request_options,
    check_models_and_load_torch,
    json_option,
    print_result,
    require_finite_predictions,
)
from kvfold.convert.formatting import format_labeled_rows, format_table
from kvfold.convert.request import EvalRequest
from kvfold.convert.text.corpus import check_text_sources

if TYPE_CHECKING:
    from kvfold.convert.measure.eval import Evaluation


@click.command("eval", short_help="Compare OUT with MODEL on tasks and long contexts.")
@add_request_options(EvalRequest)
@json_option
def evaluate(request: EvalRequest, json_file: str | None) -> None:
    """Compare the converted checkpoint OUT with MODEL on the same documents, with 95 % intervals of
    the differences.

    Measures whether each model finds a word hidden in long texts, and its loss by position; neither
    needs a download. With --tasks, also compares the models' replies, or runs tasks of
    lm-evaluation-harness. The models are loaded one at a time, each as a whole.
    """
    check_text_sources([request.text], "text")
    check_models_and_load_torch(request.model, request.out, quiet=request.quiet)
    from kvfold.convert.measure.eval import eval_checkpoints

    evaluation = eval_checkpoints(request)
    print_result(json_file, lambda: vars(evaluation), format_evaluation(evaluation))
    for model, key in ((request.model, "source"), (request.out, "student")):
        require_finite_predictions(model, [row[key] for row in evaluation.rows])


def format_evaluation(evaluation: "Evaluation") -> str:
    """The evaluation as text for the terminal, one line for each measurement."""
    table: list[tuple[str, ...]] = [("task", "documents", "source", "result", "difference")]
    for row in evaluation.rows:
        difference = f"{row['difference']:+.4f}"
        if row["margin"] is not None:
            difference += f" ± {row['margin']:.4f}"
        if row.get("guesses"):
            difference = "the source guesses"
        means = (f"{row['source']:.3f}", f"{row['student']:.3f}")
        table.append((f"{row['task']}, {row['metric']}", str(row["documents"]), *means, difference))
    facts = [
        ("eval", f"{evaluation.out} against {evaluation.model}"),
        ("text", evaluation.text),
        ("rounded", evaluation.cache or ""),
        ("needle", "right answers (guesses: 1 in 8)"),
        ("loss", "nats per token, at these positions"),
        ("", "differences are paired by document, with 95 % intervals"),
    ]
    return "\n".join([format_labeled_rows(facts), "", *format_table(table)])
