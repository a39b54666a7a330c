"""``kvfold chat``: answers of one model, or of two."""

import io
import sys

import click

from kvfold.convert.console import add_request_options, check_models_and_load_torch
from kvfold.convert.request import ChatRequest


@click.command(short_help="Ask MODEL, and another model beside it, the same questions.")
@add_request_options(ChatRequest)
def chat(request: ChatRequest) -> None:
    """Answer each line of standard input with MODEL's chat template; with --against, two models
    one after the other.

    Answers are greedy, so that a difference between two models is one of their weights. An MLA
    model decodes over its latent cache (absorbed). Ctrl-D ends the conversation.
    """
    check_models_and_load_torch(request.model, request.against, quiet=True)
    from kvfold.convert.measure.chat import answer_prompts

    if isinstance(sys.stdin, io.TextIOWrapper):  # text that is not UTF-8 must not end a chat
        sys.stdin.reconfigure(errors="replace")
    answer_prompts(request, sys.stdin)
