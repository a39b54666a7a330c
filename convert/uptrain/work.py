"""The folder ``OUT.training``: the options of a run, its tokens, and the checkpoints from which it
resumes.

The number of tokens is known in advance, so they are created once and read through a memory map.
Documents are tokenized in a random order determined by the seed. Each gets the tokenizer's prefix
and EOS token, and the documents are concatenated and cut into sequences. The first ``M`` sequences
are held out, and the next ``n`` are used for training; no document is in both parts. Sequence ``i``
of the run is training sequence ``p_e(i - e n)``, where ``p_e`` is the permutation for epoch ``e = i
// n``, so the order depends neither on the number of processes nor on interruptions.
"""

import json
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
from kvfold.convert.checkpoint.files import parse_json, read_bytes, replacing, write_file
from kvfold.convert.checkpoint.folder import stamps
from kvfold.convert.checkpoint.hashing import file_hashes, file_problems
from kvfold.convert.errors import InputError, format_option, one_line
from kvfold.convert.options import specs
from kvfold.convert.processes import on_rank0
from kvfold.convert.text.corpus import Corpus, Document, permutation
from kvfold.convert.text.tokenizer import check_vocabulary, prefix_tokens, tokenize
from kvfold.convert.text.windows import cut
from kvfold.convert.uptrain.request import UptrainRequest

# The last file of a checkpoint, with the hashes of the others: a checkpoint without it is half
# written.
COMPLETE = "complete"
# The weights of the best evaluation so far.
BEST = "best.pt"
_REQUEST = "request.json"
_TOKENS = "tokens.bin"
_RECORD = "tokens.json"
_TOKEN_BYTES = 4  # int32
# At most a fifth of a file is held out: chosen, not tuned.
_LARGEST_SHARE = 5


@dataclass(frozen=True)
class LogRow:
    """Figures after ``step`` steps: of training since the row before, or (``eval_``) on held-out
    text; others are None.

    Losses and the KL are in nats per token; ``eval_excess`` and ``eval_kl`` are relative to the
    teacher.
    """

    step: int
    tokens: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_kl: float | None = None
    eval_excess: float | None = None

    @property
    def error(self) -> float | None:
        """The figure by which states are compared: the KL on held-out text, without a teacher the
        loss; may be None.
        """
        return self.eval_loss if self.eval_kl is None else self.eval_kl

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TokenPlan:
    """The numbers of ``training`` and ``held_out`` sequences of ``length`` tokens for a run, and
    their sources.

    The held-out sequences come from ``eval_text``, or from ``text`` if it is None. Token ids must
    be below ``vocabulary``, the vocabulary size of ``model``.
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
        """Everything that determines the tokens, as JSON values; texts are identified by name, size
        and digest.
        """
        texts = [
            None if text is None else [text.name, text.size, text.digest(sampled=True)]
            for text in (self.text, self.eval_text)
        ]
        numbers = {
            name: getattr(self, name)
            for name in ("vocabulary", "length", "training", "held_out", "seed")
        }
        special = {"prefix": prefix_tokens(self.tokenizer), "eos": self.tokenizer.eos_token_id}
        return {"texts": texts, **numbers, **special}


class RunTokens(NamedTuple):
    """``training [n, T]`` and ``held_out [M, T]``, int32 views of a memory map; n may be smaller
    than planned.
    """

    training: Tensor
    held_out: Tensor


class TrainingOrder(Dataset[dict[str, Tensor]]):
    """All ``total`` training sequences of a run, in order: each epoch is a new permutation of
    ``sequences [n, T]``.
    """

    def __init__(self, sequences: Tensor, total: int, seed: int) -> None:
        self._sequences = sequences
        self._total = total
        self._seed = seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self._sequences))
        if epoch != self._epoch:
            self._epoch = epoch
            # torch's CPU generator ignores all but the low 32 bits of its seed: an odd factor keeps
            # every seed apart.
            self._permutation = permutation(
                len(self._sequences), (self._seed * 0x9E3779B1 + epoch) % 2**32
            )
        return {"input_ids": self._sequences[self._permutation[place]].long()}


def last_checkpoint(request: UptrainRequest, sources: Iterable[Path]) -> Path | None:
    """The newest complete checkpoint to resume from, or None. Does not change any file.

    None too if the files ``sources`` of MODEL and the teacher have changed, which is told. Raises
    InputError if options have, or if the folder was not created by a run or contains a link.
    """
    work = request.work
    started = request.work / _REQUEST
    if link := next((path for path in (work, *work.rglob("*")) if path.is_symlink()), None):
        raise InputError(
            f"{link} is a link, but the run writes into this folder; remove it or choose"
            " another OUT"
        )
    if work.exists() and not (
        work.is_dir() and (not any(work.iterdir()) or any(work.glob(f"{_REQUEST}*")))
    ):
        raise InputError(
            f"{work}: the run needs this folder, but it contains other files; choose another OUT"
        )
    if request.fresh or not (started.is_file() and any(work.glob("checkpoint-*"))):
        return None
    before = parse_json(started, read_bytes(started))
    now = started_with(request, sources)
    for name in specs(UptrainRequest):
        old, new = (options.get(name, "absent") for options in (before, now))
        if old != new:
            differs = f"{format_option(name)} is {new}, but the interrupted run there was started with {old}"
            way_out = "use the same options to continue it, or --fresh to discard it"
            raise InputError(f"{work}: {differs}; {way_out}", field=name)
    if changed := [
        Path(file[0]).name for file in now["files"] if file not in before.get("files", [])
    ]:
        files = f"{', '.join(changed)} changed since then"
        print(
            f"discarding the interrupted run in {work}: {files}; training starts over",
            file=sys.stderr,
            flush=True,
        )
        return None
    for checkpoint in sorted(
        work.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name[11:]), reverse=True
    ):
        complete = checkpoint / COMPLETE
        # A run that was killed while it wrote this one.
        if not complete.exists():
            continue
        try:
            problem = next(
                file_problems(checkpoint, parse_json(complete, read_bytes(complete)), COMPLETE),
                None,
            )
        except (InputError, OSError) as error:
            problem = one_line(error)
        if problem is None:
            return checkpoint
        message = f"skipping {checkpoint.name}, which is damaged ({problem})"
        print(message, file=sys.stderr, flush=True)
    return None


def started_with(request: UptrainRequest, sources: Iterable[Path]) -> dict[str, Any]:
    """The options of a run, and its source files, which count by `stamps`, as JSON values."""
    return {**request.result_options(), "files": stamps(sources)}


def mark_complete(checkpoint: Path) -> None:
    """Write a checkpoint's last file, with the hashes of the others, which marks it complete."""
    with replacing(checkpoint / COMPLETE) as new:
        # A run that was killed while it wrote this checkpoint before may have left it: it is not
        # one of the others.
        new.unlink(missing_ok=True)
        write_file(new, json.dumps(file_hashes(checkpoint, COMPLETE), indent=1))


def prepare(
    request: UptrainRequest,
    sources: Iterable[Path],
    checkpoint: Path | None,
    plan: TokenPlan,
    arguments: Any,
) -> RunTokens:
    """Start or resume the run and open its tokens, which the first process creates while the others
    wait.

    Raises InputError if the text cannot be used, after removing the new folder, or if the run being
    resumed was started with another text.
    """
    work = request.work
    if checkpoint is not None and open_tokens(plan, work) is None:
        raise InputError(
            f"{work}: the text or the tokenizer has changed since the interrupted run there was"
            " started, or its tokens are damaged; use the same text and tokenizer to continue it,"
            f" or --fresh to discard it"
        )

    def start() -> None:
        options = json.dumps(started_with(request, sources), indent=1) + "\n"
        kept = (
            not request.fresh
            and (work / _REQUEST).is_file()
            and (work / _REQUEST).read_text() == options
        )
        if kept and open_tokens(plan, work) is not None:
            return
        shutil.rmtree(work, ignore_errors=True)
        # A text that is shorter than planned has at most a token per byte.
        longest = plan.training * plan.length
        room = plan.held_out * plan.length + min(
            longest, longest if plan.text.size is None else plan.text.size
        )
        free_space_check(work, _TOKEN_BYTES * room, "for the tokens of the run, 4 bytes each")
        work.mkdir(parents=True)
        with replacing(work / _REQUEST) as new:
            write_file(new, options)
        if not request.quiet:
            most = (plan.training + plan.held_out) * plan.length
            print(
                f"tokenizing {plan.text.name}, at most {most} tokens", file=sys.stderr, flush=True
            )
        try:
            make_tokens(plan, work)
        except InputError:
            shutil.rmtree(work)
            raise

    # Every process has looked at what is there before the first one changes it.
    arguments.distributed_state.wait_for_everyone()
    on_rank0(start)
    tokens = open_tokens(plan, work)
    if tokens is None:
        raise InputError(
            f"{work}: a process cannot read the tokens written by the first one; use a folder"
            " shared by all machines, and do not edit the text while it is being tokenized"
        )
    return tokens


def open_tokens(plan: TokenPlan, folder: Path) -> RunTokens | None:
    """Open the tokens in ``folder``; returns None if they are missing, incomplete or do not match
    ``plan``.
    """
    path = folder / _TOKENS
    try:
        written = json.loads((folder / _RECORD).read_bytes())
        bytes_there = path.stat().st_size
    except (OSError, ValueError):
        return None
    numbers = (plan.held_out + written["training"]) * plan.length
    if written["made_from"] != plan.made_from() or bytes_there != _TOKEN_BYTES * numbers:
        return None
    tokens = torch.from_file(str(path), size=numbers, dtype=torch.int32).view(-1, plan.length)
    return RunTokens(tokens[plan.held_out :], tokens[: plan.held_out])


def make_tokens(plan: TokenPlan, folder: Path) -> None:
    """Tokenize the text of ``plan`` and write the tokens to ``folder``, each file atomically.

    If the text is too short for the planned training sequences, fewer are written. Raises
    InputError if the text has no training sequence or too few held-out ones, or if a token id is
    not in the model's vocabulary.
    """
    # Before the text is read: a later edit makes it another text.
    made_from = plan.made_from()
    prefix = prefix_tokens(plan.tokenizer)
    eos = plan.tokenizer.eos_token_id

    def documents(parts: Iterable[list[Document]]) -> Iterator[Tensor]:
        return tokenize(plan.tokenizer, prefix, chain.from_iterable(parts))

    def sequences(each: Iterable[Tensor]) -> Iterator[Tensor]:
        for rows in packed(each, prefix, eos, plan.length):
            check_vocabulary(rows, plan.vocabulary, plan.model)
            yield from rows

    count, parts = plan.text.parts()
    # A dataset's length is unknown: all of it may be held out.
    some = parts if count is None else islice(parts, count // _LARGEST_SHARE)
    first = documents(some if plan.eval_text is None else plan.eval_text.parts()[1])
    held_out = list(islice(sequences(first), plan.held_out))
    if len(held_out) < plan.held_out:
        raise InputError(
            f"{(plan.eval_text or plan.text).name}: too little text: only {len(held_out)} of"
            f" {plan.held_out} sequences of {plan.length} tokens can be held out; give more text"
            f" with --eval-text, lower --eval-sequences or --seq-len, or skip"
            f" evaluation with --eval-every 0"
        )
    # Documents after the last one that the held-out sequences hold a part of.
    others = documents(parts) if plan.eval_text is not None else chain(first, documents(parts))
    rows = islice(chain(held_out, sequences(others)), plan.held_out + plan.training)
    with replacing(folder / _TOKENS) as new, new.open("wb") as file:
        file.writelines(row.to(torch.int32).numpy().tobytes() for row in rows)
    made = (folder / _TOKENS).stat().st_size // (_TOKEN_BYTES * plan.length) - plan.held_out
    if not made:
        raise InputError(
            f"{plan.text.name}: too little text for a training sequence of {plan.length} tokens;"
            f" give more text or lower --seq-len"
        )
    record = {"made_from": made_from, "held_out": plan.held_out, "training": made}
    with replacing(folder / _RECORD) as new:
        write_file(new, json.dumps(record, indent=1) + "\n")


def packed(
    documents: Iterable[Tensor], prefix: list[int], eos: int | None, length: int
) -> Iterator[Tensor]:
    """Add ``prefix`` and ``eos`` to each document, concatenate the documents and cut them into
    sequences.

    Yields the sequences completed by each document, ``[n, length]``. If ``eos`` is None, documents
    are not concatenated, and the remainder of each is dropped.
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
