"""Sources of documents: a text file, a dataset from the hub or in a folder, or the text that ships
with kvfold.

Of a large file only as many cells are read as a run needs: chunks of equal size, drawn at random
by the seed. Files are not read with ``datasets``, which is an optional dependency, shuffles a
buffer of rows rather than the whole file, and does not report the line at fault.
"""

# No torch at the top: commands check the names of texts before they load anything heavy.

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.checkpoint.members import check_unicode, portable_name
from kvfold.convert.errors import InputError, format_option, option_error, shorten, summarize_error
from kvfold.convert.request import SELF
from kvfold.convert.signals import limit_resources

if TYPE_CHECKING:
    from torch import Tensor

BUILT_IN = "the built-in standard-library text"
_ROWS_SUFFIX = ".jsonl"  # a file of rows; every other file is one document of plain text
_ROW = "an object with a string `text` or a list `messages`"
_KINDS = "a text file (UTF-8), a .jsonl file or the name of a dataset"
# What a chat model writes, in relation to the other texts: a third of all. Chosen, not tuned.
_WRITTEN = 0.5
# Chosen, not tuned: limits on time and memory.
_SNIFFED = 1 << 16  # bytes of a file that must look like text
_CELL = 1 << 18  # bytes
_RENDER_SECONDS = 5.0
_RENDERED = 1 << 26  # characters

TextSplit = Literal["calibration", "held_out"]


@dataclass(frozen=True)
class Document:
    """A text. ``rendered`` is True if a chat template produced it, including the special tokens."""

    text: str
    rendered: bool = False


class Corpus(ABC):
    """A source of documents. ``name`` appears in messages and records, without local paths."""

    name: str

    @abstractmethod
    def digest(self) -> str:
        """The SHA-256 of the text, or of the name of a dataset."""

    @abstractmethod
    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents with at least ``limit`` characters or bytes in total if possible, and True if
        these are all documents.
        """


def _take(documents: Iterable[Document], limit: int) -> tuple[list[Document], bool]:
    taken: list[Document] = []
    size = 0
    for document in documents:
        if size >= limit:
            return taken, False
        taken.append(document)
        size += len(document.text)
    return taken, True


@dataclass(frozen=True)
class BuiltInText(Corpus):
    """A ``split`` of the text that ships with kvfold."""

    name: str
    texts: list[str]

    def digest(self) -> str:
        return hashlib.sha256("\f".join(self.texts).encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        return _take(map(Document, self.texts), limit)


@dataclass(frozen=True)
class DatasetText(Corpus):
    """The train split of the dataset ``spec``, ``NAME`` or ``NAME:CONFIG``, shuffled by the seed.

    Errors name ``option``; ``tokenizer`` renders rows with messages.
    """

    name: str
    spec: str
    option: str
    tokenizer: Any
    seed: int

    def digest(self) -> str:
        return hashlib.sha256(self.spec.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        return _take(self._read_rows(), limit)

    def _read_rows(self) -> Iterator[Document]:
        import datasets

        name, _, config = self.spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about the request
            reason = f"not a file, and loading it as a dataset failed ({summarize_error(error)})"
            raise option_error(self.option, self.spec, f": {reason}; give {_KINDS}") from error
        for number, row in enumerate(rows.shuffle(seed=self.seed, buffer_size=1000)):
            try:
                yield parse_row(row, self.tokenizer)
            except ValueError as error:
                where = f"{format_option(self.option, self.spec)}, row {number}"
                raise InputError(f"{where}: {error}; each row must be {_ROW}") from error


@dataclass(frozen=True)
class TextFile(Corpus):
    """A text file. Each line of a .jsonl file is a document; any other file is one document, or one
    per cell.
    """

    name: str
    path: Path
    tokenizer: Any
    seed: int

    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """As for every corpus; a file of more than ``limit`` bytes yields the complete lines in
        randomly drawn cells.
        """
        size = self.path.stat().st_size
        if size <= limit:
            return list(self.parse(0, self.path.read_bytes())), True
        documents: list[Document] = []
        cells = permutation(-(-size // _CELL), self.seed)[: max(1, limit // _CELL)]
        with self.path.open("rb") as file:
            for cell in sorted(cells.tolist()):
                file.seek(cell * _CELL)
                raw = file.read(_CELL)
                # The first and the last line may be cut: they belong to lines that begin or end
                # elsewhere.
                first = 0 if cell == 0 else raw.find(b"\n") + 1
                last = raw.rfind(b"\n") + 1
                if first < last:
                    documents += self.parse(cell * _CELL + first, raw[first:last])
        return documents, False

    def parse(self, start: int, raw: bytes) -> Iterator[Document]:
        """Parse the documents in ``raw``, the bytes of the file from offset ``start``."""
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}, line {self._line_at(start + error.start)}: byte"
                f" 0x{raw[error.start]:02x} is not UTF-8; convert the file to UTF-8"
            ) from None
        if self.path.suffix != _ROWS_SUFFIX:
            yield Document(text)
            return
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                try:
                    yield parse_row(line, self.tokenizer)
                except ValueError as error:
                    where = f"{self.path}, line {self._line_at(start) + number}"
                    raise InputError(f"{where}: {error}; each line must be {_ROW}") from error

    def _line_at(self, offset: int) -> int:
        with self.path.open("rb") as file:
            return 1 + file.read(offset).count(b"\n")


def open_corpus(
    spec: str | None,
    tokenizer: Any,
    seed: int,
    split: TextSplit = "calibration",
    option: str = "calibration",
) -> Corpus:
    """Open the text ``spec`` given with ``option``; None means ``split`` of the built-in text.
    ``tokenizer`` renders chats. Raises InputError if there is no such text.
    """
    if spec is None:
        from kvfold.convert.data import read_documents

        unread = "" if split == "calibration" else ", the part that no conversion reads"
        return BuiltInText(BUILT_IN + unread, read_documents(split))
    check_sources([spec], option)
    path = Path(spec)
    if path.is_file():
        return TextFile(portable_name(path), path, tokenizer, seed)
    name = path.name if path.exists() else spec
    return DatasetText(f"dataset {name}", spec, option, tokenizer, seed)


def parse_row(row: Any, tokenizer: Any) -> Document:
    """The document in a dataset row or a line of JSON. Raises ValueError with the reason if there
    is none.
    """
    content = _text_or_messages(row)
    if isinstance(content, str):
        return Document(content)
    try:
        text = render(tokenizer, content)
    except InputError:
        raise
    except Exception as error:  # a template is its author's code and may raise anything
        reason = f"the tokenizer cannot render the chat messages ({summarize_error(error)})"
        raise ValueError(reason) from error
    check_unicode(text)
    return Document(text, rendered=True)


def _text_or_messages(row: Any) -> str | list[Mapping[str, Any]]:
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(row, Mapping):
        raise ValueError(f"found a value of type {type(row).__name__}")
    text = row.get("text")
    messages = row.get("messages")
    if isinstance(text, str):
        # No tokenizer could read half of a surrogate pair.
        check_unicode(text)
        return text
    if isinstance(messages, list):
        return messages
    keys = ", ".join(shorten(str(key)) for key in row) or "none"
    raise ValueError(f"found an object with these keys: {keys}")


def render(tokenizer: Any, messages: list[Mapping[str, Any]], reply: bool = False) -> str:
    """Render ``messages`` with the tokenizer's chat template. ValueError without one, InputError if
    it does not end.

    With ``reply`` the text ends where an assistant's reply begins, after the empty thoughts of
    models that think.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("it has no chat template; use rows with `text` instead")
    from transformers.utils import chat_template_utils

    ending = {"add_generation_prompt": True, "enable_thinking": False} if reply else {}
    try:
        with limit_resources(_RENDER_SECONDS):
            # Cached, so this is the template that renders below.
            template = chat_template_utils._compile_jinja_template(tokenizer.get_chat_template())
            template.environment.concat = _join_limited
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, **ending)
    except (TimeoutError, MemoryError):
        raise InputError(
            f"{tokenizer.name_or_path}: the chat template (chat_template.jinja or"
            f" tokenizer_config.json) needs more than {_RENDER_SECONDS:g} s or {_RENDERED}"
            " characters for a document; correct it, or use rows with `text`"
        ) from None
    return text


def _join_limited(pieces: Iterable[str]) -> str:
    """Join what a template writes; TimeoutError if it is more than a chat can be."""
    joined = []
    size = 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size > _RENDERED:
            raise TimeoutError
    return "".join(joined)


def with_share(spec: str) -> tuple[str, float]:
    """The name and the share of a calibration text ``NAME:SHARE``; without a share it is 1. May
    raise InputError.

    Only the share of ``self`` may be 0.
    """
    name, _, share = spec.rpartition(":")
    is_number = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", share, re.ASCII) is not None
    has_share = is_number or name == SELF or Path(name).is_file()
    if not name or Path(spec).exists() or not has_share:
        return spec, 1.0
    if not is_number or not (float(share) or name == SELF):
        rule = f"a decimal number above 0, such as 3 or 0.5, not {share!r}"
        raise option_error("calibration", spec, f": the share after the colon must be {rule}")
    return name, float(share)


def calibration_texts(given: Sequence[str], chats: bool) -> list[str | None]:
    """The calibration texts with their shares: those ``given``, or None for the text that ships.

    A model that ``chats`` also writes ``self:SHARE``, a third of the tokens, unless ``given`` names
    `SELF`.
    """
    shares = [with_share(text) for text in given]
    written = [share for name, share in shares if name == SELF]
    if any(written) and len(written) == len(given):
        return [SELF]
    others = [share for name, share in shares if name != SELF] or [1.0]
    share = sum(written) if written else chats * sum(others) * _WRITTEN
    texts: list[str | None] = [text for text in given if with_share(text)[0] != SELF]
    return [*(texts or [None]), *([f"{SELF}:{share:g}"] if share else [])]


def check_sources(names: Iterable[str], option: str = "calibration") -> None:
    """Raise InputError if a file or dataset given with ``option`` does not exist or cannot be read
    as text.

    Of a .jsonl file the first line is parsed too, so that a file of another form is refused before
    models are read.
    """
    for name in names:
        if option == "calibration":
            name, _ = with_share(name)
            if name == SELF:
                continue
        path = Path(name)
        if fault := _source_fault(path):
            raise option_error(option, name, f": {fault}")
        if path.suffix == _ROWS_SUFFIX and path.is_file():
            with path.open("rb") as file:
                first = file.readline(_SNIFFED)
            try:
                if first.strip() and len(first) < _SNIFFED:
                    _text_or_messages(first.decode("utf-8-sig"))
            except ValueError as error:
                raise InputError(f"{path}, line 1: {error}; each line must be {_ROW}") from error


def _source_fault(path: Path) -> str | None:
    """What is wrong with a text and what to do; None if nothing is."""
    try:
        if not path.is_file():
            return _not_a_file(path)
        with path.open("rb") as file:
            beginning = file.read(_SNIFFED)
    except OSError as error:  # also for too long a name
        return f"cannot be read ({error.strerror}); check its path and permissions"
    if not beginning:
        return "the file is empty; give a file that contains text"
    if path.suffix == ".json":
        return f".json is not supported; write {_ROW} on each line of a .jsonl file"
    # Plain text may have any suffix. Faults within a .txt or .jsonl are told with their line when
    # it is read.
    is_text = b"\0" not in beginning
    if path.suffix not in (".txt", _ROWS_SUFFIX):
        try:
            # A character may be cut at the end.
            codecs.getincrementaldecoder("utf-8")().decode(beginning)
        except UnicodeDecodeError:
            is_text = False
    return None if is_text else f"the file is not UTF-8 text (perhaps UTF-16); give {_KINDS}"


def _not_a_file(path: Path) -> str | None:
    if path.suffix.partition(":")[0] in (".txt", _ROWS_SUFFIX) and not path.is_dir():
        return "no such file; check the path"
    if find_spec("datasets") is not None:
        return None
    install = "install the datasets package: pip install 'kvfold[data]'"
    return f"is no file; to read it as a dataset, {install}; otherwise give {_KINDS}"


def check_seq_len(seq_len: int, positions: int | None, model: str) -> None:
    """Raise InputError if ``seq_len`` exceeds the ``positions`` supported by ``model``; None means
    any number.
    """
    if positions and seq_len > positions:
        exceeded = f"exceeds the {positions} positions supported by the model {model}"
        raise option_error("seq_len", seq_len, f"{exceeded}; use at most --seq-len {positions}")


def permutation(count: int, seed: int) -> "Tensor":
    """The integers below ``count`` in a random order determined by ``seed``, ``[count]``."""
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
