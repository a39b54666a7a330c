"""Load the source of a conversion: its layer stream, its attention weights and its calibration text."""

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.checkpoint.tensors import refuse_non_finite, torch_dtype
from kvfold.convert.conversion.journal import PRECISION, SELF_TEXT
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import text_name
from kvfold.convert.device import choose_device, compute_dtype, training_autocast
from kvfold.convert.errors import InputError, opt, option_error
from kvfold.convert.families.layout import layer_rotary, read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.methods.registry import quick_method
from kvfold.convert.progress import Stages
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.sizes import tokens_of
from kvfold.convert.stream.stock import hide_bars, load_model
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.corpus import BUILT_IN, check_seq_len
from kvfold.convert.text.self_written import first_tokens, write_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, load_calibration
from kvfold.convert.training.budget import sequences_of
from kvfold.convert.transforms.weights import AttentionWeights, Rotary
from kvfold.convert.walk.hidden import Keep, Spill
from kvfold.convert.walk.statistics import ReadHeads, SourceHeads
from kvfold.convert.walk.walk import Step


def source_stream(plan: Plan, scratch: Path) -> CheckpointStream:
    """Open the source as a stream of layers, on the device and in the precision that the request names.

    A precision chosen by measurement is printed, and saved in ``scratch``, so that a resumed run uses it too.
    """
    request, checkpoint, device = plan.request, plan.checkpoint, choose_device(plan.request.device)
    saved = scratch / PRECISION

    def choose() -> torch.dtype | None:
        if not saved.is_file():
            # Float32 weights would be rounded to less than they are stored in.
            name = "float32" if request.precision == "auto" and request.dtype == "float32" else request.precision
            chosen = training_autocast(checkpoint, device, name) or torch.float32
            saved.write_text(str(chosen).removeprefix("torch."))
        chosen = getattr(torch, saved.read_text())
        return None if chosen == torch.float32 else chosen

    autocast = processes.from_first(choose)
    if autocast is not None and not request.quiet:
        other = opt("precision", "float32")
        print(
            f"calibration passes and training in bfloat16, which this {device.type} multiplies faster ({other} "
            "turns it off); held-out text in float32",
            file=sys.stderr,
        )
    names, dtype = list(checkpoint.tensors), compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, names, device, dtype, autocast=autocast)


def source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """Read the source's attention in ``layer``. Raises InputError if a weight needed by its transform is not finite."""
    checkpoint, needed = plan.checkpoint, set(plan.reads[layer])

    def read(name: str) -> Tensor:
        info = checkpoint.info(name)
        if name not in needed:
            # Pooling leaves queries and the output alone: they have a shape, but no bytes are read.
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        tensor = checkpoint.read(name)
        refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {info.file}")
        return tensor

    return read_layer(plan.model, layer, read)


def source_heads(plan: Plan) -> ReadHeads | None:
    """Return a function that reads a layer's attention for the statistics; None if they do not need its weights."""
    model = plan.model
    # Statistics need the weights if queries and keys are normalized or the attention class does not expose them; other
    # layers are not read a second time.
    if model.qk_norm is None and model.family.attention.shown:
        return None

    def read(layer: int) -> SourceHeads:
        how = model.layers[layer]
        return SourceHeads(source_layer(plan, layer), source_rotary(plan, layer), how.scale, how.clip)

    return read


def source_rotary(plan: Plan, layer: int) -> Rotary:
    """The rotary frequencies for ``layer``; with longrope the short-range set, because the context is limited to it."""
    return layer_rotary(plan.model, layer, "short")


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The rotary frequencies for fitting a fold. They only guide the fit: the output keeps the source's rotation."""
    try:
        return source_rotary(plan, layer)
    except InputError:
        # Rope types whose frequencies depend on the text length (dynamic) are fitted as for short texts.
        model = plan.model
        kind = model.layers[layer].type
        table = {**rope_table(model.values, kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables})
        return layer_rotary(plain, layer)


def load_tokens(plan: Plan, scratch: Path, stages: Stages, otherwise: str | None = None) -> CalibrationTokens:
    """Load the calibration and held-out sequences, on the first of several processes for all.

    ``scratch`` stores text that the source wrote. Raises InputError without a tokenizer or enough text; the message
    recommends ``otherwise``, by default a method that reads no text.
    """
    request, quick = plan.request, opt("method", quick_method(plan.request.to))

    def load() -> CalibrationTokens:
        check_seq_len(request.seq_len, plan.geometry.positions, plan.checkpoint.origin)
        instead = f", or use {quick}, which reads no text" if otherwise is None else otherwise
        tokenizer = load_tokenizer(plan.checkpoint, request.trust_remote_code, "calibration", instead)
        if request.calibration == SELF:
            tokens = _written_tokens(plan, tokenizer, scratch, stages)
        else:
            # Each step of polishing takes sequences that no other step had, while there are any.
            wanted = sequences_of(request.polish, request.seq_len) if request.polish else 0
            further = max(0, wanted - request.samples)
            sizes = request.samples, request.seq_len, request.seed
            # Only a number of tokens says how much text there must be.
            enough = tokens_of(request.polish) is None or request.repeat_text
            tokens = load_calibration(request.calibration, tokenizer, *sizes, further=further, fewer=enough)
        for part in (tokens.training, tokens.held_out):
            check_vocabulary(part, plan.geometry.vocabulary, plan.checkpoint.origin)
        return tokens

    tokens = processes.from_first(load)
    if not request.quiet:
        count, length = tokens.calibration.shape
        faster = f"({quick} needs no text and is faster, but less accurate)"
        print(f"calibrating on {count} x {length} tokens of {text_name(tokens.source)} {faster}", file=sys.stderr)
        if tokens.source == BUILT_IN:
            better = f"{opt('calibration', 'FILE')}.txt|FILE.jsonl"
            print(f"text that resembles the model's use calibrates better: {better}", file=sys.stderr)
    return tokens


def _written_tokens(plan: Plan, tokenizer: Any, scratch: Path, stages: Stages) -> CalibrationTokens:
    """Sample calibration and held-out sequences from the source; a resumed run loads them from ``scratch``."""
    request, saved = plan.request, scratch / SELF_TEXT
    start = first_tokens(tokenizer, plan.checkpoint.origin)
    if request.seq_len <= len(start):
        rule = f"must exceed {len(start)}, the length of every text's prefix; raise it"
        raise option_error("seq_len", request.seq_len, rule)
    count = request.samples + held_out_count(request.samples)
    if saved.is_file():
        tokens = torch.load(saved, weights_only=True)
    else:
        device = choose_device(request.device)
        dtype = training_autocast(plan.checkpoint, device, request.precision) or compute_dtype(plan.checkpoint, device)
        hide_bars(request.quiet)
        model = load_model(plan.checkpoint, dtype, request.trust_remote_code)
        with stages("text", count * (request.seq_len - len(start)), "token") as advance:
            tokens = write_sequences(model.to(device).eval(), start, count, request.seq_len, request.seed, advance)
        # Renamed, so that a killed run never leaves a partial file to resume from.
        torch.save(tokens, saved.with_suffix(".new"))
        os.replace(saved.with_suffix(".new"), saved)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return CalibrationTokens(tokens[: request.samples], tokens[request.samples :], SELF, digest)


def own_sequences(tokens: Tensor) -> Tensor:
    """This process's share of the sequences ``tokens [N, T]``."""
    own = processes.part(len(tokens))
    return tokens[own.start : own.stop]


def hidden_states(folder: str | None) -> AbstractContextManager[Keep]:
    """A context manager that keeps hidden states in memory, or in a file in ``folder`` (``--spill``)."""
    return nullcontext(list) if folder is None else Spill(folder)


def held_out_error(plan: Plan, layer: int, step: Step | None) -> Callable[[Any], float]:
    """Return a function for the held-out error of transformed weights for ``layer``, encoded as in the files."""

    def error(weights: Any) -> float:
        if step is None:
            raise ValueError("an error can be measured only with text; register the method with reads_text=True")
        return step.attention_error(plan.layout.encode(layer, weights))

    return error
