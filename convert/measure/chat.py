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

_GAP = " | "


@dataclass
class Speaker:
    """A loaded model and its own side of the conversation, ``messages``."""

    name: str
    model: Any
    tokenizer: Any
    messages: list[dict[str, str]] = field(default_factory=list)

    @torch.no_grad()
    def answer(self, prompt: str, most: int) -> tuple[str, float]:
        """The greedy answer of at most ``most`` tokens, and the tokens per second; without a
        template it continues.
        """
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        else:
            asked = [*self.messages, {"role": "user", "content": prompt}]
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            inputs = self.tokenizer.apply_chat_template(asked, **options)
        inputs = inputs.to(self.model.device)
        started = time.perf_counter()
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        written = self.model.generate(
            **inputs, max_new_tokens=most, do_sample=False, pad_token_id=pad
        )
        new = written[0, inputs["input_ids"].shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        return text, len(new) / (time.perf_counter() - started)

    def remember(self, prompt: str, answer: str) -> None:
        """Make the turn a part of the conversation, which only a chat template has."""
        if self.tokenizer.chat_template is not None:
            self.messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]


def open_speaker(name: str, request: ChatRequest) -> Speaker:
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


def side_by_side(texts: Sequence[str], width: int) -> str:
    """``texts`` in columns of equal width that fill ``width`` characters together; a single text is
    only wrapped.
    """
    each = max(16, (width - len(_GAP) * (len(texts) - 1)) // len(texts))
    columns = []
    for text in texts:
        paragraphs = (textwrap.wrap(line, each) or [""] for line in text.splitlines())
        columns.append([line for lines in paragraphs for line in lines])
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(_GAP.join(cell.ljust(each) for cell in row).rstrip() for row in rows)


def chat_models(request: ChatRequest, prompts: IO[str]) -> None:
    """Answer every line of ``prompts`` on stdout, until the end; on a terminal also until an empty
    line or Ctrl-C.
    """
    names = [request.model, *([request.against] if request.against is not None else [])]
    speakers = [open_speaker(name, request) for name in names]
    if speakers[0].tokenizer.chat_template is None:
        click.echo("the model has no chat template: it continues each prompt", err=True)
    width = shutil.get_terminal_size().columns
    if prompts.isatty():
        most = f"--max-new-tokens {request.max_new_tokens}"
        click.echo(
            f"a message per line, answered in full ({most}); Ctrl-C stops an answer, Ctrl-D ends",
            err=True,
        )
    for prompt in _lines(prompts):
        try:
            answers = [speaker.answer(prompt, request.max_new_tokens) for speaker in speakers]
        except KeyboardInterrupt:
            if not prompts.isatty():
                raise
            click.echo("(stopped)", err=True)
            continue
        for speaker, (text, _) in zip(speakers, answers, strict=True):
            speaker.remember(prompt, text)
        heads = [
            f"{speaker.name} ({rate:.1f} tokens/s)"
            for speaker, (_, rate) in zip(speakers, answers, strict=True)
        ]
        click.echo(
            f"{side_by_side(heads, width)}\n\n{side_by_side([text for text, _ in answers], width)}\n"
        )


def _lines(prompts: IO[str]) -> Iterator[str]:
    typed = prompts.isatty()
    while True:
        if typed:
            click.echo("> ", nl=False, err=True)
        try:
            line = prompts.readline()
        except KeyboardInterrupt:
            if not typed:
                raise
            return
        prompt = line.strip()
        if not line or (typed and not prompt):
            return
        if prompt:
            if not typed:
                click.echo(f"> {prompt}")
            yield prompt
