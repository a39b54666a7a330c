"""The steps of polishing, their sequences and logits. Does not import torch, because planning uses this module."""

import math

from kvfold.convert.sizes import tokens_of

# Chosen, not tuned: eight rounds, enough for `training.polish.slowdown` to judge the rate.
AUTO_POLISH_STEPS = 200
# Steps between two evaluations on held-out sequences: chosen, not tuned.
POLISH_ROUND = 25
# KL of the model that ships after 60 steps, MLA 24+8 / 40+24 refined: 512 0.1112 / 0.0261, 1024 0.1045 / 0.0249, 2048
# 0.0997 / 0.0243, in twice the time of 1024 (bench_polish_constants.py, 2026-11-23)
BATCH_TOKENS = 1024
# Steps for which the source's states are computed at once: chosen, 2 GB of bfloat16 at a width of 4096.
BLOCK_STEPS = 256
# Elements at once. Derived: the allocator reuses float32 blocks below 32 MiB instead of mapping them anew.
LOGITS = 6 << 20


def steps_of(polish: int | str, length: int) -> int:
    """The steps requested by ``polish``: a number, ``"auto"``, or tokens (``"1M"``) in sequences of ``length``."""
    if (tokens := tokens_of(polish)) is not None:
        return math.ceil(tokens / (batch_size(length) * length))
    return AUTO_POLISH_STEPS if polish == "auto" else int(polish)


def batch_size(length: int) -> int:
    """The number of sequences of ``length`` tokens in one step."""
    return max(1, BATCH_TOKENS // length)


def sequences_of(polish: int | str, length: int) -> int:
    """The number of sequences of ``length`` tokens used by all steps together; no sequence is used twice."""
    return steps_of(polish, length) * batch_size(length)
