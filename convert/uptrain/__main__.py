"""Train a converted checkpoint a little further: ``python -m kvfold.convert.uptrain MODEL OUT --text FILE ...``.

On several processes: ``torchrun --nproc-per-node 8 -m kvfold.convert.uptrain ...`` or ``accelerate launch --config_file
recipes/fsdp.yaml recipes/uptrain.py ...``. A global batch is ``--batch-tokens`` whatever their number, and the order of
the text depends on ``--seed`` alone, so the losses do not depend on how many processes there are.

MODEL is what ``kvfold convert`` wrote (or any causal language model). With ``--teacher``, the checkpoint that it was
converted from, the loss is the KL from that model's next-token distributions: labels only say what happened to come
next, the teacher says what it would have expected, so the drift closes with far fewer tokens. OUT is in MODEL's
layout, with its config, tokenizer and generation config. Beside it, in ``OUT.training``, lie ``log.jsonl``, the curve
and, while the run lasts, its checkpoints, from which ``--resume`` goes on.

The constant channel of layout ``deepseek`` stays what it is; the live norm of layout ``engine`` is trained.
"""

import sys
from typing import Any, NoReturn

import click

from kvfold.convert.console import run_command
from kvfold.convert.request import DEVICES
from kvfold.convert.uptrain import request as ur

_NAME = "python -m kvfold.convert.uptrain"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
@click.argument("model")
@click.argument("out")
@click.option("--text", required=True, metavar="FILE|DATASET", help="Text: .txt, .jsonl, or a datasets name; streamed.")
@click.option("--eval-text", metavar="FILE|DATASET", help="Held-out text; default: some of --text is kept aside.")
@click.option("--teacher", metavar="MODEL", help="Distil from this checkpoint: the one MODEL was converted from.")
@click.option(
    "--distill-weight", type=float, metavar="W", help="Share of the distillation in the loss; with --teacher 1."
)
@click.option("--temperature", type=float, default=1.0, help="Softens both distributions in the distillation.")
@click.option("--train", type=click.Choice(ur.TRAINED), default="all", help="All weights, or those of attention only.")
@click.option("--steps", type=int, default=1000, help="Optimizer steps.")
@click.option("--batch-tokens", type=int, default=65536, help="Tokens per step, over all processes.")
@click.option("--seq-len", type=int, default=1024, help="Tokens per packed sequence.")
@click.option("--micro-batch", type=int, default=4, help="At most so many sequences at once on a device.")
@click.option(
    "--lr",
    type=float,
    help="Highest learning rate (AdamW), relative to each tensor's size; default: 0.05 / sqrt(model width).",
)
@click.option("--schedule", type=click.Choice(ur.SCHEDULES), default="cosine", help="How it falls to 0, if it does.")
@click.option("--warmup", type=float, default=0.05, help="Share of the steps in which it rises.")
@click.option(
    "--weight-decay", type=float, default=0.0, help="Of weights, not of biases and norms; times the learning rate."
)
@click.option("--clip", type=float, default=1.0, help="Largest norm of the gradient; 0: no limit.")
@click.option("--seed", type=int, default=0, help="Draws the order of the text and what is kept aside.")
@click.option(
    "--precision",
    type=click.Choice(ur.PRECISIONS),
    default="auto",
    help="Of computation; weights are trained in float32. auto: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option("--gradient-checkpointing", is_flag=True, help="Compute activations twice rather than keep them.")
@click.option("--device", type=click.Choice(DEVICES), default="auto")
@click.option("--eval-every", type=int, default=100, metavar="N", help="Measure the drift every N steps; 0: never.")
@click.option("--eval-sequences", type=int, default=64, help="Held-out sequences.")
@click.option("--log-every", type=int, default=10, metavar="N", help="Write the mean loss every N steps.")
@click.option("--save-every", type=int, default=200, metavar="N", help="Checkpoint every N steps; 0: never.")
@click.option("--plot", metavar="FILE", help="Curve to draw (PNG, SVG, PDF); default: OUT.training/curve.png.")
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="Largest weight file.")
@click.option("--resume", is_flag=True, help="Continue a killed run at its last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace OUT; without --resume also forget a killed run.")
@click.option("--quiet", is_flag=True, help="No progress, no summary.")
@click.option("--trust-remote-code", is_flag=True, help="Permit code that the checkpoint carries to run.")
def uptrain(**options: Any) -> None:
    """Train MODEL, as `kvfold convert` wrote it, a little further and write the result to the folder OUT."""
    request = ur.UptrainRequest(**options)
    if request.plot is not None:
        from kvfold.convert.console import check_plot

        check_plot(request.plot)
    from kvfold.convert.uptrain.run import summary
    from kvfold.convert.uptrain.run import uptrain as run

    done = run(request)
    if done.rows and not request.quiet:
        click.echo(summary(request, done))


def main() -> NoReturn:
    """Run the command line; exit status as that of ``kvfold``."""
    run_command(uptrain, _NAME, sys.argv[1:], "OUT was not written; continue with --resume")


if __name__ == "__main__":
    main()
