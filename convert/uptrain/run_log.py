"""The log of an uptraining run: its file, and what is shown on stderr."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback

from kvfold.convert.console import LEAST_PRINTED, TimeLeft, duration
from kvfold.convert.errors import KvfoldError
from kvfold.convert.processes import started_first
from kvfold.convert.progress import stage
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.resume import LOG, mark_complete


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes ``log.jsonl``, shows steps, measurements, rows and times on stderr, and marks complete checkpoints."""

    def __init__(self, request: UptrainRequest, processes: int = 1) -> None:
        self._request, self._processes = request, processes
        self._shown = not request.quiet and started_first()
        self.open = ExitStack()  # closed after the training, however it ends
        self._advance: Callable[[int], None] | None = None  # of the stage of training, once it begins
        self._left = TimeLeft(request.steps, quiet=True)
        self._measurement = 0.0  # seconds of the last one

    @contextmanager
    def measuring(self, batches: int) -> Iterator[Callable[[], None]]:
        """A measurement of ``batches`` on held-out text; call it after each. The first tells the time of the run."""
        started, done = time.monotonic(), 0
        shown = stage("measuring on held-out text,", batches, "batch") if self._shown else nullcontext(lambda _: None)
        with shown as advance:

            def step() -> None:
                nonlocal done
                done += 1
                advance(1)
                if self._advance is None and done == min(2, batches):
                    self._tell((time.monotonic() - started) / done, batches)

            yield step
        self._measurement = time.monotonic() - started

    def _tell(self, batch_seconds: float, batches: int) -> None:
        """Print how long the run will take, from the time of a held-out batch."""
        request = self._request
        passes = 3 + request.gradient_checkpointing  # forward and backward of the student, in forward passes
        ratio = passes if request.teacher is None else (passes + 1) / 2  # the teacher's pass is in both
        step = ratio * request.sequences / self._processes / request.micro_batch
        seconds = batch_seconds * (batches * (1 + self._measurements(0)) + step * request.steps)
        if self._shown and seconds >= LEAST_PRINTED:
            first = f"measuring on {request.eval_sequences} held-out sequences"
            then = f"then {request.steps} steps of {request.batch_tokens} tokens"
            tqdm.write(f"{first}, {then}: about {duration(seconds)}", file=sys.stderr)

    def _measurements(self, done: int) -> int:
        """Measurements on held-out text after step ``done``: every ``eval_every`` steps and after the last one."""
        steps, every = self._request.steps, self._request.eval_every
        return math.ceil(steps / every) - done // every if every else 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._advance is None and self._shown:
            steps, done = self._request.steps, state.global_step
            self._advance = self.open.enter_context(stage("training", steps, "step", done))
            more = self._measurements(done) if self._measurement else 0
            what = f" and {more} measurement{'' if more == 1 else 's'}" if more else ""
            self._left = TimeLeft(steps - done, False, "step", what, lambda _: more * self._measurement)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._advance is not None:
            self._advance(1)
        self._left.one_done()
        if state.global_step >= state.max_steps:
            control.should_save = bool(self._request.save_every)  # what fails after it must not cost the training
            control.should_evaluate = bool(self._request.eval_every)
            control.should_log = True
        if control.should_save:
            control.should_log = True  # a resumed run then averages losses over the same steps
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        row = {name: value for name, value in (logs or {}).items() if name not in ("epoch", "total_flos")}
        if "train_runtime" in row:
            return
        if not all(math.isfinite(value) for name, value in row.items() if name.endswith("loss")):
            raise KvfoldError(
                f"step {state.global_step}: the loss is no longer a finite number; lower --relative-lr, or raise "
                "--warmup"
            )
        if state.is_world_process_zero:
            row = {"step": state.global_step, "tokens": state.global_step * self._request.batch_tokens, **row}
            with (self._request.work / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if not self._request.quiet:
                tqdm.write(log_line(row, self._request.steps), file=sys.stderr)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.is_initialized():
            dist.barrier()  # each process has written its random state
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def log_line(row: dict[str, Any], steps: int) -> str:
    """A row of the log as a line for users."""
    names = {"loss": "loss", "learning_rate": "lr", "eval_loss": "held-out loss"}
    names |= {"eval_perplexity": "perplexity", "eval_kl": "KL", "eval_excess": "excess"}
    numbers = ", ".join(f"{names[name]} {value:.4g}" for name, value in row.items() if name in names)
    return f"step {row['step']}/{steps}: {numbers}"
