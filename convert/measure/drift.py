"""``kvfold drift``: two checkpoints side by side, one layer of each in memory."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from kvfold.attention.drift.report import DriftReport, floor_count, measure_drift
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError
from kvfold.convert.options import takes
from kvfold.convert.progress import stage
from kvfold.convert.request import DriftRequest
from kvfold.convert.stream.fits import check_fits
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, load_calibration


@takes(DriftRequest)
def drift_checkpoints(request: DriftRequest, progress: Callable[[int, int], None] | None = None) -> DriftReport:
    """Measure ``out`` against ``model`` on ``samples`` sequences of ``seq_len`` tokens of ``text``.

    Without ``text``: held-out text that ships with kvfold and that no conversion calibrates on. ``seed`` draws the
    sequences; ``progress(done, total)`` is called after every layer, of the comparison and then of the rounding floor;
    without ``quiet`` it is shown on stderr. ``about`` of the result has the names and hashes of both models and of the
    text. Raises InputError when a checkpoint cannot be opened, the two do not belong together, or there is too little
    text.

    >>> drift_checkpoints(demo_folder(), demo_folder(), samples=1, seq_len=32).identical
    True
    """
    source, student = open_checkpoint(request.model), open_checkpoint(request.out)
    try:
        _check_pair(source, student, request.model, request.out)
        place = choose_device(request.device)
        tokenizer = load_tokenizer(source, request.trust_remote_code, "measuring drift")
        read = drift_tokens(request.text, tokenizer, request.samples, request.seq_len, request.seed)
        before, after = (_stream(each, place, request.dtype) for each in (source, student))
        tokens = read.calibration
        for stream, checkpoint in ((before, source), (after, student)):
            check_fits(stream.parameters.map, checkpoint.tensors, checkpoint.origin)
        check_vocabulary(tokens, before.vocabulary, source.origin)
        with ExitStack() as stack:
            if not request.quiet:
                sequences, length = tokens.shape
                print(f"comparing on {sequences} x {length} tokens of {read.source}", file=sys.stderr, flush=True)
                progress = _layer_stages(before.layers, progress, stack)
            report = measure_drift(before, after, tokens, floor_sequences=floor_count(tokens), progress=progress)
        models = {
            name: {"name": checkpoint.origin, "sha256": checkpoint.source_hash()}
            for name, checkpoint in (("source", source), ("converted", student))
        }
        about: dict[str, dict[str, Any]] = {
            **models,
            "text": {"name": read.source, "sha256": read.digest, "seed": request.seed},
        }
        return replace(report, about=about)
    finally:
        source.close()
        student.close()


def _layer_stages(
    layers: int, progress: Callable[[int, int], None] | None, stack: ExitStack
) -> Callable[[int, int], None]:
    """Shows the layers on stderr as stages that end with ``stack``: of the comparison, then of the rounding floor."""
    names = iter(("comparing", "measuring rounding,"))
    advance = stack.enter_context(stage(next(names), layers, "layer"))

    def step(done: int, total: int) -> None:
        nonlocal advance
        if done == layers < total:  # one stage ends before the next begins, so that they do not nest
            stack.close()
            advance = stack.enter_context(stage(next(names), layers, "layer"))
        else:
            advance(1)
        if progress is not None:
            progress(done, total)

    return step


def _check_pair(source: Checkpoint, student: Checkpoint, model: str, out: str) -> None:
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        before, after = source.config.get(key), student.config.get(key)
        if before != after:
            raise InputError(
                f"{out}: its {key} is {after}, that of {model} is {before}; expected a checkpoint converted from it"
            )


def _stream(checkpoint: Checkpoint, device: torch.device, dtype: str) -> CheckpointStream:
    computed = compute_dtype(checkpoint, device, dtype)
    try:
        return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, computed)
    except InputError as error:
        raise InputError(f"{checkpoint.origin}: {error.message}", error.details) from error


def drift_tokens(text: str | None, tokenizer: Any, samples: int, seq_len: int, seed: int) -> CalibrationTokens:
    """``[samples, seq_len]`` tokens to measure on, as ``calibration``."""
    return load_calibration(text, tokenizer, samples, seq_len, seed, held_out=0, split="held_out", option="--text")
