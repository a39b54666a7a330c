"""The steps of polishing, and the text that they take. Without torch: plans ask for them."""

AUTO_STEPS = 200
ROUND = 25  # steps between two evaluations on held-out sequences
BATCH_TOKENS = 1024


def steps_of(polish: int | str) -> int:
    """The steps of a request's ``polish``: a number, or ``auto``."""
    return AUTO_STEPS if polish == "auto" else int(polish)


def batch_size(length: int) -> int:
    """Sequences of ``length`` tokens in a step."""
    return max(1, BATCH_TOKENS // length)


def sequences_of(polish: int | str, length: int) -> int:
    """Sequences of ``length`` tokens that all steps take together, each once."""
    return steps_of(polish) * batch_size(length)
