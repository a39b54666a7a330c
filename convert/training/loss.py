"""Losses of language models: next tokens, and distillation from a teacher's next-token distributions."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log-likelihood, nats per token, of ``tokens [B, T]`` under ``logits [B, T, V]``, float32."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def distillation_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean ``KL(teacher || student)``, nats per token, of ``[B, T, V]`` logits softened by ``temperature``.

    Multiplied by the temperature's square, so that gradients keep their size (Hinton et al., 2015). The last position
    has no next token and does not count.
    """
    student, target = (x[:, :-1].flatten(0, 1).float() / temperature for x in (logits, teacher))
    return divergence(student, target) / len(student) * temperature**2


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """Sum over rows of ``KL(softmax(teacher) || softmax(logits))``, nats, of ``[n, V]`` logits, in float32 or wider.

    Gradients reach ``logits`` only.
    """
    result: Tensor = _Divergence.apply(logits, teacher)  # type: ignore[no-untyped-call]
    return result


class _Divergence(torch.autograd.Function):
    """The gradient, the difference of the two distributions, is made with the loss, in place of what it needs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_q, log_p = logits.to(wide).log_softmax(-1), teacher.to(wide).log_softmax(-1)
        p = log_p.exp()
        loss = (p * log_p.sub_(log_q)).sum()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_q.exp_().sub_(p).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0].to(ctx.saved_tensors[0].dtype), None
