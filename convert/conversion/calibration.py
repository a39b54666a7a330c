"""The text of a calibrated run, read or written by the source itself, and a place for hidden states."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from kvfold.convert.text.corpus import BUILT_IN
from kvfold.convert.text.self_written import digest, first_tokens, write_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration
from kvfold.convert.training.budget import sequences_of
from kvfold.convert.walk.hidden import Keep, Spill
from kvfold.convert.walk.walk import Step


def load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None = None) -> CalibrationTokens:
    """Calibration and held-out sequences; text that the source writes itself is kept in ``scratch``.

    The first of several processes reads them for all, and prints what they are. Raises InputError without a tokenizer
    or enough text; ``otherwise`` is what to do instead, by default a method that reads no text.
    """
    request, quick = plan.request, opt("method", quick_method(plan.request.to))

    def load() -> CalibrationTokens:
        check_seq_len(request.seq_len, plan.geometry.positions, plan.checkpoint.origin)
        instead = f", or use {quick}, which reads no text" if otherwise is None else otherwise
        tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration", instead)
        if request.calibration == SELF:
            tokens = _written_tokens(plan, tokenizer, scratch, stages)
        else:
            # Each step of polishing takes sequences that no other step had.
            wanted = sequences_of(request.polish, request.seq_len) if request.polish else 0
            further = max(0, wanted - request.samples)
            sizes = request.samples, request.seq_len, request.seed
            tokens = load_calibration(request.calibration, tokenizer, *sizes, further=further)
        for part in (tokens.training, tokens.held_out):
            check_vocabulary(part, plan.geometry.vocabulary, plan.checkpoint.origin)
        return tokens

    tokens = processes.from_first(load)
    if not request.quiet:
        count, length = tokens.calibration.shape
        text = "text that the source wrote itself" if tokens.source == SELF else tokens.source
        faster = f"({quick} needs no text and is faster, but worse)"
        print(f"calibrating on {count} x {length} tokens of {text} {faster}", file=sys.stderr)
        if tokens.source == BUILT_IN:
            better = f"{opt('calibration', 'FILE')}.txt|FILE.jsonl"
            print(f"text that resembles the model's use calibrates better: {better}", file=sys.stderr)
    return tokens


def _written_tokens(plan: Plan, tokenizer: Any, scratch: Path, stages: Stages) -> CalibrationTokens:
    """Calibration and held-out sequences sampled from the source; a resumed run has them in ``scratch``.

    Raises InputError when there is nothing to begin a text with, or no room behind it.
    """
    request, saved = plan.request, scratch / SELF_TEXT
    start = first_tokens(tokenizer, plan.checkpoint.origin)
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
        # Renamed, so that a run that is killed meanwhile leaves no part of it to resume from.
        torch.save(tokens, saved.with_suffix(".new"))
        os.replace(saved.with_suffix(".new"), saved)
    return CalibrationTokens(tokens[: request.samples], tokens[request.samples :], SELF, digest(tokens))


def own_sequences(tokens: Tensor) -> Tensor:
    """This process's share of the sequences ``tokens [N, T]``."""
    own = processes.part(len(tokens))
    return tokens[own.start : own.stop]


def hidden_states(folder: str | None) -> AbstractContextManager[Keep]:
    """Keeps hidden states in memory; with a ``folder``, as ``--spill`` names it, in a file there."""
    return nullcontext(list) if folder is None else Spill(folder)


def held_out_error(plan: Plan, layer: int, step: Step | None) -> Callable[[Any], float]:
    """The error of transformed weights of ``layer`` on held-out text, as the files will hold them."""

    def error(weights: Any) -> float:
        if step is None:
            raise ValueError("layer: no text to measure an error on; register the method with reads_text=True")
        return step.attention_error(plan.layout.encode(layer, weights))

    return error
