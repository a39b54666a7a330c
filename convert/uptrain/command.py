"""The command ``kvfold uptrain``: training a converted checkpoint a little further.

On several processes: ``torchrun --nproc-per-node 8 -m kvfold.convert.uptrain ...`` or ``accelerate launch --config_file
recipes/fsdp.yaml recipes/uptrain.py ...``. A global batch is ``--batch-tokens`` whatever their number, and the order of
the text depends on ``--seed`` alone, so the losses do not depend on the number of processes.

MODEL is a checkpoint that ``kvfold convert`` wrote (or any causal language model). With ``--teacher``, the checkpoint
that it was converted from, the loss is the KL from that model's next-token distributions: labels only say which token
came next, the teacher says which were likely, so the drift closes with far fewer tokens. OUT is in MODEL's layout, with
its config, tokenizer and generation config. Beside it, in ``OUT.training``, lie ``log.jsonl``, the curve and, while the
run lasts, its tokens (4 bytes each) and its checkpoints, from which ``--resume`` continues.

The constant channel of layout ``deepseek`` is frozen; the live norm of layout ``engine`` is trained.
"""

from typing import Any

import click

from kvfold.convert.request import DEVICES
from kvfold.convert.uptrain import request as ur

INTERRUPTED = "OUT was not written; continue with --resume"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
@click.argument("model")
@click.argument("out")
@click.option("--text", required=True, metavar="FILE|DATASET", help="Text: .txt, .jsonl, or a datasets name.")
@click.option("--eval-text", metavar="FILE|DATASET", help="Held-out text; default: some of --text is held out.")
@click.option("--teacher", metavar="MODEL", help="Distill from this checkpoint: the one MODEL was converted from.")
@click.option(
    "--distill-weight",
    type=float,
    metavar="W",
    help="Weight of the distillation in the loss, 0 to 1; default with --teacher: 1.",
)
@click.option("--temperature", type=float, default=1.0, help="Temperature of both distributions in the distillation.")
@click.option("--train", type=click.Choice(ur.TRAINED), default="all", help="All weights, or those of attention only.")
@click.option("--steps", type=int, default=1000, help="Optimizer steps.")
@click.option("--batch-tokens", type=int, default=65536, help="Tokens per step, over all processes.")
@click.option("--seq-len", type=int, default=1024, help="Tokens per packed sequence.")
@click.option("--micro-batch", type=int, default=4, help="Sequences per device at once, at most.")
@click.option(
    "--relative-lr",
    "--lr",
    "relative_lr",
    type=float,
    metavar="RATE",
    help="Peak learning rate (AdamW) relative to the size of each tensor; default: 0.05 / sqrt(model width).",
)
@click.option("--schedule", type=click.Choice(ur.SCHEDULES), default="cosine", help="Learning-rate schedule.")
@click.option("--warmup", type=float, default=0.05, help="Warmup, as a fraction of the steps.")
@click.option(
    "--weight-decay", type=float, default=0.0, help="Weight decay (not of biases and norms), times the learning rate."
)
@click.option("--clip", type=float, default=1.0, help="Maximum gradient norm; 0: no clipping.")
@click.option("--seed", type=int, default=0, help="Draws the order of the text and the held-out part.")
@click.option(
    "--precision",
    type=click.Choice(ur.PRECISIONS),
    default="auto",
    help="Compute dtype; master weights stay float32. auto: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option("--gradient-checkpointing", is_flag=True, help="Recompute activations in the backward pass.")
@click.option("--device", type=click.Choice(DEVICES), default="auto")
@click.option(
    "--eval-every", type=int, default=100, metavar="N", help="Steps between measurements of the drift; 0: none."
)
@click.option("--eval-sequences", type=int, default=64, help="Held-out sequences.")
@click.option("--log-every", type=int, default=10, metavar="N", help="Steps between rows of the log.")
@click.option("--save-every", type=int, default=200, metavar="N", help="Steps between checkpoints; 0: none.")
@click.option("--plot", metavar="FILE", help="Curve to draw (PNG, SVG, PDF); default: OUT.training/curve.png.")
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="Largest weight file.")
@click.option("--resume", is_flag=True, help="Resume an interrupted run at its last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace OUT; without --resume also discard an interrupted run.")
@click.option("--quiet", is_flag=True, help="No progress, no summary.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code in the checkpoint to run.")
def uptrain(**options: Any) -> None:
    """Train MODEL further into OUT, at learning rates relative to the size of each tensor.

    MODEL is a checkpoint that `kvfold convert` wrote. Adam moves every element by about the learning rate, so
    --relative-lr is multiplied by the root mean square of each tensor: it is larger than the usual --lr of a trainer.
    """
    request = ur.UptrainRequest(**options)
    if request.plot is not None:
        from kvfold.convert.console import check_plot

        check_plot(request.plot)
    from kvfold.convert.uptrain.run import summary, uptrain_checkpoint

    done = uptrain_checkpoint(request)
    if done.rows and not request.quiet:
        click.echo(summary(request, done))
