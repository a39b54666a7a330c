"""The files of a checkpoint's folder: which are weights, which are passed on, and which links may be followed."""

import fnmatch
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kvfold.convert.checkpoint.files import parse_json, read_bytes
from kvfold.convert.checkpoint.headers import Header
from kvfold.convert.errors import InputError, short
from kvfold.convert.sizes import bytes_text

CONFIG, RECORD = "config.json", "kvfold.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LEGACY = LEGACY_SINGLE, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
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
        raise InputError(f"{folder}: the path {name!r} must not leave this folder; correct the file that names it")
    try:
        path = (folder / name).resolve()
        os.stat(path)
    except FileNotFoundError:
        pass  # reported below, after a link that leaves the folder
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, links in a circle, a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{folder}: no file can be read as {short(name)} ({reason}); fetch it again") from None
    # A checkpoint from elsewhere must not make kvfold read, and copy into its result, other files of this machine.
    blobs = folder.parent.parent / "blobs"
    roots = [folder, *([blobs] if folder.parent.name == "snapshots" and blobs.is_dir() else [])]
    if not any(path.is_relative_to(root) for root in roots):
        raise InputError(f"{folder / name}: a link that leaves the checkpoint, to {path}; put the file itself there")
    if not path.exists():
        raise InputError(f"{folder}: the file {name if name.isprintable() else short(name)} is missing; fetch it again")
    if not path.is_file():
        raise InputError(f"{folder / name} must be a regular file; put the file itself there")
    return path


def json_beside(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of ``folder``; empty if the file is absent or damaged, which must stop nothing."""
    try:
        return parse_json(folder / name, read_bytes(resolve_member(folder, name)))
    except InputError:
        return {}


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """``config.json`` and the sha256 of its bytes."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise InputError(f"{folder}: a checkpoint needs a {CONFIG}; {_instead_of_config(folder)}")
    # one byte more than allowed: a file beyond the limit is told without reading all of it
    data = read_bytes(resolve_member(folder, CONFIG), length=_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise InputError(f"{path} is longer than {bytes_text(_LARGEST_CONFIG)}, which no config is; fetch it again")
    return parse_json(path, data), hashlib.sha256(data).hexdigest()


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


def weight_file(names: Collection[str], where: object) -> str:
    """The file among ``names`` to start from for a checkpoint's weights, in the order that transformers looks."""
    for name in (SINGLE, INDEX, *LEGACY):
        if name in names:
            return name
    others = sorted(name for name in names if Path(name).suffix in WEIGHT_SUFFIXES)
    listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "") if others else "no weights"
    advice = DEQUANTIZE if any(name.endswith(".gguf") for name in others) else "save the model with save_pretrained"
    raise InputError(f"{where} holds {listed}; weights must be in {SINGLE}, {INDEX} or {LEGACY_SINGLE}: {advice}")


def read_index(folder: Path, name: str) -> dict[str, str]:
    """The ``weight_map`` of an index: tensor name -> file name."""
    weight_map = parse_json(folder / name, read_bytes(resolve_member(folder, name))).get("weight_map")
    if isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values()):
        return weight_map
    raise InputError(f"{folder / name} needs a weight_map from tensor names to file names; fetch it again")


def index_problems(
    index: str, weight_map: dict[str, str], headers: dict[str, Header], names: Iterable[str]
) -> list[str]:
    """Contradictions of an index, its shards, and the ``names`` of all files."""
    known = set(weight_map.values())
    # half of another save
    strays = sorted(name for name in names if _SHARD_NAMES[index].fullmatch(name) and name not in known)
    problems = [f"{name}: a shard that {index} does not name; remove it, or fix the index" for name in strays]
    # a shard with a faulty header has been reported as such
    sound = {file: {info.name for info in header.tensors} for file, header in headers.items() if not header.problems}
    for name, file in weight_map.items():
        if file in sound and name not in sound[file]:
            problems.append(f"{index}: {file} lacks the tensor {name!r}; fetch both again")
    homes = defaultdict[str, list[str]](list)
    for file, tensors in sound.items():
        for name in tensors:
            homes[name].append(file)
            if name not in weight_map:
                problems.append(f"{file}: {index} does not name the tensor {name!r}; fetch both again")
    for name, files in homes.items():
        if len(files) > 1:
            problems.append(f"tensor {name!r} is stored more than once, in {' and '.join(sorted(files))}")
    return problems


def file_states(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int, int]]:
    """Device, inode, size and time of each file that exists; take it before reading them.

    They change when a file is replaced or rewritten.
    """
    # A run reads headers first and weights over hours. A file that changes meanwhile would give a result that belongs
    # to neither version.
    states = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            states[path] = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return states
