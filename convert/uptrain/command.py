"""The command ``kvfold uptrain``: training a converted checkpoint a little further.

On several processes: ``torchrun --nproc-per-node 8 -m kvfold.convert.uptrain ...`` or ``accelerate launch --config_file
recipes/fsdp.yaml recipes/uptrain.py ...``. A global batch is ``--batch-tokens`` whatever their number, and the order of
the text depends on ``--seed`` alone, so the losses do not depend on the number of processes.

MODEL is a checkpoint that ``kvfold convert`` wrote (or any causal language model). With ``--teacher``, the checkpoint
that it was converted from, the loss is the KL from that model's next-token distributions: labels only say which token
came next, the teacher says which were likely, so the drift closes with far fewer tokens. OUT is in MODEL's layout, with
its config, tokenizer and generation config. Beside it, in ``OUT.training``, lie ``log.jsonl``, the curve and, while the
run lasts, its tokens (4 bytes each) and its checkpoints, from which ``--resume`` continues.

The constant channel of layout ``free`` is frozen; the live norm of layout ``engine`` is trained.
"""

from functools import partial
from typing import Any

import click

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import Choice, PanelCommand, PanelOption, check_plot, check_writable
from kvfold.convert.measure.options import tell
from kvfold.convert.processes import leave_processes, started_first
from kvfold.convert.request import DEVICES
from kvfold.convert.text.sources import check_sources
from kvfold.convert.uptrain import request as ur

INTERRUPTED = "OUT was not written; continue with --resume"


_text = partial(click.option, cls=PanelOption, panel="Text")
_distillation = partial(click.option, cls=PanelOption, panel="Distillation")
_training = partial(click.option, cls=PanelOption, panel="Training")
_measurement = partial(click.option, cls=PanelOption, panel="Measurement")
_running = partial(click.option, cls=PanelOption, panel="Running")


@click.command(
    cls=PanelCommand,
    short_help="Train a converted checkpoint a little further.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.argument("model")
@click.argument("out")
@_text("--text", required=True, metavar="FILE|DATASET", help="Text: .txt, .jsonl, or a datasets name.")
@_text("--eval-text", metavar="FILE|DATASET", help="Held-out text; default: some of --text is held out.")
@_text("--seq-len", type=int, default=1024, help="Tokens per packed sequence.")
@_text("--seed", type=int, default=0, help="Draws the order of the text and the held-out part.")
@_distillation("--teacher", metavar="MODEL", help="Distill from this checkpoint: the one MODEL was converted from.")
@_distillation(
    "--distill-weight",
    type=float,
    metavar="W",
    help="Weight of the distillation in the loss, 0 to 1; default with --teacher: 1.",
)
@_distillation("--temperature", type=float, default=1.0, help="Temperature of both distributions in the distillation.")
@_training("--train", type=Choice(ur.TRAINED), default="all", help="All weights, or those of attention only.")
@_training("--steps", type=int, default=1000, help="Optimizer steps.")
@_training("--batch-tokens", type=int, default=65536, help="Tokens per step, over all processes.")
@_training(
    "--relative-lr",
    "--lr",
    "relative_lr",
    type=float,
    metavar="RATE",
    help="Peak learning rate (AdamW) relative to the size of each tensor; default: 0.05 / sqrt(model width).",
)
@_training("--schedule", type=Choice(ur.SCHEDULES), default="cosine", help="Learning-rate schedule.")
@_training("--warmup", type=float, default=0.05, help="Warmup, as a fraction of the steps.")
@_training(
    "--weight-decay", type=float, default=0.0, help="Weight decay (not of biases and norms), times the learning rate."
)
@_training("--clip", type=float, default=1.0, help="Maximum gradient norm; 0: no clipping.")
@_measurement(
    "--eval-every", type=int, default=100, metavar="N", help="Steps between measurements of the drift; 0: none."
)
@_measurement("--eval-sequences", type=int, default=64, help="Held-out sequences.")
@_measurement("--log-every", type=int, default=10, metavar="N", help="Steps between rows of the log.")
@_measurement("--plot", metavar="FILE", help="Curve to draw (PNG, SVG, PDF); default: OUT.training/curve.png.")
@_running("--device", type=Choice(DEVICES), default="auto")
@_running(
    "--precision",
    type=Choice(ur.PRECISIONS),
    default="auto",
    help="Compute dtype; master weights stay float32. auto: bfloat16 on a GPU, float32 on a CPU.",
)
@_running("--micro-batch", type=int, default=4, help="Sequences per device at once, at most.")
@_running("--gradient-checkpointing", is_flag=True, help="Recompute activations in the backward pass.")
@_running("--save-every", type=int, default=200, metavar="N", help="Steps between checkpoints; 0: none.")
@_running("--max-shard-size", default="5GB", metavar="SIZE", help="Largest weight file.")
@_running("--resume", is_flag=True, help="Resume an interrupted run at its last checkpoint.")
@_running("--overwrite", is_flag=True, help="Replace OUT; without --resume also discard an interrupted run.")
@_running("--quiet", is_flag=True, help="No progress, no summary.")
@_running(
    "--json", "json_file", metavar="FILE|-", help="Also write the record and the log to FILE; -: to stdout alone."
)
@_running("--trust-remote-code", is_flag=True, help="Allow code in the checkpoint to run.")
def uptrain(json_file: str | None, **options: Any) -> None:
    """Train MODEL further into OUT, at learning rates relative to the size of each tensor.

    MODEL is a checkpoint that `kvfold convert` wrote. Adam moves every element by about the learning rate, so
    --relative-lr is multiplied by the root mean square of each tensor: it is larger than the usual --lr of a trainer.
    """
    request = ur.UptrainRequest(**options)
    if request.plot is not None:
        check_plot(request.plot)
    if json_file is not None:
        check_writable(json_file)
    check_output(request.out, overwrite=request.overwrite, model=request.model)
    check_sources([request.text], "--text")
    check_sources(filter(None, [request.eval_text]), "--eval-text")
    if not request.quiet and started_first():
        click.echo(f"reading {request.model}", err=True)
    check_opens(*filter(None, [request.model, request.teacher]))
    from kvfold.convert.uptrain.run import summary, uptrain_checkpoint

    done = uptrain_checkpoint(request)
    leave_processes()
    if done.rows:
        tell(json_file, done.to_dict, "" if request.quiet else summary(request, done))
