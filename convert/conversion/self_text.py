"""``--calibration self``: the source writes the calibration text, which a resumed run finds in the scratch folder."""

import os
from pathlib import Path
from typing import Any

import torch

from kvfold.convert.conversion.journal import SELF_TEXT
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import choose_device, compute_dtype, training_autocast
from kvfold.convert.errors import InputError, opt
from kvfold.convert.progress import Stages
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.stream.stock import hide_bars, load_model
from kvfold.convert.text.self_written import digest, first_tokens, write_sequences
from kvfold.convert.text.windows import CalibrationTokens


def write_tokens(plan: Plan, tokenizer: Any, scratch: Path, stages: Stages) -> CalibrationTokens:
    """Calibration and held-out sequences sampled from the source.

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
