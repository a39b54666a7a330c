"""``kvfold uptrain``: train a converted checkpoint a little further.

To use several processes, run ``torchrun --nproc-per-node 8 -m kvfold uptrain ...`` or ``accelerate
launch --config_file convert/data/fsdp.yaml -m kvfold uptrain ...``.
"""

import click

from kvfold.convert.checkpoint.atomic import resolve_output_path
from kvfold.convert.console import (
    add_request_options,
    check_models_and_load_torch,
    json_option,
    print_result,
)
from kvfold.convert.processes import destroy_process_group, launched_as_rank0
from kvfold.convert.text.corpus import check_text_sources
from kvfold.convert.uptrain.uptrain_request import UptrainRequest


@click.command(short_help="Train a converted checkpoint a little further.")
@add_request_options(UptrainRequest)
@json_option
def uptrain(request: UptrainRequest, json_file: str | None) -> None:
    """Train MODEL further into OUT, at learning rates relative to the size of each tensor.

    MODEL is a checkpoint written by `kvfold convert`. Each step of Adam changes every element,
    large or small, by about the learning rate, so --relative-lr is multiplied by the root mean
    square of each tensor; suitable values are larger than for absolute learning rates.
    """
    resolve_output_path(request.out, overwrite=request.overwrite, model=request.model)
    check_text_sources([request.text], "text")
    quiet = request.quiet or not launched_as_rank0()
    check_models_and_load_torch(request.model, request.teacher, quiet=quiet)
    from kvfold.convert.uptrain.uptraining import format_summary, uptrain_checkpoint

    uptrained = uptrain_checkpoint(request)
    destroy_process_group()
    if launched_as_rank0():
        print_result(
            json_file,
            uptrained.to_dict,
            "" if request.quiet else format_summary(request, uptrained),
        )
