"""``kvfold chat``: put the same prompts to one or two models, with transformers' own generation and
chat template.
"""

import shutil
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import IO, Any

import click
import torch

from kvfold.attention.deepseek import absorb
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.request import ChatRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import hide_bars
from kvfold.convert.text.tokenizer import load_tokenizer

_SEPARATOR = " | "


@dataclass
class Speaker:
    """A loaded model in a conversation.

    name: what the user called it.
    model, tokenizer: transformers' own.
    messages: its side of the conversation so far, which only a chat template reads.
    """

    name: str
    model: Any
    tokenizer: Any
    messages: list[dict[str, str]] = field(default_factory=list)

    @torch.no_grad()
    def answer(self, prompt: str, max_new_tokens: int) -> tuple[str, float]:
        """The greedy answer and the tokens per second; a model without a chat template continues
        the prompt.
        """
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        else:
            inputs = self.tokenizer.apply_chat_template(
                [*self.messages, {"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        pad = self.tokenizer.pad_token_id
        started = time.perf_counter()
        written = self.model.generate(
            **inputs.to(self.model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
        )
        reply = written[0, inputs["input_ids"].shape[1] :]
        text = self.tokenizer.decode(reply, skip_special_tokens=True).strip()
        return text, len(reply) / (time.perf_counter() - started)


def load_speaker(name: str, request: ChatRequest) -> Speaker:
    """Load the model ``name``; an MLA model of a stock class decodes over its latent cache."""
    device = choose_device(request.device)
    hide_bars(False)
    with closing(open_checkpoint(name)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint, request.trust_remote_code, "a chat")
        dtype = compute_dtype(checkpoint, device, request.dtype)
        model = load_model(checkpoint, dtype, request.trust_remote_code).to(device).eval()
    # Other attention has nothing to absorb.
    with suppress(ValueError):
        absorb(model)
    return Speaker(name, model, tokenizer)


def format_columns(texts: Sequence[str], width: int) -> str:
    """``texts`` in columns of equal width that fill ``width`` characters together; a single text is
    only wrapped.
    """
    separators = len(_SEPARATOR) * (len(texts) - 1)
    column_width = max(16, (width - separators) // len(texts))
    columns: list[list[str]] = [[] for _ in texts]
    for text, column in zip(texts, columns, strict=True):
        for paragraph in text.splitlines():
            column += textwrap.wrap(paragraph, column_width) or [""]
    rows = [
        _SEPARATOR.join(cell.ljust(column_width) for cell in cells).rstrip()
        for cells in zip_longest(*columns, fillvalue="")
    ]
    return "\n".join(rows)


def chat_models(request: ChatRequest, prompts: IO[str]) -> None:
    """Answer every line of ``prompts`` on stdout, until the end; on a terminal also until an empty
    line or Ctrl-C.
    """
    names = [name for name in (request.model, request.against) if name is not None]
    speakers = [load_speaker(name, request) for name in names]
    if speakers[0].tokenizer.chat_template is None:
        click.echo("the model has no chat template: it continues each prompt", err=True)
    if prompts.isatty():
        click.echo(
            "a message per line, answered in full (--max-new-tokens"
            f" {request.max_new_tokens}); Ctrl-C stops an answer, Ctrl-D ends",
            err=True,
        )
    width = shutil.get_terminal_size().columns
    for prompt in _read_prompts(prompts):
        try:
            answers = [speaker.answer(prompt, request.max_new_tokens) for speaker in speakers]
        except KeyboardInterrupt:
            if not prompts.isatty():
                raise
            click.echo("(stopped)", err=True)
            continue
        heads = []
        for speaker, (text, speed) in zip(speakers, answers, strict=True):
            speaker.messages.append({"role": "user", "content": prompt})
            speaker.messages.append({"role": "assistant", "content": text})
            heads.append(f"{speaker.name} ({speed:.1f} tokens/s)")
        click.echo(format_columns(heads, width) + "\n")
        click.echo(format_columns([text for text, _ in answers], width) + "\n")


def _read_prompts(prompts: IO[str]) -> Iterator[str]:
    terminal = prompts.isatty()
    while True:
        if terminal:
            click.echo("> ", nl=False, err=True)
        try:
            line = prompts.readline()
        except KeyboardInterrupt:
            if not terminal:
                raise
            return
        prompt = line.strip()
        if not line or (terminal and not prompt):
            return
        if prompt:
            if not terminal:
                click.echo(f"> {prompt}")
            yield prompt
