"""The files of a checkpoint: weights, files that are passed on, and links that may be followed."""

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from kvfold.convert.checkpoint.headers import Header, parse_header
from kvfold.convert.checkpoint.json_text import load_json
from kvfold.convert.errors import InputError, first_line, short
from kvfold.convert.sizes import bytes_text

CONFIG, RECORD = "config.json", "kvfold.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LEGACY_SINGLE, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STRAY = {
    INDEX: re.compile(r"model-\d+-of-\d+\.safetensors"),
    LEGACY_INDEX: re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
# Files passed on with the weights: how to use them, and under which terms.
EXTRA_PATTERNS = (
    "tokenizer*",
    "generation_config.json",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
    "USE_POLICY*",
)
# Of sentence-transformers: how the modules behind the model make one embedding of what it gives for each token.
MODULES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
_MODULE = re.compile(r"[0-9]+_\w+")  # a module's folder
_MODULE_FILES = ("config.json", "model.safetensors")
MODULE_PATTERNS = (*MODULES, *(f"[0-9]*_*/{name}" for name in _MODULE_FILES))  # for the hub
_LARGEST_CONFIG = 16 << 20  # a thousand times the usual size
# The way out of every quantization that is not supported
DEQUANTIZE = "convert the unquantized weights, or dequantize the model with transformers first (docs/questions.md)"
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}


def raise_problems(problems: list[str]) -> None:
    """Raise InputError for the first problem with the further ones as its details; nothing when there is none."""
    if problems:
        raise InputError(problems[0], details=problems[1:])


def resolve_member(folder: Path, name: str) -> Path:
    """The real path of the file ``name`` of a checkpoint. ``folder`` must be resolved.

    Links are followed when they end inside the folder, or inside ``blobs/`` of the hub cache whose snapshot the folder
    is. InputError for everything else: other links, ``..``, absolute names, and what is not a regular file.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise InputError(f"{folder}: expected a file inside this folder, found the path {name!r}, which leaves it")
    path = _real_path(folder, name)
    if not any(path.is_relative_to(root) for root in (folder, *_own_blobs(folder))):
        raise InputError(f"{folder / name}: a link that leaves the checkpoint, to {path}; put the file itself there")
    if not path.exists():
        raise InputError(f"{folder}: expected the file {name}, found none; fetch it again")
    if not path.is_file():
        raise InputError(f"{folder / name}: expected a regular file, found something else")
    return path


def _real_path(folder: Path, name: str) -> Path:
    """The real path of a member. InputError for a name that no path can have, and for links in a circle."""
    try:
        path = (folder / name).resolve()
        os.stat(path)
    except FileNotFoundError:
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{folder}: expected a file {short(name)}, found: {reason}; fetch it again") from None
    return path


def _own_blobs(folder: Path) -> list[Path]:
    cached = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return [folder.parent.parent / "blobs"] if cached else []


def extra_problems(folder: Path, names: Iterable[str]) -> list[str]:
    """Problems: files to be passed on that are links out of the checkpoint, no files, or not readable."""
    problems = []
    for name in names:
        try:
            read_bytes(resolve_member(folder, name), limit=1)
        except InputError as error:
            problems.append(error.message)
    return problems


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object out of a file's bytes; InputError naming the file otherwise."""
    try:
        value = load_json(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: expected JSON, found what does not parse: {first_line(error)}; fix it or fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}; fix it or fetch it again")
    return value


def json_beside(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object of a file whose absence or damage must stop nothing: empty then."""
    try:
        return parse_json(folder / name, read_bytes(resolve_member(folder, name)))
    except InputError:
        return {}


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """``config.json`` and the sha256 of its bytes."""
    if not os.path.lexists(folder / CONFIG):
        raise InputError(
            f"{folder}: expected a checkpoint with a {CONFIG}, found no {CONFIG}; {_instead_of_config(folder)}"
        )
    data = read_bytes(resolve_member(folder, CONFIG), _LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise InputError(
            f"{folder / CONFIG}: expected at most {bytes_text(_LARGEST_CONFIG)}, found more; fetch it again"
        )
    return parse_json(folder / CONFIG, data), hashlib.sha256(data).hexdigest()


def _instead_of_config(folder: Path) -> str:
    """What to do about a folder without a config: it is further down, or was not saved with the weights."""
    if (folder / "adapter_config.json").exists():
        return "a LoRA adapter is merged into its base model first: peft's merge_and_unload, then save_pretrained"
    inside = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{CONFIG}"))
    if inside:
        others = f", or one of {len(inside) - 1} more" if len(inside) > 1 else ""
        return f"did you mean {inside[0]}{others}?"
    suffixes = {path.suffix for path in folder.iterdir()}
    if ".gguf" in suffixes:
        return DEQUANTIZE
    if suffixes & WEIGHT_SUFFIXES:
        return f"put the model's {CONFIG} beside its weights, or save it with save_pretrained"
    return "give the folder that holds it"


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """The bytes of a file, ``limit`` at most. InputError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise InputError(f"{path}: expected to be able to read it, found: {error.strerror}") from None


def extra_names(names: Iterable[str]) -> list[str]:
    """The files among ``names`` that are passed on with the weights."""
    fitting = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in EXTRA_PATTERNS)}
    return sorted(name for name in fitting if Path(name).suffix not in (".py", *WEIGHT_SUFFIXES))


def module_names(folder: Path) -> list[str]:
    """The files of sentence-transformers below ``folder``, none without its ``modules.json``.

    Folders of modules are looked into unless they are links.
    """
    if not os.path.lexists(folder / MODULES[0]):
        return []
    with os.scandir(folder) as entries:
        parts = [each.name for each in entries if _MODULE.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    names = [*MODULES, *(f"{part}/{name}" for part in sorted(parts) for name in _MODULE_FILES)]
    return [name for name in names if os.path.lexists(folder / name)]


def weight_files(names: Iterable[str], where: str) -> tuple[str, bool]:
    """The first file of a checkpoint's weights (in the order of transformers), and whether it is legacy."""
    present = set(names)
    for name in (SINGLE, INDEX, LEGACY_SINGLE, LEGACY_INDEX):
        if name in present:
            return name, name in (LEGACY_SINGLE, LEGACY_INDEX)
    others = sorted(name for name in present if Path(name).suffix in WEIGHT_SUFFIXES)
    listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "") if others else "no weights"
    advice = DEQUANTIZE if any(name.endswith(".gguf") for name in others) else "save the model with save_pretrained"
    raise InputError(f"{where}: expected {SINGLE}, {INDEX} or {LEGACY_SINGLE}, found {listed}; {advice}")


def parse_index(path: Path, data: bytes) -> dict[str, str]:
    """The ``weight_map`` of an index: tensor name -> file name."""
    weight_map = parse_json(path, data).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not all(isinstance(file, str) for file in weight_map.values())
        or not weight_map
    ):
        raise InputError(f"{path}: expected a weight_map from tensor names to file names, found none; fetch it again")
    return weight_map


def stray_shards(names: Iterable[str], index: str, weight_map: dict[str, str]) -> list[str]:
    """Problems: shards lying in the folder that the index does not name (half of another save)."""
    known = set(weight_map.values())
    strays = sorted(name for name in names if _STRAY[index].fullmatch(name) and name not in known)
    return [f"{name}: a shard that {index} does not name; remove it, or fix the index" for name in strays]


def index_problems(index: str, weight_map: dict[str, str], headers: dict[str, Header]) -> list[str]:
    """Problems: contradictions of index and shards; without files of a faulty header, a problem in itself."""
    problems = []
    sound = {
        file: {tensor.name for tensor in header.tensors} for file, header in headers.items() if not header.problems
    }
    for name, file in weight_map.items():
        if file in sound and name not in sound[file]:
            problems.append(f"{index}: tensor {name!r} expected in {file}, found no such tensor there")
    homes: dict[str, list[str]] = {}
    for file, tensors in sound.items():
        for name in tensors:
            homes.setdefault(name, []).append(file)
            if name not in weight_map:
                problems.append(f"{file}: tensor {name!r} is not named by {index}")
    for name, files in homes.items():
        if len(files) > 1:
            problems.append(f"tensor {name!r} is stored more than once: in {' and '.join(sorted(files))}")
    return problems


def read_header(path: Path, file: str) -> Header:
    """The header of one local safetensors file; InputError when it cannot be read."""
    try:
        with path.open("rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            return parse_header(file, size, lambda start, length: os.pread(handle.fileno(), length, start))
    except OSError as error:
        raise InputError(f"{path}: expected to be able to read it, found: {error.strerror}") from None
