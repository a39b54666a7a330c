"""Sources of documents: a text file, a dataset from the hub or in a folder, or the text that ships
with kvfold.

Of a large file only as many cells are read as a run needs: chunks of equal size, drawn at random
by the seed. Files are not read with ``datasets``, which is an optional dependency, shuffles a
buffer of rows rather than the whole file, and does not report the line at fault.
"""

# No torch at the top: commands check the names of texts before they load anything heavy.

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.digests import hash_file
from kvfold.convert.checkpoint.files import decode_file_name, parse_json_value
from kvfold.convert.data import ShippedText, read_documents
from kvfold.convert.errors import InputError, option_error, summarize_error
from kvfold.convert.limited_process import LimitedProcess
from kvfold.convert.request import SELF

if TYPE_CHECKING:
    from torch import Tensor

BUILT_IN = "the built-in standard-library text"
_ROWS_SUFFIX = ".jsonl"  # a file of rows; every other file is one document of plain text
_EXPECTED_ROW = (
    "each row must be an object with a string `text`, a list `messages` or `conversations`, or"
    " strings `instruction` and `output` or `prompt` and `completion`"
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_ACCEPTED_TEXTS = (
    "give a text file (UTF-8), a .jsonl file or, with pip install 'kvfold[data]', the name of a"
    " dataset"
)
# What a chat model writes, in relation to the other texts: a third of all. Chosen, not tuned.
_WRITTEN = 0.5
# Chosen, not tuned: limits on time and memory.
_SNIFFED = 1 << 16  # bytes of a file in which binary data shows
_CELL = 1 << 18  # bytes
_RENDER_SECONDS = 5.0
_RENDERED = 1 << 16  # characters of a dialogue, if nothing else says how many are of use
# A template may write several times the text of a row.
_GROWTH = 4


@dataclass(frozen=True)
class Corpus:
    """A text to draw documents from: a file, the train split of a dataset, or the text that ships
    with kvfold.

    name       appears in messages and records, without local paths
    source     path of the file; else ``NAME`` or ``NAME:CONFIG`` of the dataset, or the texts
    option     the option that gave it, which errors name
    tokenizer  renders rows with messages
    seed       draws the parts of a large file, and shuffles a dataset
    """

    name: str
    source: Path | str | list[str]
    option: str
    tokenizer: Any
    seed: int

    def compute_digest(self) -> str:
        """The SHA-256 of the text, or of the name of a dataset."""
        if isinstance(self.source, Path):
            return hash_file(self.source)
        text = self.source if isinstance(self.source, str) else "\f".join(self.source)
        return hashlib.sha256(text.encode()).hexdigest()

    def read_documents(self, limit: int) -> tuple[list[str], bool]:
        """Documents with at least ``limit`` characters or bytes in total, if the text has so many,
        and True if these are all of its documents.

        Each line of a .jsonl file is a document; any other file is one document. A file of more
        than ``limit`` bytes yields the complete lines in randomly drawn cells.
        """
        if isinstance(self.source, Path):
            return self._read_file(self.source, limit)
        documents: list[str] = []
        size = 0
        source = self.source
        for text in self._read_dataset(source, limit) if isinstance(source, str) else source:
            if size >= limit:
                return documents, False
            documents.append(text)
            size += len(text)
        return documents, True

    def _read_dataset(self, spec: str, limit: int) -> Iterator[str]:
        """Yield the documents of the dataset ``spec`` in shuffled order; of ``limit`` see
        `read_documents`. Raises InputError if the dataset cannot be loaded.
        """
        import datasets  # pyright: ignore[reportMissingImports]

        name, _, config = spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about the request
            raise option_error(
                self.option,
                spec,
                ": not a file, and loading it as a dataset failed"
                f" ({summarize_error(error)}); {_ACCEPTED_TEXTS}",
            ) from error
        for number, row in enumerate(rows.shuffle(seed=self.seed, buffer_size=1000)):
            yield self._parse_row(row, f"{spec}, row {number}", _GROWTH * limit)

    def _read_file(self, path: Path, limit: int) -> tuple[list[str], bool]:
        """The documents in the file ``path``, or in randomly drawn pieces of it if it has more than
        ``limit`` bytes, and True if they are all of them.
        """
        size = path.stat().st_size
        if size <= limit:
            documents = list(self.parse_documents(path, 0, path.read_bytes(), limit))
            return documents, sum(map(len, documents)) < _GROWTH * limit
        documents = []
        cells = draw_permutation(-(-size // _CELL), self.seed)[: max(1, limit // _CELL)]
        with path.open("rb") as file:
            for cell in sorted(cells.tolist()):
                start = cell * _CELL
                file.seek(start)
                raw = file.read(_CELL)
                # The first and the last line may be cut: they belong to lines that begin or end
                # elsewhere.
                first = raw.find(b"\n") + 1 if start else 0
                last = raw.rfind(b"\n") + 1
                if first < last:
                    documents += self.parse_documents(path, start + first, raw[first:last], _CELL)
        return documents, False

    def parse_documents(self, path: Path, start: int, raw: bytes, limit: int) -> Iterator[str]:
        """Yield the documents in ``raw``, bytes that begin at offset ``start`` of the file
        ``path``. Of chats, whose template may write any number of characters, those beyond four
        times ``limit`` are cut.
        """
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}: the byte at offset {start + error.start} is not UTF-8; convert the file"
                " to UTF-8"
            ) from None
        if path.suffix != _ROWS_SUFFIX:
            yield text
            return
        after = f" after byte {start}" if start else ""
        left = _GROWTH * limit
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and left > 0:
                document = self._parse_row(line, f"{path}, line {number}{after}", left)
                left -= len(document)
                yield document

    def _parse_row(self, row: Any, where: str, longest: int) -> str:
        """The document in a dataset row or a line of JSON. Raises InputError with ``where``, the
        row's place, if it contains no text.
        """
        try:
            if isinstance(row, str):
                row = parse_json_value(row.encode())
            fields = row if isinstance(row, Mapping) else {}
            text = fields.get("text")
            if not isinstance(text, str):
                messages = find_chat_messages(fields)
                chats = getattr(self.tokenizer, "chat_template", None) is not None
                if "messages" in fields or "conversations" in fields or chats:
                    text = render_chat(self.tokenizer, messages, longest)
                else:  # a question and its answer
                    text = "\n\n".join(message["content"] for message in messages)
            # No tokenizer could read half of a surrogate pair.
            text.encode()
            return text
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: no text in this row ({summarize_error(error)}); {_EXPECTED_ROW}"
            ) from error


def find_chat_messages(fields: Mapping[str, Any]) -> list[Any]:
    """The chat messages in a row: ``messages``, or ShareGPT's ``conversations``; or the question
    and the answer of Alpaca's ``instruction``, ``input`` and ``output``, or of ``prompt`` and
    ``completion``. Raises ValueError if there are none.
    """
    messages = fields.get("messages", fields.get("conversations"))
    if isinstance(messages, list):
        return [
            {"role": _SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]}
            if isinstance(turn, Mapping) and {"from", "value"} <= turn.keys()
            else turn
            for turn in messages
        ]
    question = fields.get("instruction", fields.get("prompt"))
    answer = fields.get("output", fields.get("completion"))
    if not (isinstance(question, str) and isinstance(answer, str)):
        raise ValueError("neither `text` nor `messages`")
    if isinstance(fields.get("input"), str) and fields["input"]:
        question += f"\n\n{fields['input']}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def open_corpus(
    spec: str | None,
    tokenizer: Any,
    seed: int,
    split: ShippedText = "calibration",
    option: str = "calibration",
) -> Corpus:
    """The text that the user named ``spec`` with ``option``; None means ``split`` of the text that
    ships with kvfold. ``tokenizer`` renders chats. Raises InputError if there is no such text.
    """
    if spec is None:
        unread = "" if split == "calibration" else ", the part that no conversion reads"
        return Corpus(BUILT_IN + unread, read_documents(split), option, tokenizer, seed)
    check_text_sources([spec], option)
    path = Path(spec)
    if path.is_file():
        return Corpus(decode_file_name(path), path, option, tokenizer, seed)
    name = path.name if path.exists() else spec
    return Corpus(f"dataset {name}", spec, option, tokenizer, seed)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], longest: int = _RENDERED, **ending: bool
) -> str:
    """The first ``longest`` characters of the chat ``messages`` as text, by the tokenizer's chat
    template, which gets ``ending`` too. Raises ValueError if there is no template or it fails,
    InputError if it takes too much time or memory.
    """
    renderer = _start_renderer(tokenizer, json.dumps(tokenizer.chat_template), _RENDER_SECONDS)
    try:
        text: str = renderer.call(messages, longest, ending)
        return text
    except TimeoutError:
        raise InputError(
            f"{tokenizer.name_or_path}: the chat template (chat_template.jinja or"
            f" tokenizer_config.json) needs more than {_RENDER_SECONDS:g} s or 512 MiB for a"
            " document; correct it, or use rows with `text`"
        ) from None
    except ValueError as error:  # a template is its author's code and may raise anything
        reason = f"the tokenizer cannot render the chat messages ({summarize_error(error)})"
        raise ValueError(reason) from error


@lru_cache(maxsize=2)
def _start_renderer(tokenizer: Any, template: str, seconds: float) -> LimitedProcess:
    """The process that renders chats for ``tokenizer`` with its present ``template``."""

    def render_messages(
        messages: list[Mapping[str, Any]], longest: int, ending: Mapping[str, bool]
    ) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **ending)
        return text[:longest]

    return LimitedProcess(render_messages, seconds)


def parse_text_share(spec: str) -> tuple[str, float]:
    """The name and the share of a calibration text written as ``NAME:SHARE``; without a share, it
    is 1.

    Only the share of ``self`` may be 0; others raise InputError.
    """
    name, _, share = spec.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", share) or not name or Path(spec).exists():
        return spec, 1.0
    if not float(share) and name != SELF:
        raise option_error("calibration", spec, ": the share after the colon must be above 0")
    return name, float(share)


def choose_calibration_texts(given: Sequence[str], chats: bool) -> list[tuple[str | None, float]]:
    """The names and shares of the calibration texts: those that the user gave, or None for the text
    that ships with kvfold. A chat model also writes a third of the tokens itself (`SELF`), unless
    ``given`` names it.
    """
    texts: dict[str | None, float] = dict(map(parse_text_share, given))
    share = texts.pop(SELF, None)
    if share and not texts:
        return [(SELF, 1.0)]
    texts = texts or {None: 1.0}
    if share is None:
        share = chats * _WRITTEN * sum(texts.values())
    if share:
        texts[SELF] = share
    return [*texts.items()]


def check_text_sources(names: Iterable[str | None], option: str = "calibration") -> None:
    """Raise InputError if a file or dataset named with ``option`` does not exist or cannot be read
    as text; None stands for the text that ships with kvfold.
    """
    for name in filter(None, names):
        if option == "calibration":
            name, _ = parse_text_share(name)
        path = Path(name)
        problem_with_file = None
        try:
            if path.is_file():
                with path.open("rb") as file:
                    beginning = file.read(_SNIFFED)
                if not beginning or b"\0" in beginning or path.suffix == ".json":
                    problem_with_file = "the file is empty, or not plain text"
            elif name != SELF and (
                path.suffix in (".txt", _ROWS_SUFFIX) or not find_spec("datasets")
            ):
                problem_with_file = "no such file or dataset"
        except OSError as error:  # also for too long a name
            problem_with_file = f"reading it failed ({error.strerror})"
        if problem_with_file is not None:
            raise option_error(option, name, f": {problem_with_file}; {_ACCEPTED_TEXTS}")


def check_seq_len(seq_len: int, positions: int | None, model: str) -> None:
    """Raise InputError if ``seq_len`` exceeds ``positions``, the most that ``model`` supports; None
    means any number.
    """
    if positions and seq_len > positions:
        raise option_error(
            "seq_len",
            seq_len,
            f"exceeds the {positions} positions supported by the model {model}; use at most"
            f" --seq-len {positions}",
        )


def draw_permutation(count: int, seed: int) -> "Tensor":
    """The integers below ``count`` in random order, ``[count]``; equal seeds give equal orders."""
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
