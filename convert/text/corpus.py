"""Sources of documents: a text file, a dataset from the hub or in a folder, or the text that ships
with kvfold.

Of a large file only as many cells are read as a run needs: chunks of equal size, drawn at random
by the seed. Files are not read with ``datasets``, which is an optional dependency, shuffles a
buffer of rows rather than the whole file, and does not report the line at fault.
"""

# No torch at the top: commands check the names of texts before they load anything heavy.

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.convert.checkpoint.members import check_unicode, load_json, portable_name
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
_SNIFFED = 1 << 16  # bytes of a file in which binary data shows
_CELL = 1 << 18  # bytes
_RENDER_SECONDS = 5.0
_RENDERED = 1 << 26  # characters

TextSplit = Literal["calibration", "held_out"]


@dataclass(frozen=True)
class Document:
    """A text. ``rendered`` is True if a chat template produced it, including the special tokens."""

    text: str
    rendered: bool = False


@dataclass(frozen=True)
class Corpus:
    """A text: a file, the train split of a dataset, or the text that ships with kvfold.

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

    def digest(self) -> str:
        """The SHA-256 of the text, or of the name of a dataset."""
        if isinstance(self.source, Path):
            with self.source.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        text = self.source if isinstance(self.source, str) else "\f".join(self.source)
        return hashlib.sha256(text.encode()).hexdigest()

    def documents(self, limit: int) -> tuple[list[Document], bool]:
        """Documents with at least ``limit`` characters or bytes in total if possible, and True if
        these are all documents.

        Each line of a .jsonl file is a document; any other file is one document. A file of more
        than ``limit`` bytes yields the complete lines in randomly drawn cells.
        """
        if isinstance(self.source, Path):
            return self._read_file(self.source, limit)
        if isinstance(self.source, str):
            documents = self._read_dataset(self.source)
        else:
            documents = map(Document, self.source)
        taken: list[Document] = []
        size = 0
        for document in documents:
            if size >= limit:
                return taken, False
            taken.append(document)
            size += len(document.text)
        return taken, True

    def _read_dataset(self, spec: str) -> Iterator[Document]:
        import datasets  # pyright: ignore[reportMissingImports]

        name, _, config = spec.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
        except Exception as error:  # datasets raises many kinds, all about the request
            reason = f"not a file, and loading it as a dataset failed ({summarize_error(error)})"
            raise option_error(self.option, spec, f": {reason}; give {_KINDS}") from error
        for number, row in enumerate(rows.shuffle(seed=self.seed, buffer_size=1000)):
            yield self._parse_row(row, f"{format_option(self.option, spec)}, row {number}")

    def _read_file(self, path: Path, limit: int) -> tuple[list[Document], bool]:
        size = path.stat().st_size
        if size <= limit:
            return list(self.parse(path, 0, path.read_bytes())), True
        documents: list[Document] = []
        cells = permutation(-(-size // _CELL), self.seed)[: max(1, limit // _CELL)]
        with path.open("rb") as file:
            for cell in sorted(cells.tolist()):
                file.seek(cell * _CELL)
                raw = file.read(_CELL)
                # The first and the last line may be cut: they belong to lines that begin or end
                # elsewhere.
                first = 0 if cell == 0 else raw.find(b"\n") + 1
                last = raw.rfind(b"\n") + 1
                if first < last:
                    documents += self.parse(path, cell * _CELL + first, raw[first:last])
        return documents, False

    def parse(self, path: Path, start: int, raw: bytes) -> Iterator[Document]:
        """Parse the documents in ``raw``, the bytes of the file ``path`` from offset ``start``."""
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {_line_at(path, start + error.start)}: byte"
                f" 0x{raw[error.start]:02x} is not UTF-8; convert the file to UTF-8"
            ) from None
        if path.suffix != _ROWS_SUFFIX:
            yield Document(text)
            return
        first = _line_at(path, start)
        for number, line in enumerate(text.split("\n"), first):
            if line.strip():
                yield self._parse_row(line, f"{path}, line {number}")

    def _parse_row(self, row: Any, where: str) -> Document:
        """The document in a dataset row or a line of JSON; InputError names ``where`` it is."""
        try:
            if isinstance(row, str):
                row = load_json(row.encode())
            if not isinstance(row, Mapping):
                raise ValueError(f"found a value of type {type(row).__name__}")
            text = row.get("text")
            messages = row.get("messages")
            rendered = not isinstance(text, str) and isinstance(messages, list)
            if rendered:
                text = _render_messages(self.tokenizer, messages)
            if not isinstance(text, str):
                keys = ", ".join(shorten(str(key)) for key in row) or "none"
                raise ValueError(f"found an object with these keys: {keys}")
            # No tokenizer could read half of a surrogate pair.
            check_unicode(text)
            return Document(text, rendered)
        except (ValueError, RecursionError) as error:
            reason = f"{summarize_error(error)}; each row must be {_ROW}"
            raise InputError(f"{where}: {reason}") from error


def _line_at(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return 1 + file.read(offset).count(b"\n")


def _render_messages(tokenizer: Any, messages: Any) -> str:
    """Render the ``messages`` of a row. Raises ValueError with the reason if that fails."""
    try:
        return render(tokenizer, messages)
    except InputError:
        raise
    except Exception as error:  # a template is its author's code and may raise anything
        reason = f"the tokenizer cannot render the chat messages ({summarize_error(error)})"
        raise ValueError(reason) from error


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
        return Corpus(BUILT_IN + unread, read_documents(split), option, tokenizer, seed)
    check_sources([spec], option)
    path = Path(spec)
    if path.is_file():
        return Corpus(portable_name(path), path, option, tokenizer, seed)
    name = path.name if path.exists() else spec
    return Corpus(f"dataset {name}", spec, option, tokenizer, seed)


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
    """
    for name in names:
        if option == "calibration":
            name, _ = with_share(name)
        if name != SELF and (fault := _source_fault(Path(name))):
            raise option_error(option, name, f": {fault}")


def _source_fault(path: Path) -> str | None:
    """What is wrong with a text and what to do; None if nothing is."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                beginning = file.read(_SNIFFED)
            if not beginning:
                return "the file is empty; give a file that contains text"
            if path.suffix == ".json":
                return f".json is not supported; write {_ROW} on each line of a .jsonl file"
            if b"\0" in beginning:
                return f"the file is not UTF-8 text (perhaps UTF-16); give {_KINDS}"
            return None
        is_folder = path.is_dir()
    except OSError as error:  # also for too long a name
        return f"cannot be read ({error.strerror}); check its path and permissions"
    if path.suffix.partition(":")[0] in (".txt", _ROWS_SUFFIX) and not is_folder:
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
