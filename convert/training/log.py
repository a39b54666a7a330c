"""The rows of a training log."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogRow:
    """Figures after ``step`` steps: of training since the row before, or (``eval_``) on held-out text; others are None.

    Losses and the KL are in nats per token; ``eval_excess`` and ``eval_kl`` are relative to the teacher.
    """

    step: int
    tokens: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_kl: float | None = None
    eval_excess: float | None = None

    @property
    def error(self) -> float | None:
        """The figure by which states are compared: the KL on held-out text, without a teacher the loss; may be None."""
        return self.eval_loss if self.eval_kl is None else self.eval_kl

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}
