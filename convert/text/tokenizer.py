"""Loading a checkpoint's tokenizer, tokenizing documents, and checking token ids against the
model's vocabulary.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, option_error, summarize_error
from kvfold.convert.stream.stock import build_empty_model, load_config

# Chosen, not tuned: a tokenizer's records take many times the text's memory, so that batches are
# small.
_BLOCK = 1 << 16  # characters
_BLOCKS = 8  # at once


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool, purpose: str) -> Any:
    """The checkpoint's tokenizer. Raises InputError if it cannot be loaded; ``purpose`` says in the
    message what needs it.
    """
    from transformers import AutoTokenizer

    # It explains at length what the error below says in a line.
    logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
    logger.setLevel(logging.ERROR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        )
        find_prefix_tokens(tokenizer)  # values of a wrong type are noticed in use only
        return tokenizer
    # transformers raises whatever its parsers raise.
    except Exception as error:
        # It reads config.json first: a bad one is not the tokenizer's fault.
        build_empty_model(checkpoint.config, torch.float32)
        cause_and_fix = (
            f"it cannot be loaded ({summarize_error(error)}); put the tokenizer files into"
            " the folder"
        )
        packages = "sentencepiece", "protobuf"
        missing = [name for name in packages if not list(distributions(name=name))]
        if missing and any(checkpoint.folder.glob("*.model")):
            cause_and_fix = (
                f"it is a SentencePiece model, which needs {' and '.join(missing)}; install the"
                " extra (pip install 'kvfold[sentencepiece]')"
            )
        if not trust_remote_code and "trust_remote_code" in str(error):
            cause_and_fix = (
                "it runs code from the checkpoint; review the code, then pass --trust-remote-code"
            )
        raise InputError(
            f"{checkpoint.origin}: {purpose} needs the model's tokenizer, but {cause_and_fix}"
        ) from error
    finally:
        logger.setLevel(logging.NOTSET)


def find_prefix_tokens(tokenizer: Any) -> list[int]:
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


def tokenize_documents(
    tokenizer: Any, prefix: list[int], documents: Iterable[str]
) -> Iterator[Tensor]:
    """Yield the token ids of each document, int64 ``[n]``. They do not include the special tokens
    ``prefix``, unless a chat template wrote them.
    """
    for document in documents:
        blocks = split_blocks(document) or [""]
        ids: list[int] = []
        for start in range(0, len(blocks), _BLOCKS):
            some = blocks[start : start + _BLOCKS]
            tokenized = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            ids += chain.from_iterable(tokenized)
        begins = ids[: len(prefix)] == prefix
        yield torch.tensor(ids[len(prefix) if begins else 0 :], dtype=torch.int64)


def split_blocks(text: str, longest: int = _BLOCK) -> list[str]:
    """``text`` in blocks of at most ``longest`` characters, which end at a line break or space if
    possible.
    """
    before_break = rf".{{{longest // 2},{longest - 1}}}(?=[\n ])"
    return re.findall(rf"(?s).{{1,{longest}}}\Z|{before_break}|.{{{longest}}}", text)


def check_teacher_tokenizer(
    teacher: Checkpoint, student: Checkpoint, trust_remote_code: bool
) -> None:
    """Raise InputError unless ``teacher`` has the same tokenizer as ``student``, and logits for all
    of its tokens.
    """
    models = (teacher, student)
    size, fewest = (load_config(model, trust_remote_code).vocab_size for model in models)
    tokens, expected = (
        load_tokenizer(model, trust_remote_code, "a teacher").get_vocab() for model in models
    )
    mismatch = None
    if size < fewest:
        mismatch = f"it has logits for {size} tokens, but {student.origin} for {fewest}"
    if tokens != expected:
        mismatch = f"its tokenizer differs from that of {student.origin}"
    if mismatch is not None:
        raise option_error(
            "teacher",
            teacher.origin,
            f"cannot teach this model: {mismatch}; use a model of the same family",
        )


def check_vocabulary(tokens: Tensor, vocabulary: int, model: str) -> None:
    """Raise InputError unless all token ids in ``tokens`` are below ``vocabulary``, the size of the
    model's vocabulary.
    """
    largest = int(tokens.max()) if tokens.numel() else 0
    if largest >= vocabulary:
        raise InputError(
            f"{model}: its tokenizer produces token id {largest}, but the model's vocabulary has"
            f" only {vocabulary} tokens (ids 0 to {vocabulary - 1}); use the tokenizer that belongs"
            " to these weights"
        )
