"""Perplexity of a stock model on a text: the measure that needs no second model."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.text.documents import Document
from kvfold.convert.text.tokenizer import prefix_tokens, tokenize
from kvfold.convert.text.windows import cut


def token_windows(tokenizer: Any, text: str, windows: int, length: int) -> Tensor:
    """The first ``windows`` stretches of ``length`` tokens of ``text``, ``[windows, length]``; fewer if it is short.

    Each begins with the tokenizer's prefix (BOS, for many).
    """
    prefix = prefix_tokens(tokenizer)
    body = cut(list(tokenize(tokenizer, prefix, [Document(text)])), length - len(prefix), None)[:windows]
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(body), -1), body], dim=1)


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, batch: int = 8) -> float:
    """exp of the mean negative log-likelihood over all tokens of ``tokens [N, T]`` but each row's first."""
    total = 0.0
    for rows in torch.split(tokens, batch):
        logits = model(input_ids=rows).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        total += loss.item()
    return math.exp(total / (tokens.shape[0] * (tokens.shape[1] - 1)))


def checkpoint_perplexity(folder: Path, tokens: Tensor) -> float:
    """``perplexity`` of the checkpoint in ``folder``, loaded by stock transformers in float32."""
    from transformers import AutoModelForCausalLM

    return perplexity(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokens)
