"""What the first process of a distributed run does while the others wait."""

import json
import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from helpers import forked
from transformers import TrainingArguments

from kvfold.convert.errors import InputError
from kvfold.convert.processes import leave_processes, run_on_first
from kvfold.convert.uptrain import resume
from kvfold.convert.uptrain.arguments import training_arguments
from kvfold.convert.uptrain.request import UptrainRequest


def two_of_them():
    """Both wait longer for the first one's work than the training's timeout, and both get its error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    calls = []

    def slow():
        time.sleep(4)
        calls.append(int(os.environ["RANK"]))
        return "done"

    def wrong():
        raise InputError("no text", ["a detail"])

    begin = time.monotonic()
    result = run_on_first(slow)
    seconds = time.monotonic() - begin
    try:
        run_on_first(wrong)
    except InputError as error:
        print(json.dumps({"result": result, "calls": calls, "waited": seconds > 3, "error": str(error)}))
    leave_processes()
    print(dist.is_initialized(), file=sys.stderr)


def test_the_others_wait_longer_than_the_timeout_of_the_training_and_share_its_error(tmp_path):
    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(tmp_path, two_of_them)
    assert [each.status for each in ended] == [0, 0], ended
    assert all(each.stderr.endswith("False\n") for each in ended)
    same = {"waited": True, "error": "no text\n  a detail"}
    assert json.loads(ended[0].stdout) == {"result": "done", "calls": [0], **same}
    assert json.loads(ended[1].stdout) == {"result": None, "calls": [], **same}


def test_collectives_of_the_training_keep_the_default_timeout(tmp_path):
    request = UptrainRequest(model="m", out=str(tmp_path / "out"), text="t", device="cpu")
    assert training_arguments(request, 64, False).ddp_timeout == TrainingArguments(str(tmp_path)).ddp_timeout


def test_the_first_process_alone_prepares_the_folder(tmp_path, monkeypatch):
    request = UptrainRequest(model="m", out=str(tmp_path / "out"), text="t")
    done = []
    monkeypatch.setattr(resume, "run_on_first", lambda work: done.append("wait"))
    monkeypatch.setattr(resume, "open_tokens", lambda plan, folder: "tokens")
    arguments = SimpleNamespace(distributed_state=SimpleNamespace(wait_for_everyone=lambda: done.append("all")))
    assert resume.prepare(request, None, None, arguments) == "tokens"
    assert done == ["all", "wait"]
    assert not request.work.exists()
