"""Calibration text sampled from the model itself: dialogues of a chat model, or text that follows
its BOS token.

Sequences are sampled at temperature 1, so they follow the model's own distribution (arXiv
2410.09982 recovers pruned models with such text). After the start of its chat template a model
writes the user's turn (Magpie, arXiv 2406.08464); the template is completed after it and after the
reply. Sampling continues after an EOS token, because training text is packed in the same way.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError, option_error
from kvfold.convert.request import SELF_TOKENS
from kvfold.convert.text.corpus import render_chat

_USER = "kvfold-user"
_REPLY = "kvfold-reply"


@dataclass(frozen=True)
class ChatTurnTokens:
    """The special tokens that begin a dialogue, lead from the user's turn to the reply, and end the
    reply.

    The last two are empty where turns do not end with a special token: the model then writes its
    template itself.
    """

    start: list[int]
    asked: Sequence[int] = ()
    answered: Sequence[int] = ()


def find_turn_tokens(tokenizer: Any, origin: str) -> ChatTurnTokens:
    """The tokens between the turns of the tokenizer's chat template; without a template, the BOS
    token alone. Raises InputError if there is no BOS token either.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        messages: list[Mapping[str, Any]] = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _REPLY},
        ]
        text = ""
        with suppress(ValueError):  # a template may refuse such messages
            text = render_chat(tokenizer, messages)
        pieces = re.split(f"{_USER}|{_REPLY}", text)[:3]
        start, *ends = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        if start and ends:
            special = [end for end in ends if end and end[0] in tokenizer.all_special_ids]
            return ChatTurnTokens(start, *(special if len(special) == 2 else ()))
    if tokenizer.bos_token_id is not None:
        return ChatTurnTokens([int(tokenizer.bos_token_id)])
    raise option_error(
        "calibration",
        "self",
        f": {origin} has neither a chat template nor a BOS token to sample from; use --calibration"
        " FILE",
    )


@torch.no_grad()
def sample_sequences(
    model: Any,
    turns: ChatTurnTokens,
    count: int,
    length: int,
    seed: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """``count`` sequences of ``length`` tokens that the ``model`` writes at temperature 1,
    ``[count, length]``.

    Every sequence begins with ``turns.start``. Equal seeds produce equal text. ``advance`` is
    called with the number of tokens written in each step. Raises InputError if the model's
    predictions are not finite.
    """
    # On the CPU, so that the device does not change what is drawn.
    generator = torch.Generator().manual_seed(seed)
    ends = [tokens[0] for tokens in (turns.asked, turns.answered) if tokens]
    sequences = [torch.empty(0, length, dtype=torch.int64)]
    at_once = max(1, SELF_TOKENS // length)
    for first in range(0, count, at_once):
        rows = min(at_once, count - first)
        tokens = torch.tensor(turns.start, dtype=torch.int64).expand(rows, -1)
        latest = tokens
        cache = None
        # Of each sequence: tokens that the template gives next, and those after each turn.
        given: list[list[int]] = [[] for _ in range(rows)]
        completions = [
            cycle([turns.asked[1:], [*turns.answered[1:], *turns.start]]) for _ in range(rows)
        ]
        while tokens.shape[1] < length:
            output = model(
                input_ids=latest.to(model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            predicted = output.logits[:, -1].float().softmax(-1).cpu()
            if not torch.isfinite(predicted).all():
                raise InputError(
                    "--calibration self: the model predicts NaN, so its weights may be damaged;"
                    " download it again"
                )
            sampled = torch.multinomial(predicted, 1, generator=generator)[:, 0].tolist()
            for row, token in enumerate(sampled):
                if given[row]:
                    sampled[row] = given[row].pop(0)
                elif token in ends:
                    given[row] = [*next(completions[row])]
            latest = torch.tensor(sampled)[:, None]
            tokens = torch.cat([tokens, latest], dim=1)
            advance(rows)
        sequences.append(tokens)
    return torch.cat(sequences)
