"""What the first process of a distributed run does while the others wait."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.processes import PATIENCE
from transformers import TrainingArguments

from kvfold.convert.processes import run_on_first
from kvfold.convert.uptrain import resume
from kvfold.convert.uptrain.arguments import training_arguments
from kvfold.convert.uptrain.request import UptrainRequest

PROCESS = """
import json, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from kvfold.convert.errors import InputError
from kvfold.convert.processes import leave_processes, run_on_first

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"started{rank}").touch()
while not (folder / f"started{1 - rank}").exists():
    time.sleep(0.01)
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=4))
calls = []

def slow():
    time.sleep(7)
    calls.append(rank)
    return "done"

def wrong():
    raise InputError("no text", ["a detail"])

begin = time.monotonic()
result = run_on_first(slow)
seconds = time.monotonic() - begin
try:
    run_on_first(wrong)
except InputError as error:
    print(json.dumps({"result": result, "calls": calls, "waited": seconds > 6, "error": str(error)}))
leave_processes()
print(dist.is_initialized(), file=sys.stderr)
"""


@pytest.mark.slow
def test_the_others_wait_longer_than_the_timeout_of_the_training_and_share_its_error(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0, 0], [error for _, error in ended]
    assert all(error.endswith("False\n") for _, error in ended)
    same = {"waited": True, "error": "no text\n  a detail"}
    assert json.loads(ended[0][0]) == {"result": "done", "calls": [0], **same}
    assert json.loads(ended[1][0]) == {"result": None, "calls": [], **same}


def test_a_single_process_works_at_once():
    assert run_on_first(lambda: 3) == 3


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
