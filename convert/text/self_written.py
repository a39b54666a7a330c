"""Text that a model writes itself, for those who have none that resembles its use.

Sequences are sampled at temperature 1 from the start of the model's chat template, or from its BOS token: so they are
what the model takes text to be (arXiv 2410.09982 recovers pruned models on such text). Behind an EOS token a sequence
goes on, as packed training text does.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, opt

_AT_ONCE = 48  # sequences
_MARK = "kvfold-mark"


def first_tokens(tokenizer: Any, model: str) -> list[int]:
    """The tokens that every sequence begins with: the chat template up to a user's first words, else the BOS token.

    Raises InputError for a tokenizer with neither.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        # Templates are code of the checkpoint's author: they refuse such a message, raise anything, or change it.
        with suppress(Exception):
            text: str = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
            start, found, _ = text.partition(_MARK)
            tokens: list[int] = list(tokenizer(start, add_special_tokens=False)["input_ids"])
            if found and tokens:
                return tokens
    if tokenizer.bos_token_id is not None:
        return [int(tokenizer.bos_token_id)]
    raise InputError(
        f"{opt('calibration', 'self')}: {model} has neither a chat template nor a BOS token to begin text with; give "
        f"{opt('calibration', 'FILE')}"
    )


@torch.no_grad()
def write_sequences(
    model: Any, start: list[int], count: int, length: int, seed: int, advance: Callable[[int], None] = lambda _: None
) -> Tensor:
    """``count`` sequences of ``length`` tokens sampled from ``model`` (loaded by transformers), ``[count, length]``.

    Equal seeds give equal text. ``advance`` is told the number of tokens of each step. Raises InputError when the
    model's predictions are not finite.
    """
    # On the CPU, so that the device does not change what is drawn.
    generator = torch.Generator().manual_seed(seed)
    written = []
    for first in range(0, count, _AT_ONCE):
        rows = min(_AT_ONCE, count - first)
        tokens = torch.tensor(start, dtype=torch.int64).expand(rows, -1)
        latest, cache = tokens, None
        while tokens.shape[1] < length:
            output = model(input_ids=latest.to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            predicted = output.logits[:, -1].float().softmax(-1).cpu()
            if not torch.isfinite(predicted).all():
                name = opt("calibration", "self")
                raise InputError(f"{name}: the model predicts NaN, so its weights are damaged; fetch it again")
            latest = torch.multinomial(predicted, 1, generator=generator)
            tokens = torch.cat([tokens, latest], dim=1)
            advance(rows)
        written.append(tokens)
    return torch.cat(written)
