"""The source of a conversion: its stream of layers, its attention read from its files, and the text that it reads."""

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
from kvfold.convert.conversion.journal import SELF_TEXT
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import choose_device, compute_dtype, training_autocast
from kvfold.convert.errors import InputError, opt
from kvfold.convert.families.layout import layer_rotary, read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.methods.registry import quick_method
from kvfold.convert.progress import Stages
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.stream.stock import hide_bars, load_model
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.corpus import BUILT_IN
from kvfold.convert.text.self_written import first_tokens, write_sequences
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration
from kvfold.convert.training.budget import sequences_of
from kvfold.convert.transforms.weights import AttentionWeights, Rotary
from kvfold.convert.walk.hidden import Keep, Spill
from kvfold.convert.walk.statistics import ReadHeads, SourceHeads
from kvfold.convert.walk.walk import Step


def source_stream(plan: Plan) -> CheckpointStream:
    """The source as a stream of layers, on the device and in the precision that the request names."""
    checkpoint, device = plan.checkpoint, choose_device(plan.request.device)
    dtype = compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype)


def source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """The source's attention in ``layer``. Raises InputError when a weight that its transform reads is not finite."""
    checkpoint, needed = plan.checkpoint, set(plan.reads[layer])

    def read(name: str) -> Tensor:
        info = checkpoint.info(name)
        if name not in needed:
            # Pooling leaves queries and the output alone: they get a shape, and no bytes are read.
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        tensor = checkpoint.read(name)
        refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {info.file}")
        return tensor

    return read_layer(plan.model, layer, read)


def source_heads(plan: Plan) -> ReadHeads | None:
    """Reads a layer for statistics that take its weights; None where these say nothing more."""
    model = plan.model
    # They do behind norms on queries and keys, and where attention does not show its queries and keys: other layers are
    # not read once more for nothing.
    if model.qk_norm is None and model.family.attention.shown:
        return None

    def read(layer: int) -> SourceHeads:
        how = model.layers[layer]
        return SourceHeads(source_layer(plan, layer), source_rotary(plan, layer), how.scale, how.clip)

    return read


def source_rotary(plan: Plan, layer: int) -> Rotary:
    """Frequencies of ``layer``; those of the short range where longrope has two sets (the context is cut to it)."""
    return layer_rotary(plan.model, layer, "short")


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The frequencies that a fold is fitted to. They only guide the fit: the model keeps its own rotation."""
    try:
        return source_rotary(plan, layer)
    except InputError:
        # Rope types whose frequencies depend on the length of the text (dynamic) count as those of short texts.
        model = plan.model
        kind = model.layers[layer].type
        table = {**rope_table(model.values, kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables})
        return layer_rotary(plain, layer)


def fold_context(plan: Plan, layer: int) -> int:
    """The number of positions back that ``layer`` has to see."""
    window = plan.model.layers[layer].window
    return min(plan.geometry.positions, window or plan.geometry.positions)


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
    """Calibration and held-out sequences sampled from the source; a resumed run has them in ``scratch``."""
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
    return CalibrationTokens(
        tokens[: request.samples], tokens[request.samples :], SELF, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    )


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
