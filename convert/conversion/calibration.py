"""The start of a calibrated run: the source as a stream of layers, its text, and a place for hidden states."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.conversion.journal import SELF_TEXT
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import choose_device, compute_dtype, training_autocast
from kvfold.convert.errors import InputError, opt
from kvfold.convert.methods.registry import quick_method
from kvfold.convert.progress import Stages
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.stream.stock import hide_bars, load_model
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.corpus import BUILT_IN
from kvfold.convert.text.self_written import digest, first_tokens, write_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration
from kvfold.convert.training.budget import sequences_of
from kvfold.convert.walk.hidden import Keep, Spill


def source_stream(plan: Plan) -> CheckpointStream:
    """The source as a stream of layers, on the device and in the precision that the request asks for."""
    checkpoint, device = plan.checkpoint, choose_device(plan.request.device)
    dtype = compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype)


def load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None = None) -> CalibrationTokens:
    """Calibration and held-out sequences; text that the source writes itself is kept in ``scratch``.

    The first of several processes reads them for all. Raises InputError without a tokenizer or enough text;
    ``otherwise`` is what to do instead, by default a method that reads no text.
    """
    return processes.from_first(lambda: _load_tokens(plan, scratch, stages, otherwise))


def print_start(plan: Plan, tokens: CalibrationTokens) -> None:
    """Print the calibration text to stderr, and what to do for a faster or a better conversion."""
    if plan.request.quiet:
        return
    count, length = tokens.calibration.shape
    text = "text that the source wrote itself" if tokens.source == SELF else tokens.source
    print(
        f"calibrating on {count} x {length} tokens of {text} "
        f"({opt('method', quick_method(plan.request.to))} needs no text and is faster, but worse)",
        file=sys.stderr,
    )
    if tokens.source == BUILT_IN:
        print(
            f"text that resembles the model's use calibrates better: {opt('calibration', 'FILE')}.txt|FILE.jsonl",
            file=sys.stderr,
        )


def own_sequences(tokens: Tensor) -> Tensor:
    """This process's share of the sequences ``tokens [N, T]``."""
    own = processes.part(len(tokens))
    return tokens[own.start : own.stop]


def _load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None) -> CalibrationTokens:
    request = plan.request
    check_seq_len(request.seq_len, plan.geometry.positions, plan.source_name)
    if otherwise is None:
        otherwise = f", or use {opt('method', quick_method(plan.request.to))}, which reads no text"
    tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration", otherwise)
    if request.calibration == SELF:
        tokens = _written_tokens(plan, tokenizer, scratch, stages)
    else:
        wanted = sequences_of(request.polish, request.seq_len) if request.polish else 0
        further = max(0, wanted - request.samples)
        sizes = request.samples, request.seq_len, request.seed
        tokens = load_calibration(request.calibration, tokenizer, *sizes, further=further)
    for part in (tokens.training, tokens.held_out):
        check_vocabulary(part, plan.geometry.vocabulary, plan.source_name)
    return tokens


def _written_tokens(plan: Plan, tokenizer: Any, scratch: Path, stages: Stages) -> CalibrationTokens:
    """Calibration and held-out sequences sampled from the source; a resumed run has them in ``scratch``.

    Raises InputError when there is nothing to begin a text with, or no room behind it.
    """
    request, saved = plan.request, scratch / SELF_TEXT
    start = first_tokens(tokenizer, plan.source_name)
    if request.seq_len <= len(start):
        raise InputError(
            f"{opt('seq_len', request.seq_len)}: must exceed the {len(start)} tokens that begin every text; raise it"
        )
    count = request.samples + held_out_count(request.samples)
    if saved.is_file():
        tokens = torch.load(saved, weights_only=True)
    else:
        device = choose_device(request.device)
        dtype = training_autocast(plan.checkpoint, device) or compute_dtype(plan.checkpoint, device)
        hide_bars(request.quiet)
        model = load_model(plan.checkpoint, dtype, request.trust_remote_code)
        with stages("text", count * (request.seq_len - len(start)), "token") as advance:
            tokens = write_sequences(model.to(device).eval(), start, count, request.seq_len, request.seed, advance)
        torch.save(tokens, saved.with_suffix(".new"))
        os.replace(saved.with_suffix(".new"), saved)
    return CalibrationTokens(tokens[: request.samples], tokens[request.samples :], SELF, digest(tokens))


@contextmanager
def hidden_states(folder: str | None) -> Iterator[Keep]:
    """Keeps hidden states in memory; with a ``folder``, as ``--spill`` names it, in a file there."""
    if folder is None:
        yield list
        return
    with Spill(folder) as spill:
        yield spill
