"""Loading a checkpoint's tokenizer, tokenizing documents, and checking token ids against the
model's vocabulary.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, option_error, shorten, summarize_error
from kvfold.convert.stream.stock import empty_model, load_config
from kvfold.convert.text.corpus import Document

# Chosen, not tuned: a tokenizer's records take many times the text's memory, so that batches are
# small.
_BLOCK = 1 << 16  # characters
_BLOCKS = 8  # at once


def load_tokenizer(
    checkpoint: Checkpoint, trust_remote_code: bool, purpose: str, otherwise: str = ""
) -> Any:
    """Load the tokenizer. If that fails, the InputError names ``purpose``, what needs it, and
    ``otherwise``, what to do instead.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        )
        prefix_tokens(tokenizer)  # values of a wrong type are noticed in use only
        return tokenizer
    # transformers raises whatever its parsers raise.
    except Exception as error:
        # It reads config.json first: a bad one is not the tokenizer's fault.
        empty_model(checkpoint.config, torch.float32)
        reason = (
            f"it cannot be loaded ({summarize_error(error)[:200]}); put the tokenizer files into"
            " the folder"
        )
        if not trust_remote_code and "trust_remote_code" in str(error):
            reason = (
                "it runs code from the checkpoint; review the code, then pass --trust-remote-code"
            )
        raise InputError(
            f"{checkpoint.origin}: {purpose} needs the model's tokenizer: {reason}{otherwise}"
        ) from error


def prefix_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer adds before a text (BOS for Llama and Gemma, none for
    GPT-2).
    """
    # Tokenizers do not say what they add: it is seen around a text that is known to be one stretch
    # of tokens.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    starts = (
        start for start in range(len(special)) if special[start : start + len(plain)] == plain
    )
    return list(special[: next(starts, 0)])


def tokenize(tokenizer: Any, prefix: list[int], documents: Iterable[Document]) -> Iterator[Tensor]:
    """Tokenize each document; yields its token ids as int64 ``[n]``, without the ``prefix`` of
    special tokens.
    """
    for document in documents:
        blocks = list(_blocks(document.text)) or [""]
        ids: list[int] = []
        for start in range(0, len(blocks), _BLOCKS):
            some = blocks[start : start + _BLOCKS]
            tokenized = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            ids += chain.from_iterable(tokenized)
        # A chat template writes the prefix itself.
        written = document.rendered and ids[: len(prefix)] == prefix
        yield torch.tensor(ids[len(prefix) if written else 0 :], dtype=torch.int64)


def _blocks(text: str) -> Iterator[str]:
    """Split ``text`` into blocks of at most ``_BLOCK`` characters, if possible before a line break
    or space.
    """
    start = 0
    while start < len(text):
        stop = start + _BLOCK
        if stop < len(text):
            at = max(
                text.rfind("\n", start + _BLOCK // 2, stop),
                text.rfind(" ", start + _BLOCK // 2, stop),
            )
            stop = at if at > start else stop
        yield text[start:stop]
        start = stop


def check_teacher(
    teacher: Checkpoint, student: Checkpoint, tokenizer: Any, trust_remote_code: bool
) -> None:
    """Raise InputError unless ``teacher`` has the ``tokenizer`` of ``student``, and logits for all
    of its tokens.
    """
    use = "use a model of the same family"
    size, fewest = (load_config(each, trust_remote_code).vocab_size for each in (teacher, student))
    if size < fewest:
        fewer = f"it has logits for {size} tokens, but {student.origin} for {fewest}"
        raise option_error("teacher", teacher.origin, f": {fewer}; {use}")
    own = tokenizer.get_vocab()
    other = load_tokenizer(teacher, trust_remote_code, "a teacher").get_vocab()
    if own != other:
        token = min(token for token, _ in own.items() ^ other.items())
        differs = f"its tokenizer differs from that of {student.origin}"
        ids = f"{shorten(token)} is {other.get(token)} there, {own.get(token)} here"
        raise option_error("teacher", teacher.origin, f": {differs}: {ids}; {use}")


def check_vocabulary(tokens: Tensor, vocabulary: int, model: str) -> None:
    """Raise InputError unless all ``tokens`` from the tokenizer of ``model`` are below
    ``vocabulary``.
    """
    largest = int(tokens.max()) if tokens.numel() else 0
    if largest >= vocabulary:
        raise InputError(
            f"{model}: its tokenizer produces token id {largest}, but the model's vocabulary has"
            f" only {vocabulary} tokens (ids 0 to {vocabulary - 1}); use the tokenizer that belongs"
            " to these weights"
        )
