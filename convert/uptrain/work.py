"""The folder ``OUT.training``: the options of the run, its tokens, and the checkpoints to resume from.

A run knows how many tokens it needs. They are made once and read through a memory map: documents, in an order drawn
from the seed, are tokenized, begun by the tokenizer's prefix, ended by its EOS token, laid end to end and cut into
sequences. The first ``M`` sequences are held out, the next ``n`` are trained on; no document is in both parts. Sequence
``i`` of the run is number ``p_e(i - e n)`` of the ``n``, where ``p_e`` is the permutation of epoch ``e = i // n``: the
order depends neither on the number of processes nor on interruptions.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kvfold.convert.checkpoint.atomic import free_space_check
from kvfold.convert.checkpoint.files import parse_json, read_bytes
from kvfold.convert.checkpoint.hashing import file_hashes, file_problems
from kvfold.convert.errors import InputError, one_line, opt
from kvfold.convert.options import specs
from kvfold.convert.processes import run_on_first
from kvfold.convert.text.corpus import Corpus, Document, permutation
from kvfold.convert.text.tokenizer import check_vocabulary, prefix_tokens, tokenize
from kvfold.convert.text.windows import cut
from kvfold.convert.uptrain.request import UptrainRequest

# The last file of a checkpoint, with the hashes of the others: a checkpoint without it is half written.
COMPLETE = "complete"
_REQUEST, _TOKENS, _RECORD = "request.json", "tokens.bin", "tokens.json"
_TOKEN_BYTES = 4  # int32
# At most a fifth of a file is held out: a choice.
_LARGEST_SHARE = 5


@dataclass(frozen=True)
class TokenPlan:
    """The tokens of a run: ``training`` and ``held_out`` sequences of ``length`` tokens, and where they are from.

    Held-out sequences are from ``eval_text``, or else from ``text`` itself. Tokens are below ``vocabulary``, that of
    ``model``.
    """

    text: Corpus
    eval_text: Corpus | None
    tokenizer: Any
    model: str
    vocabulary: int
    length: int
    training: int
    held_out: int
    seed: int

    def made_from(self) -> dict[str, Any]:
        """Everything that decides the tokens, as JSON; texts by name, size and digest."""
        texts = [
            None if text is None else [text.name, text.size, text.digest(sampled=True)]
            for text in (self.text, self.eval_text)
        ]
        numbers = {name: getattr(self, name) for name in ("vocabulary", "length", "training", "held_out", "seed")}
        special = {"prefix": prefix_tokens(self.tokenizer), "eos": self.tokenizer.eos_token_id}
        return {"texts": texts, **numbers, **special}


class RunTokens(NamedTuple):
    """``training [n, T]``, n at most what was planned, and ``held_out [M, T]``, int32: views of a memory map."""

    training: Tensor
    held_out: Tensor


class TrainingOrder(Dataset[dict[str, Tensor]]):
    """All ``total`` sequences of a run, in order: ``sequences [n, T]`` in a new permutation per epoch."""

    def __init__(self, sequences: Tensor, total: int, seed: int) -> None:
        self._sequences, self._total, self._seed = sequences, total, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self._sequences))
        if epoch != self._epoch:
            self._epoch = epoch
            # torch's CPU generator ignores all but the low 32 bits of its seed: an odd factor keeps every seed apart.
            self._permutation = permutation(len(self._sequences), (self._seed * 0x9E3779B1 + epoch) % 2**32)
        return {"input_ids": self._sequences[self._permutation[place]].long()}


def last_checkpoint(request: UptrainRequest) -> Path | None:
    """The newest complete checkpoint to resume from, if any; reads only.

    Raises InputError when options have changed, when there are checkpoints but no --resume, or when the folder holds
    something else.
    """
    work, started, again = request.work, request.work / _REQUEST, opt("overwrite", True)
    if work.exists() and not (work.is_dir() and (not any(work.iterdir()) or any(work.glob(f"{_REQUEST}*")))):
        raise InputError(f"{work}: holds something else than a run, which would write its log there; name another OUT")
    if not (request.resume and started.is_file()):
        if not request.overwrite and any(work.glob("checkpoint-*")):
            way_out = f"continue it with {opt('resume', True)}, or use {again}"
            raise InputError(f"{work}: holds checkpoints of an interrupted run; {way_out}")
        return None
    before, now = parse_json(started, read_bytes(started)), request.result_options()
    for name in specs(UptrainRequest):
        old, new = (options.get(name, "absent") for options in (before, now))
        if old != new:
            raise InputError(
                f"{opt('resume', True)} {work}: {opt(name)} is {new}, but the run being resumed was started with "
                f"{old}; give the same options, or {again} to start over"
            )
    for checkpoint in sorted(work.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name[11:]), reverse=True):
        complete = checkpoint / COMPLETE
        # A run that was killed while it wrote this one.
        if not complete.exists():
            continue
        try:
            problem = next(file_problems(checkpoint, parse_json(complete, read_bytes(complete)), COMPLETE), None)
        except (InputError, OSError) as error:
            problem = one_line(error)
        if problem is None:
            return checkpoint
        message = f"{opt('resume', True)}: {checkpoint.name} is damaged and left out ({problem})"
        print(message, file=sys.stderr, flush=True)
    return None


def mark_complete(checkpoint: Path) -> None:
    """Write the last file of a checkpoint, by which ``--resume`` knows that the others are whole."""
    _replace_file(checkpoint / COMPLETE, [json.dumps(file_hashes(checkpoint, COMPLETE), indent=1).encode()])


def prepare(request: UptrainRequest, checkpoint: Path | None, plan: TokenPlan, arguments: Any) -> RunTokens:
    """Start or resume the run and open its tokens; the first process makes them while the others wait.

    Raises InputError when the text cannot be used (nothing is left then), or is not that of the run being resumed.
    """
    work = request.work
    if checkpoint is not None and open_tokens(plan, work) is None:
        raise InputError(
            f"{opt('resume', True)} {work}: the text or the tokenizer is not the one that the run was started with, or "
            f"its tokens were damaged; give the same text, or {opt('overwrite', True)} to start over"
        )

    def start() -> None:
        if request.resume and open_tokens(plan, work) is not None:
            return
        shutil.rmtree(work, ignore_errors=True)
        # A text that is shorter than planned has at most a token per byte.
        longest = plan.training * plan.length
        room = plan.held_out * plan.length + min(longest, longest if plan.text.size is None else plan.text.size)
        free_space_check(work, _TOKEN_BYTES * room, "for the tokens of the run, 4 bytes each")
        work.mkdir(parents=True)
        _replace_file(work / _REQUEST, [(json.dumps(request.result_options(), indent=1) + "\n").encode()])
        if not request.quiet:
            most = (plan.training + plan.held_out) * plan.length
            print(f"tokenizing {plan.text.name}, {most} tokens at most", file=sys.stderr, flush=True)
        try:
            make_tokens(plan, work)
        except InputError:
            shutil.rmtree(work)
            raise

    # Every process has looked at what is there before the first one changes it.
    arguments.distributed_state.wait_for_everyone()
    run_on_first(start)
    tokens = open_tokens(plan, work)
    if tokens is None:
        raise InputError(
            f"{work}: the tokens of the text are not there on every machine; use a shared folder, and do not edit the "
            "text while it is tokenized"
        )
    return tokens


def open_tokens(plan: TokenPlan, folder: Path) -> RunTokens | None:
    """The tokens in ``folder``, or None when there are none made from the same text in the same way."""
    path = folder / _TOKENS
    try:
        written = json.loads((folder / _RECORD).read_bytes())
        bytes_there = path.stat().st_size
    except (OSError, ValueError):
        return None
    if written["made_from"] != plan.made_from():
        return None
    numbers = (plan.held_out + written["training"]) * plan.length
    if bytes_there != _TOKEN_BYTES * numbers:
        return None
    tokens = torch.from_file(str(path), size=numbers, dtype=torch.int32).view(-1, plan.length)
    return RunTokens(tokens[plan.held_out :], tokens[: plan.held_out])


def make_tokens(plan: TokenPlan, folder: Path) -> None:
    """Tokenize the text into ``folder``, each file whole or not at all.

    A text that is shorter than planned gives all the sequences that it has. Raises InputError when it has none, when
    there is too little to hold out, or when the model does not know a token.
    """
    # Before the text is read: a later edit makes it another text.
    made_from = plan.made_from()
    prefix, eos = prefix_tokens(plan.tokenizer), plan.tokenizer.eos_token_id

    def documents(parts: Iterable[list[Document]]) -> Iterator[Tensor]:
        return tokenize(plan.tokenizer, prefix, chain.from_iterable(parts))

    def sequences(each: Iterable[Tensor]) -> Iterator[Tensor]:
        for rows in packed(each, prefix, eos, plan.length):
            check_vocabulary(rows, plan.vocabulary, plan.model)
            yield from rows

    count, parts = plan.text.parts()
    if plan.eval_text is None:
        # A dataset's length is unknown: all of it may be held out.
        first = documents(parts if count is None else islice(parts, count // _LARGEST_SHARE))
    else:
        first = documents(plan.eval_text.parts()[1])
    held_out = list(islice(sequences(first), plan.held_out))
    if len(held_out) < plan.held_out:
        raise InputError(
            f"{(plan.eval_text or plan.text).name}: too little text: {len(held_out)} of {plan.held_out} sequences of "
            f"{plan.length} tokens can be held out; give more text with {opt('eval_text')}, lower "
            f"{opt('eval_sequences')} or {opt('seq_len')}, or use {opt('eval_every', 0)}"
        )
    # Documents after the last one that the held-out sequences hold a part of.
    others = documents(parts) if plan.eval_text is not None else chain(first, documents(parts))
    rows = islice(chain(held_out, sequences(others)), plan.held_out + plan.training)
    _replace_file(folder / _TOKENS, (row.to(torch.int32).numpy().tobytes() for row in rows))
    made = (folder / _TOKENS).stat().st_size // (_TOKEN_BYTES * plan.length) - plan.held_out
    if not made:
        raise InputError(
            f"{plan.text.name}: too little text for a sequence of {plan.length} tokens; give more text or lower "
            f"{opt('seq_len')}"
        )
    record = {"made_from": made_from, "held_out": plan.held_out, "training": made}
    _replace_file(folder / _RECORD, [(json.dumps(record, indent=1) + "\n").encode()])


def packed(documents: Iterable[Tensor], prefix: list[int], eos: int | None, length: int) -> Iterator[Tensor]:
    """Documents end to end, each with ``prefix`` before and ``eos`` after it, cut into sequences: some ``[n, length]``.

    Without an EOS token no sequence holds more than one document, and what is left of each is dropped.
    """
    begin = torch.tensor(prefix, dtype=torch.int64)
    end = torch.tensor([] if eos is None else [eos], dtype=torch.int64)
    rest = begin[:0]
    for document in documents:
        # A chat template may have ended the text already.
        ended = document[-1:].tolist() == [eos]
        stream = torch.cat([rest, begin, document, end[:0] if ended else end])
        rows = cut([stream], length, None)
        rest = stream[:0] if eos is None else stream[rows.numel() :]
        yield rows


def _replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.writelines(parts)
    os.replace(part, path)
