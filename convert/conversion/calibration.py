"""Load what a calibrated conversion needs of its source: its layer stream and its calibration text."""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvfold.attention.drift.report import dtype_name
from kvfold.convert import processes
from kvfold.convert.checkpoint.files import replacing
from kvfold.convert.conversion.journal import PRECISION, SELF_TEXT
from kvfold.convert.conversion.memory import writes_text
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import text_name
from kvfold.convert.conversion.source import source_layer, source_rotary
from kvfold.convert.device import choose_device, training_autocast
from kvfold.convert.errors import option_error
from kvfold.convert.methods.registry import quick_method
from kvfold.convert.progress import Stages
from kvfold.convert.request import LONG_LENGTH, SELF
from kvfold.convert.sizes import tokens_of
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import hide_bars
from kvfold.convert.text.corpus import BUILT_IN, calibration_texts, check_seq_len
from kvfold.convert.text.self_written import turns_of, write_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, load_calibration
from kvfold.convert.training.budget import batch_size, steps_of
from kvfold.convert.walk.hidden import Keep, Spill
from kvfold.convert.walk.statistics import ReadHeads, SourceHeads


def source_stream(plan: Plan, scratch: Path) -> CheckpointStream:
    """Open the source as a stream of layers in float32, on the device and in the precision that the
    request names.

    A precision chosen by measurement is printed, and saved in ``scratch``, so that a resumed run
    uses it too.
    """
    request = plan.request
    checkpoint = plan.checkpoint
    device = choose_device(plan.request.device)
    saved = scratch / PRECISION

    def choose() -> torch.dtype | None:
        if not saved.is_file():
            # Float32 weights would be rounded to less than they are stored in.
            name = (
                "float32"
                if request.precision == "auto" and request.dtype == "float32"
                else request.precision
            )
            chosen = training_autocast(checkpoint, device, name) or torch.float32
            with replacing(saved) as new:
                new.write_text(dtype_name(chosen))
        chosen = getattr(torch, saved.read_text())
        return None if chosen == torch.float32 else chosen

    autocast = processes.broadcast_from_rank0(choose)
    if autocast is not None and not request.quiet:
        other = "--precision float32"
        print(
            f"calibration passes and training in bfloat16, which this {device.type} multiplies"
            f" faster ({other} turns it off); held-out text in float32",
            file=sys.stderr,
        )
    # On a GPU too: held-out text is judged in float32, and the heads of a teacher get a residual
    # stream of float32.
    return CheckpointStream(
        checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, autocast=autocast
    )


def load_tokens(
    plan: Plan, scratch: Path, stages: Stages, otherwise: str | None = None
) -> CalibrationTokens:
    """Load the calibration and held-out sequences, on the first of several processes for all.

    ``scratch`` stores text that the source wrote. Raises InputError without a tokenizer or enough
    text; the message recommends ``otherwise``, by default a method that reads no text.
    """
    request = plan.request
    quick = f"--method {quick_method(plan.request.to)}"

    def load() -> CalibrationTokens:
        check_seq_len(request.length, plan.geometry.positions, plan.checkpoint.origin)
        instead = f", or use {quick}, which reads no text" if otherwise is None else otherwise
        tokenizer = load_tokenizer(
            plan.checkpoint, request.trust_remote_code, "calibration", instead
        )
        # Each step of polishing takes sequences that no other step had, while there are any.
        wanted = (
            steps_of(request.polish, request.length) * batch_size(request.length)
            if request.polish
            else 0
        )
        further = max(0, wanted - request.samples)
        sizes = request.samples, request.length, request.seed
        # Only a number of tokens says how much text there must be.
        enough = tokens_of(request.polish) is None or request.repeat_text
        texts = calibration_texts(request.calibration, plan.checkpoint.chats)
        long_length = min(LONG_LENGTH, plan.geometry.positions)
        write = partial(_written_sequences, plan, tokenizer, scratch, stages)
        spec = texts if len(texts) > 1 else texts[0]
        tokens = load_calibration(
            spec,
            tokenizer,
            *sizes,
            further=further,
            fewer=enough,
            write=write,
            long_length=long_length,
        )
        for part in (tokens.training, tokens.held_out, tokens.long):
            check_vocabulary(part, plan.geometry.vocabulary, plan.checkpoint.origin)
        return tokens

    tokens = processes.broadcast_from_rank0(load)
    if not request.quiet:
        count, length = tokens.calibration.shape
        faster = f"({quick} needs no text and is faster, but less accurate)"
        print(
            f"calibrating on {count} x {length} tokens of {text_name(tokens.source)} {faster}",
            file=sys.stderr,
        )
        if plan.checkpoint.chats and tokens.plain:
            chats = (
                f"{', '.join(tokens.plain)}: plain text without `messages`, but the model has a"
                " chat template"
            )
            written = f"--calibration {SELF} adds dialogues that it writes itself"
            if writes_text(plan):
                without = f"--calibration {SELF}:0"
                written = f"dialogues that it writes itself are added ({without} leaves them out)"
            print(
                f"{chats}; {written}; conversations that resemble its use calibrate better",
                file=sys.stderr,
            )
        elif tokens.source == BUILT_IN:
            better = "--calibration FILE.txt|FILE.jsonl"
            print(
                f"text that resembles the model's use calibrates better: {better}", file=sys.stderr
            )
    return tokens


def _written_sequences(
    plan: Plan, tokenizer: Any, scratch: Path, stages: Stages, count: int
) -> Tensor:
    """Sample ``count`` sequences ``[count, T]`` from the source; a resumed run loads them from
    ``scratch``.
    """
    request = plan.request
    saved = scratch / SELF_TEXT
    turns = turns_of(tokenizer, plan.checkpoint.origin)
    check_vocabulary(torch.tensor(turns.start), plan.geometry.vocabulary, plan.checkpoint.origin)
    if request.length <= len(turns.start):
        rule = f"must exceed {len(turns.start)}, the length of every text's prefix; raise it"
        raise option_error("seq_len", request.length, rule)
    if saved.is_file():
        return cast(Tensor, torch.load(saved, weights_only=True))
    device = choose_device(request.device)
    dtype = training_autocast(plan.checkpoint, device, request.precision) or torch.float32
    hide_bars(request.quiet)
    model = load_model(plan.checkpoint, dtype, request.trust_remote_code)
    with stages("text", count * (request.length - len(turns.start)), "token") as advance:
        tokens = write_sequences(
            model.to(device).eval(), turns, count, request.length, request.seed, advance
        )
    with replacing(saved) as new:
        torch.save(tokens, new)
    return tokens


def source_heads(plan: Plan) -> ReadHeads | None:
    """Return a function that reads a layer's attention for the statistics; None if they do not need
    its weights.
    """
    model = plan.model
    # Statistics need the weights if queries and keys are normalized or the attention class does not
    # expose them; other layers are not read a second time.
    if model.qk_norm is None and model.family.attention.shown:
        return None

    def read(layer: int) -> SourceHeads:
        how = model.layers[layer]
        return SourceHeads(
            source_layer(plan, layer), source_rotary(plan, layer), how.scale, how.clip
        )

    return read


def hidden_states(folder: str | None) -> AbstractContextManager[Keep]:
    """A context manager that keeps hidden states in memory, or in a file in ``folder``
    (``--spill``).
    """
    return nullcontext(list) if folder is None else Spill(folder)
