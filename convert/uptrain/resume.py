"""The folder ``OUT.training``: the options of the run, its log, its tokens, and the checkpoints to resume from."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.atomic import free_space_check
from kvfold.convert.checkpoint.files import parse_json, read_bytes
from kvfold.convert.checkpoint.hashing import file_hashes, file_problems
from kvfold.convert.errors import InputError, one_line, opt
from kvfold.convert.processes import run_on_first
from kvfold.convert.uptrain.data import RunTokens, TokenPlan, make_tokens, open_tokens, replace_file
from kvfold.convert.uptrain.request import UptrainRequest, changed

# The last file of a checkpoint, with the hashes of the others: a checkpoint without it is half written.
COMPLETE = "complete"
LOG = "log.jsonl"
_REQUEST = "request.json"
_STEP = re.compile(r"checkpoint-\d{1,9}")


def last_checkpoint(request: UptrainRequest) -> Path | None:
    """The newest complete checkpoint to resume from, if any; reads only.

    Raises InputError when options have changed, when there are checkpoints but no --resume, or when the folder holds
    something else.
    """
    work = request.work
    if work.exists() and not (work.is_dir() and (not any(work.iterdir()) or any(work.glob(f"{_REQUEST}*")))):
        raise InputError(f"{work}: the run would write its log there, found something else; name another OUT")
    if request.resume and (work / _REQUEST).is_file():
        difference = changed(parse_json(work / _REQUEST, read_bytes(work / _REQUEST)), request)
        if difference is not None:
            raise InputError(
                f"{opt('resume', True)} {work}: {difference}; give the same options, or {opt('overwrite', True)} to "
                "start over"
            )
        return _newest_sound(work)
    if not request.overwrite and any(work.glob("checkpoint-*")):
        raise InputError(
            f"{work}: found checkpoints of an interrupted run; continue it with {opt('resume', True)}, or use "
            f"{opt('overwrite', True)}"
        )
    return None


def mark_complete(checkpoint: Path) -> None:
    """Write the last file of a checkpoint, by which ``--resume`` knows that the others are whole."""
    replace_file(checkpoint / COMPLETE, [json.dumps(file_hashes(checkpoint, COMPLETE), indent=1).encode()])


def _newest_sound(work: Path) -> Path | None:
    """The newest checkpoint whose files are those that were written; a line on stderr for each that is damaged."""
    complete = (path.parent for path in work.glob("checkpoint-*/" + COMPLETE) if _STEP.fullmatch(path.parent.name))
    for checkpoint in sorted(complete, key=_step, reverse=True):
        problem = _damage(checkpoint)
        if problem is None:
            return checkpoint
        print(
            f"{opt('resume', True)}: {checkpoint.name} is damaged and left out ({problem})", file=sys.stderr, flush=True
        )
    return None


def _damage(checkpoint: Path) -> str | None:
    try:
        expected = parse_json(checkpoint / COMPLETE, read_bytes(checkpoint / COMPLETE))
        return next(file_problems(checkpoint, expected, COMPLETE), None)
    except (InputError, OSError) as error:
        return one_line(error)


def prepare(request: UptrainRequest, checkpoint: Path | None, plan: TokenPlan, arguments: Any) -> RunTokens:
    """Start or resume the run and open its tokens; the first process makes them while the others wait.

    Raises InputError when the text cannot be used (nothing is left then), or is not that of the run being resumed.
    """
    if checkpoint is not None and open_tokens(plan, request.work) is None:
        raise InputError(
            f"{opt('resume', True)} {request.work}: the text or the tokenizer is not the one that the run was "
            "started with, or its "
            f"tokens were damaged; give the same text, or {opt('overwrite', True)} to start over"
        )
    # Every process has looked at what is there before the first one changes it.
    arguments.distributed_state.wait_for_everyone()
    run_on_first(lambda: _resume_or_start(request, checkpoint, plan))
    tokens = open_tokens(plan, request.work)
    if tokens is None:
        raise InputError(
            f"{request.work}: the tokens of the text are not there on every machine; use a shared folder, and do not "
            "edit the text while it is tokenized"
        )
    return tokens


def _resume_or_start(request: UptrainRequest, checkpoint: Path | None, plan: TokenPlan) -> None:
    if request.resume and open_tokens(plan, request.work) is not None:
        _cut_log(request.work / LOG, -1 if checkpoint is None else _step(checkpoint))
    else:
        _start(request, plan)


def _start(request: UptrainRequest, plan: TokenPlan) -> None:
    work = request.work
    shutil.rmtree(work, ignore_errors=True)
    free_space_check(work, plan.disk_bytes, "for the tokens of the run, 4 bytes each")
    work.mkdir(parents=True)
    replace_file(work / _REQUEST, [(json.dumps(request.result_options(), indent=1) + "\n").encode()])
    if not request.quiet:
        tokens = (plan.training + plan.held_out) * plan.length
        print(f"tokenizing {plan.text.name}, {tokens} tokens at most", file=sys.stderr, flush=True)
    try:
        make_tokens(plan, work)
    except InputError:
        shutil.rmtree(work)
        raise


def _cut_log(log: Path, step: int) -> None:
    """Remove the rows after ``step``, which the resumed run writes again."""
    rows = [row for row in read_log(log) if row["step"] <= step] if log.is_file() else []
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def finish(request: UptrainRequest) -> None:
    """Remove what only a resumed run needs."""
    for path in request.work.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in request.work.glob("tokens.*"):
        path.unlink()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``log.jsonl`` before the first that is none, such as a last line that was cut short."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_row(row):
            break
        rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
    return numbers and type(row.get("step")) is int and "tokens" in row
