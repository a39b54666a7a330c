"""Compare two checkpoints layer by layer, with one layer of each in memory."""

import sys
from dataclasses import replace
from typing import Any

import torch

from kvfold.attention.drift.report import DriftReport, measure_drift, select_floor_tokens
from kvfold.attention.rounding_schemes import describe_cache_rounding
from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.conversion.calibration import open_comparison_stage
from kvfold.convert.conversion.memory import (
    check_free_memory,
    estimate_comparison_memory,
)
from kvfold.convert.device import choose_compute_dtype, choose_device
from kvfold.convert.errors import InputError
from kvfold.convert.progress import Progress, ProgressStages
from kvfold.convert.request import DriftRequest
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.stock import load_config
from kvfold.convert.text.corpus import check_seq_len, open_corpus
from kvfold.convert.text.tokenizer import check_vocabulary, load_tokenizer
from kvfold.convert.text.windows import draw_sequences


def drift_checkpoints(request: DriftRequest, progress: Progress | None = None) -> DriftReport:
    """Compare ``out`` with ``model`` on ``samples`` sequences of ``seq_len`` tokens from ``text``.

    The default text ships with kvfold and is never used for calibration. ``seed`` selects the
    sequences. ``cache`` rounds the cache of ``out`` alone. ``progress`` works as in
    `convert_checkpoint`, with the stage ``compare`` (tokens). The report's ``about`` contains the
    names and hashes of the
    models and the text. Raises InputError if a checkpoint cannot be opened, the models do not
    match, or the text is too short.

    >>> request = DriftRequest(demo_folder(), demo_folder(), samples=1, seq_len=32)
    >>> drift_checkpoints(request).identical
    True
    """
    source = open_checkpoint(request.model)
    student = open_checkpoint(request.out)
    if (source.folder / RECORD).exists() and not (student.folder / RECORD).exists():
        print(
            f"warning: {request.model} was converted by kvfold, and {request.out} was not; are"
            " MODEL and OUT swapped?",
            file=sys.stderr,
        )
    source.print_notes()
    student.print_notes()
    config = load_config(source, request.trust_remote_code)
    converted = load_config(student, request.trust_remote_code)
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        expected = getattr(config, key, None)
        if getattr(converted, key, None) != expected:
            raise InputError(
                f"{request.out}: {key} must be {expected} as in {request.model}; use a"
                " checkpoint that was converted from that model"
            )
    positions = getattr(config, "max_position_embeddings", None)
    check_seq_len(request.seq_len, positions, source.origin)
    device = choose_device(request.device)
    tokenizer = load_tokenizer(source, request.trust_remote_code, "measuring drift")
    text = open_corpus(request.text, tokenizer, request.seed, "held_out", "text")
    advice = "or lower --samples or --seq-len"
    count = request.samples
    tokens = draw_sequences(text, request.seq_len, count, count, advice)[:count].long()
    on_gpu = device.type == "cuda"
    elements = max(source.count_elements(), student.count_elements())
    need = estimate_comparison_memory(elements, config, tokens.numel(), on_gpu)
    check_free_memory([need], on_gpu)
    teacher = open_layer_stream(source, device, request.dtype)
    compared = open_layer_stream(student, device, request.dtype, request.cache)
    check_vocabulary(tokens, teacher.vocabulary, source.origin)
    stages = ProgressStages(progress, request.quiet)
    floor = select_floor_tokens(tokens)
    with open_comparison_stage(stages, "compare", teacher, tokens, floor) as advance:
        report = measure_drift(teacher, compared, tokens, progress=advance)
    about: dict[str, dict[str, Any]] = {
        "source": {"name": source.origin, "sha256": source.compute_model_digest()},
        "converted": {"name": student.origin, "sha256": student.compute_model_digest()},
        "text": {"name": text.name, "sha256": text.compute_digest(), "seed": request.seed},
    }
    if request.cache is not None:
        rounding = describe_cache_rounding(request.cache)
        about["cache"] = {"rounding": request.cache, "of": "converted", "scheme": rounding}
    return replace(report, about=about)


def open_layer_stream(
    checkpoint: Checkpoint, device: torch.device, dtype: str, rounding: str | None = None
) -> CheckpointStream:
    """A stream that loads the layers of ``checkpoint`` one at a time; ``rounding`` is that of its
    cache. Raises InputError if its tensors do not match its config.
    """
    try:
        stream = CheckpointStream(
            checkpoint.config,
            checkpoint.read_tensor,
            list(checkpoint.tensors),
            device,
            choose_compute_dtype(checkpoint, device, dtype),
            rounding=rounding,
        )
    except InputError as error:
        # Two checkpoints are open: the error must say in which one the problem is.
        raise error.with_prefix(checkpoint.origin) from error
    stream.weights.check_tensors_match(checkpoint)
    return stream
