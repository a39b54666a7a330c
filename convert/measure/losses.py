"""Per-token losses and perplexity of a single model on a text."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.text.tokenizer import find_prefix_tokens, tokenize_documents
from kvfold.convert.text.windows import cut_windows


@torch.no_grad()
def compute_token_losses(model: Any, tokens: Iterable[Tensor]) -> Tensor:
    """The loss in nats of each token of ``tokens [N, T]`` except a row's first, ``[N, T - 1]``."""
    rows = []
    for row in tokens:
        # A row at a time: logits in float32 take 4 bytes for each token and word of the vocabulary.
        logits = model(input_ids=row[None].to(model.device)).logits[0, :-1].float()
        labels = row[1:].to(logits.device)
        rows.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none").cpu())
    return torch.stack(rows)


def cut_token_windows(tokenizer: Any, text: str, windows: int, length: int) -> Tensor:
    """The first ``windows`` sequences of ``length`` tokens from ``text``, ``[windows, length]``;
    fewer if the text is too short. Each begins with the special tokens that the tokenizer puts
    first (often BOS).
    """
    prefix = find_prefix_tokens(tokenizer)
    body = cut_windows(
        list(tokenize_documents(tokenizer, prefix, [text])), length - len(prefix), None
    )[:windows]
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(body), -1), body], dim=1)


def measure_perplexity(folder: Path, tokens: Tensor) -> float:
    """The perplexity on ``tokens [N, T]`` of the checkpoint in ``folder``, which stock transformers
    load in float32.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return math.exp(compute_token_losses(model, tokens).double().mean())
