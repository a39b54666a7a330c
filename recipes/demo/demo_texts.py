"""The texts of the demo model: what every Python installation says about itself, cleaned and split.

Sources, all in the running interpreter's standard library: the pages of ``pydoc_data.topics``, the
docstrings and block comments of its Python modules, and the docstrings of its extension modules. A
document is one page or one module. Whole documents go to one of three splits, and a paragraph that
was said before is dropped wherever it comes again.

The result depends on the Python version, which is why kvfold ships the texts rather than making
them again.
"""

import ast
import hashlib
import importlib
import inspect
import io
import re
import sys
import sysconfig
import tokenize
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SPLITS = ("train", "calibration", "held_out")  # earlier ones keep what later ones would repeat
SHINGLE = 8  # words; two paragraphs that share half of their shingles say the same thing

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "site-packages",
    "__pycache__",
    "lib-dynload",
    "encodings",
    "pydoc_data",
    "idle_test",
}
SKIPPED_MODULES = re.compile(
    r"_sysconfigdata|__phello__|_test|_xx|xx|_ctypes_test|this$|antigravity$|_sqlite3$"
)
# Modules with other terms than Python's are left out, so that one license covers the texts.
OWN_TERMS = re.compile(
    r"permission\s+(is\s+(hereby\s+)?granted|to\s+use,)|redistribution\s+and\s+use|software\s+is\s+provided"
    r"|apache\s+license|secret\s*labs|cnri|no warranty",
    re.IGNORECASE,
)
RESERVED = re.compile(r"all\s+rights\s+reserved", re.IGNORECASE)
GIVEN_TO_PYTHON = re.compile(
    r"licensed\s+to\s+(the\s+)?psf|python\s+software\s+foundation", re.IGNORECASE
)
LEGAL = re.compile(
    r"copyright|licen[cs]ed?\b|all rights reserved|\(c\)|contributor agreement|@\w+\.\w+",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Entry:
    """A piece of a document: a heading (the signature that a docstring belongs to; may be empty)
    and its paragraphs.
    """

    heading: str
    paragraphs: tuple[str, ...]

    def text(self) -> str:
        return "\n".join(part for part in (self.heading, "\n\n".join(self.paragraphs)) if part)


@dataclass(frozen=True)
class Document:
    name: str
    entries: tuple[Entry, ...]

    def text(self) -> str:
        return "\n\n".join(entry.text() for entry in self.entries)


def build_texts() -> dict[str, list[str]]:
    """Every split's documents, in a fixed order."""
    documents = sorted(
        [*topic_documents(), *module_documents(), *extension_documents()], key=lambda d: d.name
    )
    split = {name: [d for d in documents if split_of(d.name) == name] for name in SPLITS}
    seen_shingles: set[int] = set()
    seen_short: set[tuple[str, ...]] = set()
    result = {}
    for name in SPLITS:
        remaining = [deduplicate(document, seen_shingles, seen_short) for document in split[name]]
        seen_short |= {words(p) for d in remaining for e in d.entries for p in e.paragraphs}
        # Neighbors in the alphabet are neighbors in subject; shuffled, any stretch of a split is a
        # sample of it.
        remaining.sort(key=lambda d: digest("order " + d.name))
        result[name] = [text for d in remaining if len(text := d.text()) >= 200]
    return result


def split_of(name: str) -> str:
    """Six documents in a hundred are held out, ten are for calibration: by a hash, so that no order
    or seed matters.
    """
    place = digest(name) % 100
    return "held_out" if place < 6 else "calibration" if place < 16 else "train"


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def deduplicate(document: Document, seen: set[int], seen_short: set[tuple[str, ...]]) -> Document:
    """The document without paragraphs that were said before; adds what it says to ``seen``, never
    to ``seen_short``.
    """
    entries = []
    for entry in document.entries:
        remaining = []
        for paragraph in entry.paragraphs:
            said = words(paragraph)
            shingles = {hash_words(said[i : i + SHINGLE]) for i in range(len(said) - SHINGLE + 1)}
            known = len(shingles & seen) * 2 >= len(shingles) if shingles else said in seen_short
            if not known:
                remaining.append(paragraph)
                seen |= shingles
        if remaining:
            entries.append(Entry(entry.heading, tuple(remaining)))
    return Document(document.name, tuple(entries))


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def hash_words(said: tuple[str, ...]) -> int:
    return digest(" ".join(said))


def entry(heading: str, text: object) -> Entry | None:
    """Cleaned paragraphs below a heading, without legal notes, addresses and rules; None where
    nothing is left.
    """
    if not isinstance(text, str):
        return None
    text = inspect.cleandoc(text.replace("\f", "\n").replace("\x00", "")).strip()
    pieces = (
        re.sub(r"[ \t]+$", "", piece, flags=re.MULTILINE).strip("\n")
        for piece in re.split(r"\n\s*\n", text)
    )
    paragraphs = tuple(
        p for p in pieces if len(re.findall(r"[A-Za-z]", p)) >= 3 and not LEGAL.search(p)
    )
    return Entry(heading, paragraphs) if paragraphs else None


def document(name: str, entries: Iterator[Entry | None]) -> Document:
    return Document(name, tuple(entry for entry in entries if entry))


def topic_documents() -> Iterator[Document]:
    for name, text in sorted(topics.items()):
        yield document(f"topic {name}", iter([entry("", text)]))


def module_documents() -> Iterator[Document]:
    """The docstrings and comments of the Python modules of the standard library, one document for
    each module.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if SKIPPED_FOLDERS & set(parts) or SKIPPED_MODULES.match(parts[-1]):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        pieces = sorted([*docstrings(name, tree), *comments(source)], key=lambda piece: piece[0])
        if not has_own_terms("\n".join(text for _, _, text in pieces)):
            yield document(name, (entry(heading, text) for _, heading, text in pieces))


def has_own_terms(text: str) -> bool:
    return bool(
        OWN_TERMS.search(text) or (RESERVED.search(text) and not GIVEN_TO_PYTHON.search(text))
    )


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """``(line, heading, text)`` of the module, its classes and its functions."""
    if text := ast.get_docstring(tree):
        yield 0, f"module {module}", text

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(map(ast.unparse, child.bases))
                heading = f"class {prefix}{child.name}" + (f"({bases})" if bases else "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                heading = f"{prefix}{child.name}({ast.unparse(child.args)})"
            else:
                yield from walk(child, prefix)
                continue
            if text := ast.get_docstring(child):
                yield child.body[0].lineno, heading, text
            yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(tree, "")


def comments(source: str) -> Iterator[tuple[int, str, str]]:
    """``(line, "", text)`` of every block of whole-line comments that reads like a sentence."""
    block: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        line = token.start[0]
        if line != last + 1 and block:
            yield first, "", "\n".join(block)
        if line != last + 1:
            block = []
            first = line
        last = line
        block.append("" if re.fullmatch(r"#!.*|#[\W_]*", token.string) else token.string)
    if block:
        yield first, "", "\n".join(block)


def extension_documents() -> Iterator[Document]:
    """The docstrings of the modules written in C, one document for each module."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    names = {
        *sys.builtin_module_names,
        *(p.name.removesuffix(suffix) for p in folder.glob(f"*{suffix}")),
    }
    for name in sorted(names):
        if SKIPPED_MODULES.match(name):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield document(f"extension {name}", extension_entries(name, module))


def extension_entries(name: str, module: types.ModuleType) -> Iterator[Entry | None]:
    yield entry(f"module {name}", module.__doc__)
    for key, value in sorted(vars(module).items()):
        if inspect.isclass(value) and value.__module__ == name:
            yield entry(f"class {key}", vars(value).get("__doc__"))
            for member, held in sorted(vars(value).items()):
                if not isinstance(held, types.WrapperDescriptorType | str):
                    yield entry(f"{key}.{member}{signature(held)}", getattr(held, "__doc__", None))
        elif isinstance(value, types.BuiltinFunctionType):
            yield entry(f"{key}{signature(value)}", value.__doc__)


def signature(value: object) -> str:
    return getattr(value, "__text_signature__", None) or ""
