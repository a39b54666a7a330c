"""``kvfold bench``: models side by side, each in its own process, and the table of the results."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.measure.bench_models import Subject, checkpoint_subjects, shape_subjects
from kvfold.convert.sizes import bytes_text

if TYPE_CHECKING:
    from kvfold.convert.measure.bench_worker import Task

SECONDS = 4.0
_COLUMNS = (
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
)


@dataclass(frozen=True)
class Options:
    """The settings of a measurement. ``prefill_tokens`` None: 2048 on a CPU, 32768 on CUDA; 0: no prefill."""

    contexts: tuple[int, ...] = (2048,)
    batches: tuple[int, ...] = (1,)
    device: str = "auto"
    dtype: str = "auto"
    cache: str = "dynamic"
    prefill_tokens: int | None = None
    seconds: float = SECONDS
    threads: int | None = None


def numbers(text: str, option: str) -> tuple[int, ...]:
    """``"2048,8192"``: positive numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{option} {text}: expected positive numbers separated by commas, as in 2048,8192")
    return tuple(dict.fromkeys(int(part) for part in parts))


def subjects(models: Sequence[str], shape: str | None, layers: int | None, longest: int) -> list[Subject]:
    """The models to measure; ratios are to the first. Raises InputError for no model, or --layers without --shape."""
    if layers is not None and shape is None:
        raise InputError("--layers: only with --shape; a checkpoint has its own number of layers")
    if not models and shape is None:
        raise InputError("kvfold bench: name at least one MODEL, or a --shape such as llama-2-7b")
    return checkpoint_subjects(models) + (shape_subjects(shape, layers, longest) if shape else [])


def bench_checkpoints(
    models: Sequence[str | os.PathLike[str]],
    *,
    contexts: Sequence[int] = (2048,),
    batches: Sequence[int] = (1,),
    shape: str | None = None,
    layers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Time ``models`` side by side, each in a process of its own, as ``kvfold bench`` does; the result is its JSON.

    ``shape`` adds random weights in a known shape, cut to ``layers``. ``tell`` hears of every model that begins.
    ``options`` are ``device``, ``dtype``, ``cache``, ``prefill_tokens``, ``seconds`` and ``threads``. Raises InputError
    for a wrong request, KvfoldError when all models fail.

    >>> report = bench_checkpoints([demo_folder()], contexts=[64], prefill_tokens=0, seconds=0.01)
    >>> report["rows"][0]["context"], report["rows"][0]["ratio"]
    (64, 1.0)
    """
    chosen = subjects([os.fspath(model) for model in models], shape, layers, max(contexts))
    return bench(chosen, Options(tuple(contexts), tuple(batches), **options), tell)


def bench(chosen: Sequence[Subject], options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """Rows of every subject, context and batch, with ratios to the first subject, and the machine and versions.

    A subject whose process fails gets rows with its error; KvfoldError when all fail.
    """
    from kvfold.convert.measure.bench_worker import Task
    from kvfold.convert.measure.machine import versions

    device, dtype = _device_and_dtype(options, chosen)
    limit = options.prefill_tokens
    limit = (2048 if device == "cpu" else 32768) if limit is None else limit
    report: dict[str, Any] = {package: versions()[package] for package in ("kvfold", "transformers")}
    report |= {"dtype": dtype, "cache": options.cache, "options": asdict(options), "rows": []}
    failures: list[KvfoldError] = []
    for subject in chosen:
        tell(f"{subject.label} ...")
        task = Task(
            subject, options.contexts, options.batches, device, dtype, options.cache, limit, options.seconds,
            options.threads,
        )  # fmt: skip
        try:
            result = run_in_process(task)
        except KvfoldError as error:
            failures.append(error)
            pairs = [{"context": context, "batch": batch} for context in options.contexts for batch in options.batches]
            result = {"rows": [{**pair, "failed": str(error)} for pair in pairs]}
        report |= {key: result[key] for key in ("device", "threads", "torch") if key in result}
        report["rows"] += [{"model": subject.label, "form": subject.form, **row} for row in result["rows"]]
    if len(failures) == len(chosen):
        raise failures[0]
    _add_ratios(report["rows"], chosen[0].label)
    return report


def run_in_process(task: "Task") -> dict[str, Any]:
    """The worker's result. Raises KvfoldError with the last line of its error output when it fails."""
    import json

    from kvfold.convert.measure.bench_worker import write_task

    with tempfile.TemporaryDirectory() as folder:
        task_file, result_file = Path(folder, "task.json"), Path(folder, "result.json")
        task_file.write_text(write_task(task))
        command = [sys.executable, "-m", "kvfold.convert.measure.bench_worker", str(task_file), str(result_file)]
        alive, ours = os.pipe()  # its end tells the worker that this process was killed
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


def _device_and_dtype(options: Options, chosen: Sequence[Subject]) -> tuple[str, str]:
    """Device and dtype: float32 on a CPU, on CUDA the first model's own."""
    from kvfold.convert.device import choose_device

    device = choose_device(options.device).type
    if options.dtype != "auto":
        return device, options.dtype
    config = chosen[0].config
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return device, "float32" if device == "cpu" else stored


def _add_ratios(rows: list[dict[str, Any]], first: str) -> None:
    base = {(row["context"], row["batch"]): row for row in rows if row["model"] == first}
    for row in rows:
        original = base[row["context"], row["batch"]]
        if "decode_tokens_per_s" in row and "decode_tokens_per_s" in original:
            row["ratio"] = row["decode_tokens_per_s"] / original["decode_tokens_per_s"]


def bench_table(report: dict[str, Any]) -> str:
    """One line per combination; a combination that does not fit says so."""
    rows = report["rows"]
    many = len({(row["context"], row["batch"]) for row in rows}) > 1
    ordered = sorted(rows, key=lambda row: (row["context"], row["batch"])) if many else rows
    lines = [_COLUMNS, *(_cells(row) for row in ordered)]
    widths = [max(len(line[i]) for line in lines if i < len(line) and len(line) > 4) for i in range(len(_COLUMNS))]
    widths[:3] = [max(len(line[i]) for line in lines) for i in range(3)]
    head = f"{report['device']}, {report['threads']} threads, {report['dtype']}, {report['cache']} cache"
    versions = f"kvfold {report['kvfold']}, torch {report['torch']}, transformers {report['transformers']}"
    shown = ["  ".join(_pad(cell, i, widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
    return "\n".join([f"{head}; {versions}", "", *shown])


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column in (0,) or cell.startswith("does not ") else cell.rjust(width)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    start = (row["model"], str(row["context"]), str(row["batch"]))
    if "needed_bytes" in row:
        needed, free = (bytes_text(row[key]) for key in ("needed_bytes", "free_bytes"))
        return (*start, f"does not fit: needs {needed}, {free} free")
    if "failed" in row:
        return (*start, f"does not run: {row['failed'].split(': ', 1)[-1]}")
    prefill, ratio = row.get("prefill_tokens_per_s"), row.get("ratio")
    return (
        *start,
        "-" if prefill is None else f"{prefill:.0f}",
        f"{row['decode_tokens_per_s']:.1f}",
        f"{row['step_ms']:.1f}",
        f"{row['attention_ms']:.1f}",
        bytes_text(row["cache_bytes"]),
        bytes_text(row["peak_bytes"]),
        "-" if ratio is None else f"{ratio:.2f}",
    )
