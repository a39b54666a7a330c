"""``kvfold chat``: put the same prompts to one or two models, with transformers' own generation and
chat template.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import click
import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from kvfold.attention.deepseek import absorb
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.device import choose_compute_dtype, choose_device
from kvfold.convert.errors import InputError
from kvfold.convert.progress import ProgressStages
from kvfold.convert.request import ChatRequest, EvalRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.text.corpus import render_chat
from kvfold.convert.text.tokenizer import find_prefix_tokens, load_tokenizer

_POSITIONS = 1 << 17  # of a model whose config names no maximum
_LONGEST_TOKEN = 64  # characters: longer ones, of spaces, do not fill a conversation


@dataclass
class ChatModel:
    """A loaded model with its tokenizer and its conversation so far.

    model, tokenizer: transformers' own.
    messages: its side of the conversation so far, which a chat template reads.
    """

    model: Any
    tokenizer: Any
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer_prompt(self, prompt: str, max_new_tokens: int) -> str:
        """Print the greedy answer to ``prompt`` word by word, add it to the conversation, and
        return it. A model without a chat template continues the prompt.

        If the conversation exceeds the model's positions, the text says so, and a new one begins.
        """
        self.messages.append({"role": "user", "content": prompt})
        positions = getattr(self.model.config, "max_position_embeddings", None) or _POSITIONS
        tokens = tokenize_chat(self.tokenizer, self.messages, positions * _LONGEST_TOKEN)
        if len(tokens) + max_new_tokens > positions:
            self.messages.clear()
            text = f"({len(tokens)} tokens and a reply exceed {positions} positions; starting anew)"
            print(text)
            return text
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        reply = generate_reply(self.model, self.tokenizer, tokens, max_new_tokens, streamer)
        answer: str = self.tokenizer.decode(reply, skip_special_tokens=True).strip()
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def tokenize_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], longest: int = _POSITIONS, **ending: bool
) -> Tensor:
    """The token ids ``[T]`` after which a model replies to ``messages``: their first ``longest``
    characters in the tokenizer's chat template, which gets ``ending`` too. Without a template, the
    model continues the last message.
    """
    prefix: list[int] = []
    if tokenizer.chat_template is None:
        prefix = find_prefix_tokens(tokenizer)
        text = messages[-1]["content"][:longest]
    else:
        try:
            text = render_chat(tokenizer, messages, longest, add_generation_prompt=True, **ending)
        except ValueError as error:
            raise InputError(
                f"{error}; correct chat_template.jinja or tokenizer_config.json"
            ) from None
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([*prefix, *tokens])


@torch.no_grad()
def generate_reply(
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
) -> Tensor:
    """The token ids ``[n]`` of the model's greedy reply to ``prompt [T]``, which ends at an end
    token or after ``max_new_tokens``.
    """
    ends = model.generation_config.eos_token_id
    # Not the model's own settings, which may sample or penalize repetition.
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=0,
    )
    tokens = prompt[None].to(model.device)
    written: Tensor = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=greedy,
        streamer=streamer,
    )
    return written[0, len(prompt) :].cpu()


def load_whole_model(checkpoint: Checkpoint, request: ChatRequest | EvalRequest) -> Any:
    """The whole model in ``checkpoint``, on the request's device and in its dtype."""
    device = choose_device(request.device)
    dtype = choose_compute_dtype(checkpoint, device, request.dtype)
    return load_model(checkpoint, dtype, request.trust_remote_code).to(device).eval()


def load_chat_model(name: str, request: ChatRequest) -> ChatModel:
    """The model ``name`` with its tokenizer, ready to chat; an MLA model of a stock class caches
    only its latent.
    """
    checkpoint = open_checkpoint(name)
    checkpoint.print_notes()
    tokenizer = load_tokenizer(checkpoint, request.trust_remote_code, "a chat")
    model = load_whole_model(checkpoint, request)
    # Other attention has nothing to absorb.
    with suppress(ValueError):
        absorb(model)
    return ChatModel(model, tokenizer)


def answer_prompts(request: ChatRequest, prompts: IO[str]) -> None:
    """Print the answer of each model to every line of ``prompts``, until its end or Ctrl-C."""
    names = [request.model, *filter(None, [request.against])]
    speakers = []
    for name in names:
        with ProgressStages()(f"reading {name}"):
            speakers.append(load_chat_model(name, request))
    if speakers[0].tokenizer.chat_template is None:
        click.echo("the model has no chat template: it continues each prompt", err=True)
    longest = f"answers of at most {request.max_new_tokens} tokens (--max-new-tokens)"
    click.echo(f"a message per line, {longest}; Ctrl-D ends", err=True)
    for prompt in filter(None, map(str.strip, prompts)):
        print(f"> {prompt}")  # click.echo would remove codes, which are shown
        for name, speaker in zip(names, speakers, strict=True):
            if request.against is not None:
                print(f"{name}:")
            speaker.answer_prompt(prompt, request.max_new_tokens)
            print()
