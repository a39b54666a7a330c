"""The files in a checkpoint's folder: which ones are weights or copied as they are, and which links
may be followed.
"""

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
from kvfold.convert.formatting import format_bytes

CONFIG = "config.json"
RECORD = "kvfold.json"
CARD = "README.md"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEGACY = LEGACY_SINGLE, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
}
TEMPLATES = "additional_chat_templates"  # a folder of .jinja files, which tokenizers load
# The files of a tokenizer that may have its chat template
CHAT_FILES = "tokenizer_config.json", "chat_template.jinja"
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
# The way out of every quantization
DEQUANTIZE = (
    "use the unquantized checkpoint, or dequantize the model first, as docs/questions.md shows"
)
_SHARD_NAMES = {
    INDEX: re.compile(r"model-\d+-of-\d+\.safetensors"),
    LEGACY_INDEX: re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
_LARGEST_CONFIG = 16 << 20  # a thousand times the usual size
_LARGEST_FILE = (
    64 << 20
)  # of those without weights: the largest tokenizers and indices have half as much
# Twice the deepest published model: classes build layers one by one, so that a billion would keep a
# command for hours
MOST_LAYERS = 1024
_HASHED = 64 << 20  # chosen: hashing so many bytes takes less than a tenth of a second
_NO_NUMBER = (
    1 << 53
)  # larger ones are no numbers to many readers of JSON; tokenizers have them for no "max_length"
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# Far beyond published models: classes compute tables of rotary frequencies from these when they are
# built
_MOST_WIDTH = 1 << 20
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "head_dim", "qk_rope_head_dim", "rotary_dim")


def raise_problems(problems: list[str]) -> None:
    """Raise InputError for the first problem, with the others as its details. Does nothing if the
    list is empty.
    """
    if problems:
        raise InputError(problems[0], details=problems[1:])


def resolve_member(folder: Path, name: str, named_by: str = "the checkpoint") -> Path:
    """The real path of the file ``name`` of the checkpoint in ``folder``; errors mention
    ``named_by``.

    Follows links that end inside the folder or, for a snapshot in the hub cache, inside the same
    model's ``blobs/``. Raises InputError for all other links, names that are absolute or contain
    ``..``, and anything but a regular file.
    """
    folder = folder.resolve()
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise InputError(
            f"{folder}: {named_by} names {short(name)}, which is outside this folder; use paths"
            " inside it"
        )
    try:
        path = (folder / name).resolve()
        os.stat(path)
    except FileNotFoundError:
        pass  # reported below, after a link that leaves the folder
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # too long a name, links in a circle, a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{folder}: {named_by} names {short(name)}, which cannot be read ({reason}); correct"
            " the path"
        ) from None
    # A checkpoint from elsewhere must not make kvfold read, and copy into its result, other files
    # of this machine.
    blobs = folder.parent.parent / "blobs"
    roots = [folder, *([blobs] if folder.parent.name == "snapshots" and blobs.is_dir() else [])]
    if not any(path.is_relative_to(root) for root in roots):
        raise InputError(
            f"{folder / name} is a link to {path}, outside the checkpoint; replace it with the file"
        )
    if not path.exists():
        raise InputError(
            f"{folder}: the file {name if name.isprintable() else short(name)} is missing; download"
            " the file again"
        )
    if not path.is_file():
        raise InputError(f"{folder / name} must be a regular file; replace it with one")
    return path


def read_member(
    folder: Path,
    name: str,
    named_by: str = "the checkpoint",
    length: int = -1,
    most: int = _LARGEST_FILE,
) -> bytes:
    """The first ``length`` bytes of a checkpoint's file without weights, or all. InputError as in
    ``resolve_member``,

    and if the file has more than ``most`` bytes. Every such file of a checkpoint is read by this
    function.
    """
    path = resolve_member(folder, name, named_by)
    if (size := path.stat().st_size) > most:
        raise InputError(
            f"{folder / name} has {format_bytes(size)}, but at most {format_bytes(most)} are read;"
            " download it again"
        )
    return read_bytes(path, length=size if length < 0 else length)


def json_beside(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file ``name`` of ``folder``, or an empty dict if the file is missing
    or damaged.
    """
    try:
        return parse_json(folder / name, read_member(folder, name))
    except InputError:
        return {}


def recorded_files(folder: Path) -> dict[str, str] | None:
    """The names and SHA-256 hashes that ``kvfold.json`` of ``folder`` lists; None if the folder has
    no such record of its own (a link is not one).
    """
    if (folder / RECORD).is_symlink():
        return None
    files = json_beside(folder, RECORD).get("files")
    if not isinstance(files, dict) or not files:
        return None
    return files if all(isinstance(digest, str) for digest in files.values()) else None


def list_files(folder: Path) -> list[str]:
    """The relative paths of all files below ``folder``, sorted. A link to a folder is a file: what
    is behind it is not part of ``folder``.
    """
    names = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files + links]
    return sorted(names)


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Read ``config.json``. Returns its content and the SHA-256 of its bytes."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise InputError(f"{folder}: a checkpoint needs a {CONFIG}; {_instead_of_config(folder)}")
    data = read_member(folder, CONFIG, most=_LARGEST_CONFIG)
    config = parse_json(path, data)
    inside = [config]  # configs of wrappers contain others
    for table in inside:
        inside += [value for value in table.values() if isinstance(value, dict)]
        numbers = {
            key: value
            for key, value in table.items()
            if isinstance(value, int) and "max_length" not in key
        }
        for key, value in numbers.items():
            if key in _LAYER_KEYS and value > MOST_LAYERS:
                rule = f"models of at most {MOST_LAYERS} layers are read"
            elif key in _WIDTH_KEYS and value > _MOST_WIDTH:
                rule = f"sizes of at most {_MOST_WIDTH} are read"
            elif abs(value) >= _NO_NUMBER:
                rule = "numbers must be below 2^53"
            else:
                continue
            raise InputError(f"{path}: {key} is {short(value)}, but {rule}; correct it")
    return config, hashlib.sha256(data).hexdigest()


def _instead_of_config(folder: Path) -> str:
    """Advice for a folder without a config."""
    if (folder / "adapter_config.json").exists():
        return (
            "merge this LoRA adapter into its base model with peft's merge_and_unload, then call"
            " save_pretrained"
        )
    inside = sorted(
        path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{CONFIG}")
    )
    if inside:
        others = f", or one of {len(inside) - 1} more" if len(inside) > 1 else ""
        return f"did you mean {inside[0]}{others}?"
    suffixes = {path.suffix for path in folder.iterdir()}
    if ".gguf" in suffixes:
        return DEQUANTIZE
    if suffixes & WEIGHT_SUFFIXES:
        return (
            f"put the model's {CONFIG} beside its weights, or save the model again with"
            " save_pretrained"
        )
    return "use the folder that contains it"


def extra_names(names: Iterable[str]) -> list[str]:
    """The sorted files among ``names`` that an output needs besides the weights, such as tokenizers
    and licenses.
    """
    fitting = {
        name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in EXTRA_PATTERNS)
    }
    return sorted(name for name in fitting if Path(name).suffix not in (".py", *WEIGHT_SUFFIXES))


def with_templates(folder: Path, names: Iterable[str]) -> list[str]:
    """The ``extra_names`` among ``names``, the files of ``folder``, and those in its folder of chat
    templates.
    """
    return [
        *extra_names(names),
        *(f"{TEMPLATES}/{path.name}" for path in sorted((folder / TEMPLATES).glob("*.jinja"))),
    ]


def weight_file(names: Collection[str], where: object) -> str:
    """The file among ``names`` that contains or indexes the weights, in transformers' order of
    preference.
    """
    for name in (SINGLE, INDEX, *LEGACY):
        if name in names:
            return name
    others = sorted(name for name in names if Path(name).suffix in WEIGHT_SUFFIXES)
    listed = (
        ", ".join(others[:5]) + (", ..." if len(others) > 5 else "") if others else "no weights"
    )
    advice = (
        DEQUANTIZE
        if any(name.endswith(".gguf") for name in others)
        else "save the model with save_pretrained"
    )
    raise InputError(
        f"{where} has {listed}, but weights must be in {SINGLE}, {INDEX} or {LEGACY_SINGLE};"
        f" {advice}"
    )


def read_index(folder: Path, name: str) -> dict[str, str]:
    """Read the ``weight_map`` of the index ``name``. Returns a dict from tensor names to file
    names.
    """
    weight_map = parse_json(folder / name, read_member(folder, name)).get("weight_map")
    if (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(file, str) for file in weight_map.values())
    ):
        return weight_map
    raise InputError(
        f"{folder / name} needs a 'weight_map' from tensor names to file names; download the file"
        " again"
    )


def index_problems(
    index: str, weight_map: dict[str, str], headers: dict[str, Header], names: Iterable[str]
) -> list[str]:
    """List the contradictions between an index, its shards' headers, and the ``names`` of all files
    in the folder.
    """
    known = set(weight_map.values())
    # half of another save
    strays = sorted(
        name for name in names if _SHARD_NAMES[index].fullmatch(name) and name not in known
    )
    problems = [
        f"{name}: {index} does not mention this shard; remove it or fix the index"
        for name in strays
    ]
    # a shard with a faulty header has been reported as such
    sound = {
        file: {info.name for info in header.tensors}
        for file, header in headers.items()
        if not header.problems
    }
    for name, file in weight_map.items():
        if file in sound and name not in sound[file]:
            problems.append(f"{index}: {file} lacks the listed tensor {name!r}; fetch both again")
    homes = defaultdict[str, list[str]](list)
    for file, tensors in sound.items():
        for name in tensors:
            homes[name].append(file)
            if name not in weight_map:
                problems.append(
                    f"{file}: {index} does not list the tensor {name!r}; fetch both again"
                )
    for name, files in homes.items():
        if len(files) > 1:
            problems.append(
                f"tensor {name!r} is stored more than once, in {' and '.join(sorted(files))}"
            )
    return problems


def stamps(paths: Iterable[Path]) -> list[list[Any]]:
    """Path, size, and SHA-256 of each existing file, as JSON values, to tell whether it changed
    since.

    A file above 64 MiB has its modification time in place of the SHA-256, which would take seconds
    per file.
    """
    # A copied or mounted folder has new times, and the hours of an interrupted run are not
    # discarded for that.
    found = []
    for path, (_, _, size, time) in file_states(paths).items():
        with suppress(OSError):
            small = path.is_file() and size <= _HASHED
            found.append(
                [str(path), size, hashlib.sha256(path.read_bytes()).hexdigest() if small else time]
            )
    return found


def file_states(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int, int]]:
    """Map each existing file to its device, inode, size and modification time. Call this before
    reading the files.
    """
    # A run reads headers first and weights over hours. A file that changes meanwhile would give a
    # result that belongs to neither version.
    states = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            states[path] = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return states
