"""The files of a checkpoint's folder: which are weights, which are passed on, and which links may be followed."""

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kvfold.convert.checkpoint.headers import Header, parse_header
from kvfold.convert.checkpoint.json_text import load_json
from kvfold.convert.errors import InputError, first_line, short
from kvfold.convert.sizes import bytes_text

CONFIG, RECORD = "config.json", "kvfold.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LEGACY_SINGLE, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}
# Files that are passed on with the weights: how to use them, and under which terms
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
# The way out of every quantization that is not supported
DEQUANTIZE = "convert the unquantized weights, or dequantize the model with transformers first (docs/questions.md)"
_SHARD_NAMES = {
    INDEX: re.compile(r"model-\d+-of-\d+\.safetensors"),
    LEGACY_INDEX: re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
_LARGEST_CONFIG = 16 << 20  # a thousand times the usual size


def raise_problems(problems: list[str]) -> None:
    """Raise InputError for the first problem with the others as its details; nothing if there is none."""
    if problems:
        raise InputError(problems[0], details=problems[1:])


def resolve_member(folder: Path, name: str) -> Path:
    """The real path of the file ``name`` of a checkpoint. ``folder`` must be resolved.

    Links are followed if they end inside the folder, or inside ``blobs/`` of the hub cache whose snapshot the folder
    is. InputError for everything else: other links, ``..``, absolute names, and what is no regular file.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise InputError(f"{folder}: expected a file inside this folder, found the path {name!r}, which leaves it")
    try:
        path = (folder / name).resolve()
        os.stat(path)
    except FileNotFoundError:
        pass  # told below, after a link that leaves the folder
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, links in a circle, a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{folder}: expected a file {short(name)}, found: {reason}; fetch it again") from None
    # A checkpoint from elsewhere must not make kvfold read, and copy into its result, other files of this machine.
    blobs = folder.parent.parent / "blobs"
    roots = [folder, *([blobs] if folder.parent.name == "snapshots" and blobs.is_dir() else [])]
    if not any(path.is_relative_to(root) for root in roots):
        raise InputError(f"{folder / name}: a link that leaves the checkpoint, to {path}; put the file itself there")
    if not path.exists():
        raise InputError(f"{folder}: expected the file {name}, found none; fetch it again")
    if not path.is_file():
        raise InputError(f"{folder / name}: expected a regular file, found something else")
    return path


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """The bytes of a file, ``limit`` at most. InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise InputError(f"{path}: expected to be able to read it, found: {error.strerror}") from None


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in a file's bytes. InputError names the file."""
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
    """The JSON object in a file of ``folder``; empty if the file is absent or damaged, which must stop nothing."""
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
    # one byte more than allowed: a file beyond the limit is told without reading all of it
    data = read_bytes(resolve_member(folder, CONFIG), _LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise InputError(
            f"{folder / CONFIG}: expected at most {bytes_text(_LARGEST_CONFIG)}, found more; fetch it again"
        )
    return parse_json(folder / CONFIG, data), hashlib.sha256(data).hexdigest()


def _instead_of_config(folder: Path) -> str:
    """The way out for a folder without a config."""
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


def extra_names(names: Iterable[str]) -> list[str]:
    """The files among ``names`` that are passed on with the weights."""
    fitting = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in EXTRA_PATTERNS)}
    return sorted(name for name in fitting if Path(name).suffix not in (".py", *WEIGHT_SUFFIXES))


def weight_files(names: Iterable[str], where: str) -> tuple[str, bool]:
    """The file to start from for a checkpoint's weights (in transformers' order), and True if it is a legacy one."""
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
    strays = sorted(name for name in names if _SHARD_NAMES[index].fullmatch(name) and name not in known)
    return [f"{name}: a shard that {index} does not name; remove it, or fix the index" for name in strays]


def index_problems(index: str, weight_map: dict[str, str], headers: dict[str, Header]) -> list[str]:
    """Problems: contradictions of index and shards. Shards with a faulty header are skipped, that is told already."""
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
    """The header of one local safetensors file. InputError if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            return parse_header(file, size, lambda start, length: os.pread(handle.fileno(), length, start))
    except OSError as error:
        raise InputError(f"{path}: expected to be able to read it, found: {error.strerror}") from None


# A run reads headers first and weights over hours. A file that changes meanwhile would give a result that belongs to
# neither version.
class FileState(NamedTuple):
    """Stat fields that change when a file is replaced or rewritten."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def file_states(paths: Iterable[Path]) -> dict[Path, FileState]:
    """The state of each file that exists; take it before reading them."""
    states = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        states[path] = FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return states


def changed_files(before: Mapping[Path, FileState]) -> list[str]:
    """A line for every file that is gone, another file, or of another size or time than ``before``."""
    lines, after = [], file_states(before)
    for path, state in before.items():
        if path not in after:
            lines.append(f"{path.name}: removed")
        elif after[path][:2] != state[:2]:
            lines.append(f"{path.name}: replaced by another file")
        elif after[path] != state:
            lines.append(f"{path.name}: written to")
    return lines
