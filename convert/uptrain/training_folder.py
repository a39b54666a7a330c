"""The folder ``OUT.training``, from which an interrupted run continues: the options, the tokens and
the checkpoints of Trainer.
"""

import json
import os
import shutil
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvfold.convert.checkpoint.atomic import replacing, write_file
from kvfold.convert.checkpoint.members import parse_json, read_bytes, stamps
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, option_error
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import load_training
from kvfold.convert.uptrain.uptrain_request import UptrainRequest

TOKENS = "tokens.safetensors"
# Trainer writes this file of a checkpoint last.
STATE = "trainer_state.json"


def resume_or_start(request: UptrainRequest, source: Checkpoint) -> Path | None:
    """Prepare ``OUT.training``. Returns the newest sound checkpoint there, or None for a start.

    What is there is discarded, and a line says so, if files of MODEL, the teacher or the text have
    changed. Raises InputError if options have, or if the folder contains links or other files:
    what is read from it must have been written by a run of this request.
    """
    work = request.work
    started = work / "request.json"
    if link := next((path for path in (work, *work.rglob("*")) if path.is_symlink()), None):
        raise InputError(
            f"{link} is a link, but the run writes into this folder; remove it or choose"
            " another OUT"
        )
    before = parse_json(started, read_bytes(started)) if started.is_file() else {}
    is_own = before.keys() == {"options", "files"}
    if work.is_file() or (any(work.glob("*")) and not is_own):
        raise InputError(
            f"{work}: the run needs this folder, but it contains other files; choose another OUT"
        )
    files = [*source.states, *source.extra_files()]
    files += [Path(text) for text in (request.text, request.eval_text) if text]
    if request.teacher is not None:
        with closing(open_checkpoint(request.teacher)) as teacher:
            files += teacher.states
    now = json.dumps({"options": request.result_options(), "files": stamps(files)}, indent=1)
    if any(work.glob("checkpoint-*")) and not request.fresh:
        _check_same_options(request, before["options"])
        if before == json.loads(now):
            return _last_checkpoint(work, request.steps)
        print(f"discarding {work}: the model or the text changed since then", file=sys.stderr)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    write_file(started, now)
    return None


def _check_same_options(request: UptrainRequest, before: dict[str, object]) -> None:
    """Raise InputError if the options of the run in ``OUT.training`` were others."""
    now = request.result_options()
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise option_error(
                name,
                now.get(name, "absent"),
                f"differs from the interrupted run in {request.work}, which has {before.get(name)};"
                " use the same options to continue it, or --fresh to discard it",
            )


def _last_checkpoint(work: Path, steps: int) -> Path | None:
    """The newest checkpoint whose files can be loaded; tells and removes damaged ones."""
    checkpoints = work.glob("checkpoint-[0-9]*")
    for checkpoint in sorted(checkpoints, key=lambda path: int(path.name[11:]), reverse=True):
        try:
            parse_json(checkpoint / STATE, read_bytes(checkpoint / STATE))
            for weights in checkpoint.glob("*.safetensors"):
                with safe_open(weights, "pt"):
                    pass
            for pickled in checkpoint.glob("*.pt"):
                zipfile.ZipFile(pickled).close()
        except (InputError, OSError, SafetensorError, zipfile.BadZipFile) as error:
            print(f"discarding {checkpoint.name}, which is damaged ({error})", file=sys.stderr)
            shutil.rmtree(checkpoint)
            continue
        step = checkpoint.name.removeprefix("checkpoint-")
        print(f"resuming after step {step} of {steps} (--fresh starts over)", file=sys.stderr)
        return checkpoint
    return None


def draw_tokens(request: UptrainRequest, source: Checkpoint, vocabulary: int) -> None:
    """Write the tokens of the run, unless an interrupted run has: ``train [steps * n, T]``, in the
    order in which they are trained on, and ``held_out [M, T]``.
    """
    path = request.work / TOKENS
    if path.exists():
        return
    eval_text = request.eval_text if request.eval_every else None
    if eval_text is not None and os.path.realpath(eval_text) == os.path.realpath(request.text):
        raise option_error(
            "eval_text", eval_text, "must differ from --text; omit it to hold out part of --text"
        )
    tokenizer = load_tokenizer(source, request.trust_remote_code, "uptraining")
    count = request.steps * request.sequences
    held_out = request.eval_sequences if request.eval_every else 0
    rows, held_out_rows = load_training(
        request.text, eval_text, tokenizer, request.seq_len, count, held_out, request.seed
    )
    for drawn in (rows, held_out_rows):
        check_vocabulary(drawn, vocabulary, source.origin)
    # A new order in every epoch, independent of the number of processes.
    generator = torch.Generator().manual_seed(request.seed)
    epochs = -(-count // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(epochs)])
    with replacing(path) as new:
        save_file({"train": rows[order[:count]], "held_out": held_out_rows}, new)
