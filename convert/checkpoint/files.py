"""Find, read and parse the files in a checkpoint's folder safely.

A checkpoint may come from a stranger: every file is read by `read_checkpoint_file`, or from the
path that `resolve_checkpoint_file` returns, so that no link or name leads out of the folder.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvfold.convert.errors import ADVICE, InputError, shorten_repr, summarize_error
from kvfold.convert.formatting import format_bytes

CONFIG = "config.json"
RECORD = "kvfold.json"
CARD = "README.md"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEGACY = LEGACY_SINGLE, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FILES = json.loads(Path(__file__).with_name("files.json").read_text())
WEIGHT_SUFFIXES: list[str] = _FILES["weight_suffixes"]
# Weights, the state of a training, data, and what is written anew. All else is fetched, and passed
# on with the weights: how to use them, and under which terms.
NOT_NEEDED: list[str] = _FILES["not_needed"]
# The only files of subfolders that are passed on
TEMPLATES = "additional_chat_templates/*.jinja"
ADAPTER = "adapter_config.json"
# The files of a tokenizer that may have its chat template
CHAT_FILES = "tokenizer_config.json", "chat_template.jinja"
QUANTIZATION_KEYS = "quantization_config", "compression_config", "quantization"
# The way out of every quantization
DEQUANTIZE = (
    "use the unquantized checkpoint, or dequantize the model first, with the library that quantized"
    " it or with from_pretrained and save_pretrained of transformers"
)
# The largest numbers in a config, by the names of their keys. Twice the layers of the deepest
# published model, and more experts and labels than any has: they are built or listed one by one, so
# that a billion would take hours and all memory. Widths and positions far beyond published models:
# classes compute tables from them when they are built.
_LARGEST_NUMBERS: dict[str, int] = _FILES["largest_numbers"]
_LARGEST_NUMBER = 1 << 53  # many readers of JSON round larger ones
_LFS_POINTER = b"version https://git-lfs"
_LARGEST_FILE = 64 << 20  # without weights; the largest tokenizers and indices have half as much
# Bytes read or written at once, as few as `cp` has: they stay in the processor's cache. For larger
# writes the kernel gathers large pages: 2 GB in steps of 4 MiB took five times the CPU seconds.
STEP = 256 << 10
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair as JSON spells it
_DTYPE_KEYS = {"dtype", "torch_dtype"}
# transformers looks a dtype up among all names of torch, which also has classes and functions
_DTYPE_NAME = re.compile(r"(torch\.)?(auto|half|double|b?float(\d+(_e\d+m\d+\w*)?)?)")


# Safe reading


def read_in_steps(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes ``start`` to ``end`` of a file, `STEP` bytes at a time. Every step reuses the
    same buffer, so use each one before taking the next. Raises InputError if the file is not a
    regular one, is too short or cannot be read.
    """
    buffer = memoryview(bytearray(min(STEP, end - start)))
    try:
        # a pipe would block until somebody writes into it, and a device may never end
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InputError(f"{path} is not a regular file; replace it with one")
            while start < end:
                step = buffer[: end - start]
                filled = 0
                while filled < len(step):  # a read may return fewer bytes, and a part of an element
                    count = os.preadv(file, [step[filled:]], start + filled)
                    if count == 0:
                        raise InputError(
                            f"{path} ends before byte {end}: it changed while kvfold read it; run"
                            " again"
                        )
                    filled += count
                yield step
                start += filled
        finally:
            os.close(file)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "make it readable or download it again")
        raise InputError(f"{path} cannot be read ({error.strerror}); {advice}") from None


def read_bytes(path: Path, length: int = _LARGEST_FILE) -> bytes:
    """Return the first ``length`` bytes of the file ``path``, or all if it has fewer. Raises
    InputError if the file cannot be read.
    """
    end = min(length, path.stat().st_size)
    return b"".join(map(bytes, read_in_steps(path, 0, end)))


def resolve_checkpoint_file(folder: Path, name: str, named_by: str = "the checkpoint") -> Path:
    """Return the real path of the file ``name`` in the checkpoint ``folder``. ``named_by`` is the
    file that mentions ``name``, for error messages.

    Follows links that end inside the folder or, for a snapshot in the hub cache, inside the same
    model's ``blobs/``. Raises InputError for all that leads elsewhere, and for anything but a
    regular file.
    """
    folder = folder.resolve()
    try:
        path = (folder / name).resolve(strict=True)
    # also links in a circle, or what no path can be: too long a name, a NUL character
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{folder}: {named_by} lists {shorten_repr(name)}, which is missing or cannot be read"
            f" ({getattr(error, 'strerror', error)}); download the file again"
        ) from None
    # A checkpoint from elsewhere must not make kvfold read, and copy into its result, other files
    # of this machine.
    in_blobs = folder.parent.name == "snapshots" and path.is_relative_to(
        folder.parent.parent / "blobs"
    )
    if not (path.is_relative_to(folder) or in_blobs):
        raise InputError(
            f"{folder}: {named_by} lists {shorten_repr(name)}, which leads to {path}, outside this"
            " folder; replace the link with the file itself"
        )
    if not path.is_file():
        raise InputError(f"{folder / name} is not a regular file; replace it with one")
    if read_bytes(path, len(_LFS_POINTER)) == _LFS_POINTER:
        raise InputError(
            f"{folder / name} is a Git LFS pointer, not the file; fetch it with `git lfs pull`"
        )
    return path


def read_checkpoint_file(folder: Path, name: str) -> bytes:
    """Return the content of one file of a checkpoint, except a weight file. Raises InputError if
    the file is larger than 64 MiB, or a link that leads out of ``folder``.
    """
    path = resolve_checkpoint_file(folder, name)
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise InputError(
            f"{folder / name} has {format_bytes(size)}, but at most {format_bytes(_LARGEST_FILE)}"
            " are allowed; download it again, or remove it if the model does not need it"
        )
    return read_bytes(path, size)


# JSON, config.json and kvfold.json


def parse_json_value(data: bytes) -> Any:
    """Parse bytes as a JSON value in UTF-8. Raises ValueError or RecursionError if they are not
    valid JSON, or contain half of a surrogate pair.
    """
    value = json.loads(data.decode())
    # JSON can spell half of a surrogate pair, and Python reads it, but it can be neither printed
    # nor written later
    if _SURROGATE.search(data):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_json_object(path: Path, data: bytes) -> dict[str, Any]:
    """Parse ``data``, the content of the file ``path``, as a JSON object. Raises InputError that
    names ``path`` if the content is not a JSON object.
    """
    try:
        value = parse_json_value(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not valid JSON: {summarize_error(error)}; fix the file or download it again"
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"{path} must contain a JSON object, not a {type(value).__name__}; fix the file or"
            " download it again"
        )
    return value


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Read ``config.json`` in ``folder``. Returns its content and the SHA-256 of its bytes. Raises
    InputError if it is missing, invalid, or has a number that is too large or an unknown dtype.
    """
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise InputError(
            f"{folder}: a checkpoint needs a {CONFIG}; use the folder that contains it. Merge a"
            " LoRA adapter into its model first; load a GGUF file by from_pretrained(...,"
            " gguf_file=...), and save the model by save_pretrained"
        )
    data = read_checkpoint_file(folder, CONFIG)
    config = parse_json_object(path, data)
    tables = [config]
    for table in tables:
        for key in ("type", "rope_type"):
            if table.get(key) == "su":  # the first name of longrope, in Phi-3's first configs
                table[key] = "longrope"
        for key, value in table.items():
            if isinstance(value, dict) and key not in QUANTIZATION_KEYS:
                tables.append(value)  # of wrappers
            limits = (limit for name, limit in _LARGEST_NUMBERS.items() if re.fullmatch(name, key))
            limit = next(limits, _LARGEST_NUMBER)
            rule = None
            if isinstance(value, int) and "max_length" not in key and abs(value) > limit:
                rule = f"at most {limit}"
            if key in _DTYPE_KEYS and isinstance(value, str) and not _DTYPE_NAME.fullmatch(value):
                rule = "a floating-point dtype of torch, such as bfloat16"
            if rule is not None:
                raise InputError(
                    f"{path}: {key} is {shorten_repr(value)}, but must be {rule}; correct it"
                )
    return config, hashlib.sha256(data).hexdigest()


def format_json(value: Mapping[str, Any]) -> str:
    """Return ``value`` as JSON text in the style of transformers' configs: indented by two spaces,
    keys in their given order, with a final newline.
    """
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def set_config_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a copy of ``config`` (config.json) that states ``dtype`` under the keys "dtype" or
    "torch_dtype", whichever it has, or else "dtype". Nested configs that state a dtype change too.
    """
    changed = dict(config)
    for name, value in config.items():
        if isinstance(value, Mapping) and value.keys() & _DTYPE_KEYS:
            changed[name] = set_config_dtype(value, dtype)
    # older and newer readers know one key each: both stay where both are
    for key in config.keys() & _DTYPE_KEYS or {"dtype"}:
        changed[key] = dtype
    return changed


def remove_code_reference(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without ``auto_map``, which names classes in Python files that a converted
    checkpoint does not have; nested configs too.
    """
    return {
        key: remove_code_reference(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "auto_map"
    }


# Names in a folder


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files in ``folder`` and its subfolders, sorted. A link to a
    folder counts as one file; the files behind it are not listed.
    """
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(str(path.relative_to(folder)) for path in files)


def list_files_besides_weights(folder: Path) -> list[str]:
    """Return the sorted names of the files in ``folder`` that a converted checkpoint needs besides
    its weights, such as tokenizers, chat templates and licenses. Code is not among them.
    Raises InputError for a name that is not UTF-8, which kvfold.json could not contain.
    """
    names = [path.name for path in folder.iterdir() if not path.is_dir()]
    left = [pattern.lower() for pattern in (*NOT_NEEDED, CONFIG, "*.index.json", "*.py")]
    needed = [name for name in names if not any(fnmatch(name.lower(), p) for p in left)]
    needed += [str(path.relative_to(folder)) for path in folder.glob(TEMPLATES)]
    for name in needed:
        if os.fsencode(name).decode(errors="replace") != name:
            raise InputError(f"{folder}: the file name {name!r} is not UTF-8; rename the file")
    return sorted(needed)


def read_weight_map(folder: Path, entry: str) -> dict[str, str]:
    """Return the file name of each tensor from the index file ``entry`` in ``folder``. Returns an
    empty dict if ``entry`` is the weight file itself, not an index.
    """
    if not entry.endswith(".json"):
        return {}
    weight_map = parse_json_object(folder / entry, read_checkpoint_file(folder, entry)).get(
        "weight_map"
    )
    if (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(file, str) for file in weight_map.values())
    ):
        return weight_map
    raise InputError(
        f"{folder / entry} needs a 'weight_map' that maps tensor names to file names; download the"
        " file again"
    )


def find_weight_file(names: Collection[str], where: object) -> str:
    """Return the one of the file ``names`` that contains or indexes the weights, in transformers'
    order of preference. Raises InputError, which names ``where``, if there is none.
    """
    for name in (SINGLE, INDEX, *LEGACY):
        if name in names:
            return name
    other_weights = sorted(name for name in names if Path(name).suffix in WEIGHT_SUFFIXES)
    raise InputError(
        f"{where} has {', '.join(other_weights[:5]) or 'no weights'}, but weights must be in"
        f" {SINGLE}, {INDEX} or {LEGACY_SINGLE}; save the model with save_pretrained"
        " (load a GGUF file by from_pretrained(.., gguf_file=..))"
    )


def decode_file_name(path: Path) -> str:
    """Return the last component of ``path`` as text for ``kvfold.json``. Bytes that are not valid
    UTF-8 become the Unicode replacement character.
    """
    return os.fsencode(path.name).decode("utf-8", "replace")


def get_file_states(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int, int]]:
    """Map each existing file to its device, inode, size and modification time, which show later
    whether the file has changed. Call this before reading the files.
    """
    # A run reads headers first and weights over hours. A file that changes meanwhile would give a
    # result that belongs to neither version.
    states = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            states[path] = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return states
