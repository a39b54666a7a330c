"""``kvfold bench``: time models side by side, each in its own process, and show the results as a table."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvfold.convert.errors import KvfoldError
from kvfold.convert.measure.bench_models import BenchOptions, BenchTask, Subject, checkpoint_subjects, shape_subjects
from kvfold.convert.options import takes
from kvfold.convert.request import BenchRequest
from kvfold.convert.sizes import bytes_text

_COLUMNS = [
    "model",
    "context",
    "batch",
    "prefill tok/s",
    "decode tok/s",
    "ms/step",
    "attn ms",
    "cache",
    "peak",
    "ratio",
]


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One model at one context and batch.

    Either it was measured, or it does not fit (``needed_bytes``, ``free_bytes``), or its process ``failed``.
    ``ratio``: tokens per second in units of the first model's.
    """

    model: str
    form: str
    context: int
    batch: int
    # Numbers of sequences and of tokens in each.
    prefill_tokens: list[int] | None = None
    prefill_tokens_per_s: float | None = None
    step_ms: float | None = None
    steps: int | None = None
    decode_tokens_per_s: float | None = None
    attention_ms: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    read_bytes: int | None = None
    operations: int | None = None
    cache_bytes_formula: int | None = None
    needed_bytes: int | None = None
    free_bytes: int | None = None
    failed: str | None = None
    ratio: float | None = None

    def cells(self) -> list[str]:
        """The row as texts for ``_COLUMNS``; fewer if nothing was measured."""
        start = [self.model, str(self.context), str(self.batch)]
        if self.failed is not None:
            return [*start, f"does not run: {self.failed.split(': ', 1)[-1]}"]
        if self.needed_bytes is not None:
            needed, free = bytes_text(self.needed_bytes), bytes_text(self.free_bytes or 0)
            return [*start, f"does not fit: needs {needed}, {free} free"]
        return [
            *start,
            "-" if self.prefill_tokens_per_s is None else f"{self.prefill_tokens_per_s:.0f}",
            f"{self.decode_tokens_per_s:.1f}",
            f"{self.step_ms:.1f}",
            f"{self.attention_ms:.1f}",
            bytes_text(self.cache_bytes or 0),
            bytes_text(self.peak_bytes or 0),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
        ]


@dataclass(frozen=True)
class Benchmark:
    """The result of a run: its settings, the machine (``device`` is the name of the processor), and the rows."""

    kvfold: str
    transformers: str
    dtype: str
    cache: str
    options: BenchOptions
    rows: list[BenchRow]
    device: str
    threads: int
    torch: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a row has only what was measured."""
        rows = [{name: value for name, value in vars(row).items() if value is not None} for row in self.rows]
        return {**vars(self), "options": asdict(self.options), "rows": rows}

    def table(self) -> str:
        """One line per combination; one that was not measured says why."""
        many = len({(row.context, row.batch) for row in self.rows}) > 1
        rows = sorted(self.rows, key=lambda row: (row.context, row.batch)) if many else self.rows
        lines = [_COLUMNS, *(row.cells() for row in rows)]
        # A sentence in the fourth column does not make that column wide.
        widths = [
            max(len(line[i]) for line in lines if i < 3 or len(line) == len(_COLUMNS)) for i in range(len(_COLUMNS))
        ]
        shown = [
            "  ".join(
                cell.ljust(widths[i]) if i == 0 or cell.startswith("does not ") else cell.rjust(widths[i])
                for i, cell in enumerate(line)
            ).rstrip()
            for line in lines
        ]
        head = f"{self.device}, {self.threads} threads, {self.dtype}, {self.cache} cache"
        versions = f"kvfold {self.kvfold}, torch {self.torch}, transformers {self.transformers}"
        return "\n".join([f"{head}; {versions}", "", *shown])


@takes(BenchRequest)
def bench_checkpoints(request: BenchRequest, tell: Callable[[str], None] = lambda text: None) -> Benchmark:
    """Time ``models`` side by side, each in a process of its own, as ``kvfold bench`` does.

    ``shape`` adds random weights in a known shape, cut to ``layers``. ``tell`` hears of every model that begins.
    Ratios are to the first model. Raises InputError for a wrong request, KvfoldError when all models fail.

    >>> done = bench_checkpoints([demo_folder()], contexts=[64], prefill_tokens=0, seconds=0.01)
    >>> done.rows[0].context, done.rows[0].ratio
    (64, 1.0)
    """
    chosen = checkpoint_subjects(request.models)
    if request.shape is not None:
        chosen += shape_subjects(request.shape, request.layers, max(request.contexts))
    options = BenchOptions(
        contexts=request.contexts,
        batches=request.batches,
        device=request.device,
        dtype=request.dtype,
        cache=request.cache,
        prefill_tokens=request.prefill_tokens,
        seconds=request.seconds,
        threads=request.threads,
    )
    return bench(chosen, options, tell)


def bench(chosen: Sequence[Subject], options: BenchOptions, tell: Callable[[str], None]) -> Benchmark:
    """Rows of every subject, context and batch, with ratios to the first subject.

    A subject whose process fails gets rows with its error. Raises KvfoldError when all fail.
    """
    from kvfold.convert.device import choose_device
    from kvfold.convert.measure.machine import software

    device, dtype, prefill = choose_device(options.device).type, options.dtype, options.prefill_tokens
    # All models run in one dtype, so that their times can be compared: few CPUs have units for bfloat16.
    if dtype == "auto":
        config = chosen[0].config
        dtype = "float32" if device == "cpu" else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if prefill is None:
        prefill = 2048 if device == "cpu" else 32768
    rows: list[BenchRow] = []
    machine: dict[str, Any] = {}
    failures: list[KvfoldError] = []
    for subject in chosen:
        tell(f"{subject.label} ...")
        try:
            result = run_in_process(BenchTask(subject, options, device, dtype, prefill))
        except KvfoldError as error:
            # One model that runs out of memory must not cost the rows of the others.
            failures.append(error)
            pairs = [{"context": context, "batch": batch} for context in options.contexts for batch in options.batches]
            result = {"rows": [{**pair, "failed": str(error)} for pair in pairs]}
        rows += [BenchRow(model=subject.label, form=subject.form, **row) for row in result.pop("rows")]
        machine |= result
    if len(failures) == len(chosen):
        raise failures[0]
    first = {(row.context, row.batch): row for row in rows if row.model == chosen[0].label}
    rows = [_with_ratio(row, first[row.context, row.batch]) for row in rows]
    versions = software()
    about = (versions["kvfold"], versions["transformers"], dtype, options.cache)
    return Benchmark(*about, options, rows, **machine)


def _with_ratio(row: BenchRow, first: BenchRow) -> BenchRow:
    if row.decode_tokens_per_s is None or first.decode_tokens_per_s is None:
        return row
    return replace(row, ratio=row.decode_tokens_per_s / first.decode_tokens_per_s)


def run_in_process(task: BenchTask) -> dict[str, Any]:
    """The worker's result. Raises KvfoldError with the last line of its error output when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        task_file, result_file = Path(folder, "task.json"), Path(folder, "result.json")
        task_file.write_text(json.dumps(asdict(task)))
        command = [sys.executable, "-m", "kvfold.convert.measure.bench_worker", str(task_file), str(result_file)]
        # The worker reads the pipe until it ends: by that it knows that this process was killed.
        alive, ours = os.pipe()
        try:
            done = subprocess.run(command, stdin=alive, capture_output=True, text=True, check=False)
        finally:
            os.close(alive)
            os.close(ours)
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            why = last[0] if last else f"exit status {done.returncode} (killed for lack of memory?)"
            raise KvfoldError(f"{task.subject.label}: its process failed: {why}")
        result: dict[str, Any] = json.loads(result_file.read_text())
    return result
