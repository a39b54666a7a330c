"""The log of an uptraining run: its file, and what is shown on stderr."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback

from kvfold.convert.errors import KvfoldError, opt
from kvfold.convert.processes import started_first
from kvfold.convert.progress import Stages
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.resume import LOG, mark_complete


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes ``log.jsonl``, shows steps, measurements and rows on stderr, and marks complete checkpoints."""

    def __init__(self, request: UptrainRequest, processes: int = 1) -> None:
        self._request, self._processes = request, processes
        self._stages = Stages(quiet=request.quiet or not started_first())
        self.open = ExitStack()  # closed after the training, however it ends
        self._advance: Callable[[int], None] | None = None  # of the stage of training, once it begins

    @contextmanager
    def measuring(self, batches: int) -> Iterator[Callable[[], None]]:
        """A measurement of ``batches`` on held-out text; call it after each."""
        with self._stages("measuring on held-out text,", batches, "batch") as advance:
            yield lambda: advance(1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._advance is None:
            steps = self._request.steps
            self._advance = self.open.enter_context(self._stages("training", steps, "step", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._advance is not None:
            self._advance(1)
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
                f"step {state.global_step}: the loss is no longer a finite number; lower {opt('relative_lr')}, or "
                "raise "
                f"{opt('warmup')}"
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
