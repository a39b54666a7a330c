"""Per-token losses and perplexity of a single model on a text."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.attention.drift.compare import split_logits
from kvfold.convert.stream.stock import ModelHead
from kvfold.convert.text.tokenizer import find_prefix_tokens, tokenize_documents
from kvfold.convert.text.windows import cut_windows


@torch.no_grad()
def compute_token_losses(model: Any, tokens: Iterable[Tensor]) -> Tensor:
    """The loss in nats of each token of ``tokens [N, T]`` except a row's first, ``[N, T - 1]``."""
    head = ModelHead(model)
    rows = []
    for row in tokens:
        sequence = row[None].to(model.device)
        states = head.compute_states(sequence)[:, :-1]
        losses = [
            cross_entropy(
                head.compute_logits(states[block])[0].float(),
                sequence[:, 1:][block][0].to(states.device),
                reduction="none",
            ).cpu()
            for block in split_logits(states, head.vocabulary, states.device)
        ]
        rows.append(torch.cat(losses))
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
