"""Calibration text sampled from the model itself, for users without text that resembles the model's use.

Sequences begin with the start of the model's chat template or its BOS token and are sampled at temperature 1, so they
follow the model's own distribution (arXiv 2410.09982 recovers pruned models with such text). Sampling continues after
an EOS token, because training text is packed in the same way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, opt, option_error
from kvfold.convert.request import SELF_AT_ONCE
from kvfold.convert.text.tokenizer import render

_MARK = "kvfold-mark"


def first_tokens(tokenizer: Any, model: str) -> list[int]:
    """The initial tokens of every sequence: the chat template up to the user's message, else BOS, else InputError."""
    if getattr(tokenizer, "chat_template", None) is not None:
        try:
            start, found, _ = render(tokenizer, [{"role": "user", "content": _MARK}]).partition(_MARK)
            tokens: list[int] = list(tokenizer(start, add_special_tokens=False)["input_ids"])
            if found and tokens:
                return tokens
        except InputError:
            raise
        except Exception:  # templates are code of the checkpoint's author: they refuse such a message, raise anything
            pass
    if tokenizer.bos_token_id is not None:
        return [int(tokenizer.bos_token_id)]
    lacks = f"{model} has neither a chat template nor a BOS token to sample from"
    raise option_error("calibration", "self", f": {lacks}; use {opt('calibration', 'FILE')}")


@torch.no_grad()
def write_sequences(
    model: Any, start: list[int], count: int, length: int, seed: int, advance: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Sample ``count`` sequences of ``length`` tokens from a transformers ``model``; returns ``[count, length]``.

    Every sequence begins with the tokens ``start``. Equal seeds produce equal text. ``advance`` is called with the
    number of tokens sampled in each step. Raises InputError if the model's predictions are not finite.
    """
    # On the CPU, so that the device does not change what is drawn.
    generator = torch.Generator().manual_seed(seed)
    written = []
    for first in range(0, count, SELF_AT_ONCE):
        rows = min(SELF_AT_ONCE, count - first)
        tokens = torch.tensor(start, dtype=torch.int64).expand(rows, -1)
        latest, cache = tokens, None
        while tokens.shape[1] < length:
            output = model(input_ids=latest.to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            predicted = output.logits[:, -1].float().softmax(-1).cpu()
            if not torch.isfinite(predicted).all():
                name = opt("calibration", "self")
                raise InputError(f"{name}: the model predicts NaN, so its weights may be damaged; download it again")
            latest = torch.multinomial(predicted, 1, generator=generator)
            tokens = torch.cat([tokens, latest], dim=1)
            advance(rows)
        written.append(tokens)
    return torch.cat(written)
