"""The steps of training and their sequences. Does not import torch, because planning uses
this module.
"""

import math

from kvfold.convert.formatting import parse_number

# Chosen, not tuned: eight rounds, enough for `training.polish.compute_plateau_factor` to judge the
# rate.
AUTO_POLISH_STEPS = 200
# Steps between two evaluations on held-out sequences: chosen, not tuned.
POLISH_ROUND = 25
# KL of the model that ships after 61 thousand tokens, MLA 24+8 / 40+24 refined: 256 0.0768 /
# 0.0221, 512 0.0826 / 0.0224, 1024 0.0931 / 0.0225, 2048 0.1090 / 0.0229, in 1.9, 1.3, 1 and 1
# times the time (measured by a script in git history, 2026-11-26). Not smaller: a batch has two
# sequences of the default length.
BATCH_TOKENS = 1024
# Sequences of a step of refinement. Excess loss of the model that ships after 40 steps on sequences
# of 64 tokens, MQA / MLA 24+8: 2 +0.0411 / +0.0772, 8 +0.0338 / +0.0649, 32 +0.0324 / +0.0601, in 2
# times the time of 8 (measured by a script in git history, 2026-11-24)
_REFINED_SEQUENCES = 8
# The most of its tokens. Chosen, eight sequences of 512: longer ones take no more time and memory.
_REFINED_TOKENS = 4096
# Steps for which the source's states are computed at once: chosen, 2 GB of bfloat16 at a width of
# 4096.
BLOCK_STEPS = 256
# Bytes of activations above which polishing keeps each layer's input alone and runs the layer again
# for its gradients, in a third more time. Chosen: a small part of the memory of a GPU.
MOST_ACTIVATIONS = 4 << 30


def count_polish_steps(polish: int | str, length: int) -> int:
    """Return the number of polishing steps that the option ``polish`` asks for: a number,
    ``"auto"``, or a number of tokens (``"1M"``) in sequences of ``length``.
    """
    if (tokens := parse_number(polish)) is not None:
        return math.ceil(tokens / count_step_tokens(length))
    return AUTO_POLISH_STEPS if polish == "auto" else int(polish)


def count_step_tokens(length: int) -> int:
    """Return the number of tokens in one polishing step, for sequences of ``length`` tokens."""
    return choose_batch_size(length) * length


def choose_batch_size(length: int) -> int:
    """Return the number of sequences of ``length`` tokens in one polishing step."""
    return max(1, BATCH_TOKENS // length)


def choose_refine_batch_size(length: int) -> int:
    """Return the number of sequences of ``length`` tokens in one refinement step."""
    return max(1, min(_REFINED_SEQUENCES, _REFINED_TOKENS // length))


def count_activation_bytes(layers: int, weights: int, width: int, tokens: int) -> int:
    """Return about how many bytes of activations ``layers`` layers of ``weights`` parameters each
    keep for the gradients of ``tokens`` tokens, in float32.
    """
    return 4 * layers * tokens * (2 * weights // width + 10 * width)
