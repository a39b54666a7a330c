"""Losses of a model on a text, token by token, and its perplexity: measures that need no second model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.text.corpus import Document
from kvfold.convert.text.tokenizer import prefix_tokens, tokenize
from kvfold.convert.text.windows import cut


@torch.no_grad()
def token_losses(model: Any, tokens: Tensor, advance: Callable[[int], None] = lambda amount: None) -> Tensor:
    """Negative log-likelihood of every token of ``tokens [N, T]`` but each row's first, ``[N, T - 1]``, nats.

    ``advance(1)`` after each row.
    """
    rows = []
    for row in tokens:
        # A row at a time: logits in float32 take 4 bytes for each token and word of the vocabulary.
        logits = model(input_ids=row[None].to(model.device)).logits[0, :-1].float()
        rows.append(torch.nn.functional.cross_entropy(logits, row[1:].to(logits.device), reduction="none").cpu())
        advance(1)
    return torch.stack(rows)


def token_windows(tokenizer: Any, text: str, windows: int, length: int) -> Tensor:
    """The first ``windows`` stretches of ``length`` tokens of ``text``, ``[windows, length]``; fewer if it is short.

    Each begins with the tokenizer's prefix (BOS, for many).
    """
    prefix = prefix_tokens(tokenizer)
    body = cut(list(tokenize(tokenizer, prefix, [Document(text)])), length - len(prefix), None)[:windows]
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(body), -1), body], dim=1)


def model_perplexity(model: Any, tokens: Tensor) -> float:
    """exp of the mean negative log-likelihood over all tokens of ``tokens [N, T]`` but each row's first."""
    return math.exp(token_losses(model, tokens).double().mean())


def checkpoint_perplexity(folder: Path, tokens: Tensor) -> float:
    """``model_perplexity`` of the checkpoint in ``folder``, loaded by stock transformers in float32."""
    from transformers import AutoModelForCausalLM

    return model_perplexity(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokens)
