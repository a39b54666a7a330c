"""Open a checkpoint by reading only its headers, which give the name, dtype and shape of each
tensor. Weights are read when they are needed.

Does not import torch, transformers or huggingface_hub until a tensor or a legacy file is read or a
hub id is used.
"""

import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint import hub
from kvfold.convert.checkpoint.files import (
    ADAPTER,
    CARD,
    CHAT_FILES,
    CONFIG,
    DEQUANTIZE,
    LEGACY,
    QUANTIZATION_KEYS,
    STEP,
    decode_file_name,
    find_weight_file,
    get_file_states,
    list_files_besides_weights,
    parse_json_object,
    read_checkpoint_file,
    read_config,
    read_in_steps,
    read_weight_map,
    resolve_checkpoint_file,
)
from kvfold.convert.checkpoint.headers import DTYPES, FLOAT_DTYPES, TensorInfo, read_header
from kvfold.convert.errors import InputError, list_some, shorten_repr

if TYPE_CHECKING:
    import torch

# Ends of the names of integer tensors that are weights; buffers such as masks and positions are not
_PACKED = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")
# Parts of names that torch.compile, DistributedDataParallel, FSDP, gradient checkpointing and PEFT
# add to a module's tensors
_WRAPPED = re.compile(
    r"\b(_orig_mod(?:ule)?|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|lora_[AB])(?=\.)"
    r"|^module(?=\.)"
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config and tensor headers have been read; its weights are read by
    `read_tensor` and the other methods.

    ``folder`` has its files; of a hub model opened by its headers, only the small ones.
    ``config`` is the content of config.json.
    ``tensors`` are in byte order, file by file.
    ``origin`` names it without a local path: ``id@commit`` for a hub model, else the folder's name.
    ``config_hash`` is the SHA-256 of config.json.
    ``paths`` maps weight files to their real paths; empty if only headers were fetched.
    ``states`` describes every local file before it was read.
    ``legacy`` is True if the weights are pickled.
    ``digests`` has the SHA-256 of each tensor's bytes by `TensorInfo.name`, once it has been read.
    ``stored`` has all tensors as the files name them where ``tensors`` has been renamed.
    ``notes`` are sentences for the user about what is not converted.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    config_hash: str
    paths: Mapping[str, Path] = field(default_factory=dict)
    states: dict[Path, tuple[int, int, int, int]] = field(default_factory=dict)
    legacy: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    stored: dict[str, TensorInfo] | None = None
    notes: tuple[str, ...] = ()
    # the tensors of the legacy file that was read last
    _loaded: dict[Path, dict[str, "torch.Tensor"]] = field(default_factory=dict)

    @property
    def hub_id(self) -> str | None:
        """The model's id on the Hugging Face hub (``owner/name``), or None if the model was opened
        from a local folder.
        """
        return self.origin.partition("@")[0] if "/" in self.origin else None

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template, in ``tokenizer_config.json`` or in
        ``chat_template.jinja``.
        """
        settings, template = CHAT_FILES
        with suppress(InputError):
            if parse_json_object(Path(settings), read_checkpoint_file(self.folder, settings)).get(
                "chat_template"
            ):
                return True
        return (self.folder / template).is_file()

    def count_float_bytes(self) -> Counter[str]:
        """Return the total size in bytes of the floating-point tensors, by safetensors dtype."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in FLOAT_DTYPES:
                sizes[info.dtype] += info.nbytes
        return sizes

    def count_elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read_tensor(self, name: str) -> "torch.Tensor":
        """Read the tensor ``name`` in its stored dtype and shape into new CPU memory."""
        import torch

        from kvfold.convert.checkpoint.tensors import TORCH_DTYPES, view_as_bytes

        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        data = view_as_bytes(tensor)
        position = 0
        for step in self._read_steps(info):
            data[position : position + len(step)] = step
            position += len(step)
        return tensor

    def read_bytes_as(self, name: str, dtype: str) -> Iterator[memoryview]:
        """Yield the bytes of the tensor ``name`` in order, cast to the safetensors ``dtype``, a few
        at a time. Steps may share one buffer, so use each one before taking the next.
        """
        info = self.tensors[name]
        if dtype == info.dtype:
            yield from self._read_steps(info)
            return
        import torch

        from kvfold.convert.checkpoint.tensors import TORCH_DTYPES, cast_floats, view_as_bytes

        for step in self._read_steps(info):
            chunk = torch.frombuffer(step, dtype=TORCH_DTYPES[info.dtype])
            yield view_as_bytes(cast_floats(chunk, TORCH_DTYPES[dtype], name))

    def _read_steps(self, info: TensorInfo) -> Iterator[memoryview]:
        """Yield the bytes of the tensor at ``info``, `STEP` at a time, and then add their SHA-256
        to ``digests``. Steps may share one buffer.
        """
        path = self.paths[info.file]
        steps = read_in_steps(path, info.start, info.end)
        if self.legacy:
            data = self._get_pickled_bytes(path, info)
            steps = (data[start : start + STEP] for start in range(0, len(data), STEP))
        digest = None if info.name in self.digests else hashlib.sha256()
        for step in steps:
            if digest is not None:
                digest.update(step)
            yield step
        if digest is not None:
            self.digests[info.name] = digest.hexdigest()

    def _get_pickled_bytes(self, path: Path, info: TensorInfo) -> memoryview:
        """Return the bytes of the tensor at ``info`` in the legacy file ``path``, a stored tensor
        or a part of one, such as one expert of all.
        """
        from kvfold.convert.checkpoint.tensors import load_pickled_state, view_as_bytes

        if path not in self._loaded:
            self._loaded.clear()
            self._loaded[path] = load_pickled_state(path)
        whole = next(
            stored
            for stored in (self.stored or self.tensors).values()
            if stored.file == info.file and stored.start <= info.start and info.end <= stored.end
        )
        data = view_as_bytes(self._loaded[path][whole.name])
        return data[info.start - whole.start : info.end - whole.start]

    def has_equal_tensors(self, first: str, second: str) -> bool:
        """True if two tensors have the same dtype, shape and bytes; False if only their headers are
        here.
        """
        info = self.tensors[first]
        other = self.tensors[second]
        if (info.dtype, info.shape) != (other.dtype, other.shape) or info.file not in self.paths:
            return False
        steps = zip(self._read_steps(info), self._read_steps(other), strict=True)
        return all(left == right for left, right in steps)

    def compute_model_digest(self) -> str:
        """Return one SHA-256 for the whole model: of config.json and of every tensor's name, dtype,
        shape and bytes. It does not depend on how the tensors are divided into files.

        Reads the tensors that were not read yet.
        """
        lines = [f"{self.config_hash} {CONFIG}\n"]
        for name, info in sorted((self.stored or self.tensors).items()):
            if name not in self.digests:
                for _ in self._read_steps(info):
                    pass
            lines.append(f"{self.digests[name]} {info.dtype} {list(info.shape)} {name}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed on disk since the checkpoint was opened. Call this
        before the output becomes visible.
        """
        after = get_file_states(self.states)
        changed_files = [
            path.name for path, state in self.states.items() if after.get(path) != state
        ]
        if changed_files:
            raise InputError(
                f"{self.origin}: {', '.join(changed_files)} changed during the run, so no output"
                " was kept; run again when no program writes to the model's folder"
            )

    def print_notes(self) -> None:
        """Print ``notes`` to stderr as warnings."""
        for note in self.notes:
            print(f"warning: {note}", file=sys.stderr)

    def close(self) -> None:
        """Free the memory of legacy weight files that are loaded. Reading a tensor later loads them
        again.
        """
        self._loaded.clear()


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open the model in a folder or of a hub id (``owner/name@revision``), and check the headers of
    all weight files. A hub model is downloaded unless it is in the cache.

    Raises one InputError with all problems: no such folder or id, a missing or invalid config.json,
    truncated or inconsistent files, links that leave the folder, quantized weights.
    """
    return _open_folder(resolve_local_folder(model) or hub.download_model(str(model)))


def open_checkpoint_headers(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint without downloading its weights: of a hub model, only the config, the
    index, the chat template and the tensor headers are fetched. A local folder opens as in
    `open_checkpoint`.

    A legacy checkpoint on the hub has no separate headers, so all of it is downloaded. With
    HF_HUB_OFFLINE, every hub id is opened from the cache.
    """
    local = resolve_local_folder(model)
    fetched = None if local else hub.fetch_tensor_headers(str(model))
    if fetched is None:
        return open_checkpoint(model)
    folder, tensors = fetched
    config, digest = read_config(folder)
    infos = {info.name: info for info in tensors}
    # no states: a commit on the hub does not change
    origin = _name_origin(folder)
    notes = _list_notes(folder, origin, config)
    checkpoint = Checkpoint(folder, config, infos, origin, digest, notes=notes)
    _refuse_quantized(checkpoint)
    return checkpoint


def resolve_local_folder(model: str | os.PathLike[str]) -> Path | None:
    """Return the real path of ``model`` if it is a local folder, or None if it is a hub id. Raises
    InputError if it is neither.
    """
    if os.path.isdir(model):
        return Path(model).resolve()
    if os.path.exists(model):
        raise InputError(
            f"{model} is a file, but a checkpoint is a folder; use the folder that contains it"
        )
    if not hub.HUB_ID.fullmatch(str(model)):
        raise InputError(
            f"{model}: no such folder; use a checkpoint's folder, or a hub id with its owner, such"
            " as openai-community/gpt2"
        )
    return None


def _name_origin(folder: Path) -> str:
    """Return ``owner/name@commit`` for a snapshot in the hub cache, or else the folder's name."""
    match = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([^/]+)$", str(folder))
    return "{}/{}@{}".format(*match.groups()) if match else decode_file_name(folder)


def _open_folder(folder: Path) -> Checkpoint:
    """Open the checkpoint in a local ``folder`` and check all its headers. Raises one InputError
    with all problems.
    """
    origin = _name_origin(folder)
    names = os.listdir(folder)
    extra = list_files_besides_weights(folder)
    # states are taken before anything is read: a change in between must not go unseen
    states = get_file_states(folder / name for name in (CONFIG, *extra))
    config, digest = read_config(folder)
    entry = find_weight_file(names, folder)
    states |= get_file_states([folder / entry])
    problems: list[str] = []
    # a tokenizer that cannot be copied is told now, not after hours of converting
    for name in (*extra, *({CARD} & {*names})):
        with _collect_input_errors(problems):
            read_checkpoint_file(folder, name)
    read = read_header
    legacy = entry in LEGACY
    if legacy:
        from kvfold.convert.checkpoint.tensors import read_legacy_header

        read = read_legacy_header
    weight_map = read_weight_map(folder, entry)
    paths = {}
    stored: dict[tuple[str, str], TensorInfo] = {}
    files = sorted(set(weight_map.values())) or [entry]
    if missing := [file for file in files if not os.path.lexists(folder / file)]:
        raise InputError(
            f"{folder}: {entry} lists {list_some(missing)}, which are missing; download them, or"
            " the index that belongs to the files in the folder"
        )
    for file in files:
        with _collect_input_errors(problems):
            path = paths[file] = resolve_checkpoint_file(folder, file, entry)
            states |= get_file_states([path])
            stored |= {(info.name, info.file): info for info in read(path, file)}
    if weight_map and not problems:
        problems = [
            f"{entry} and {file} disagree about tensor {name!r}; fetch both again"
            for name, file in sorted(stored.keys() ^ weight_map.items())
        ]
    if problems:
        raise InputError(problems[0], problems[1:])
    tensors = {info.name: info for info in stored.values()}
    notes = _list_notes(folder, origin, config)
    checkpoint = Checkpoint(
        folder, config, tensors, origin, digest, paths, states, legacy, notes=notes
    )
    _refuse_quantized(checkpoint)
    return checkpoint


def _list_notes(folder: Path, origin: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences about what is in ``folder`` but is not applied, and what its ``config``
    switches off. ``origin`` is the model's name in them.
    """
    notes = []
    if os.path.lexists(folder / ADAPTER):
        notes.append(
            f"{origin}: the adapter beside the model ({ADAPTER}) is not applied; to convert both,"
            " merge it first (merge_and_unload of PEFT)"
        )
    # left behind by a training with gradient checkpointing
    if config.get("use_cache") is False:
        notes.append(
            f"{origin}: use_cache is false in {CONFIG}, so transformers generates without a KV"
            " cache, however small; set it to true there and in generation_config.json"
        )
    return tuple(notes)


@contextmanager
def _collect_input_errors(problems: list[str]) -> Iterator[None]:
    """Catch an InputError in the with-block and append its lines to ``problems``, so that several
    errors are reported together.
    """
    try:
        yield
    except InputError as error:
        problems += [error.message, *error.details]


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise InputError if config.json, or the dtypes and names of the tensors, show that the
    weights are quantized, or that the model was saved inside a wrapper for training.
    """
    for name in checkpoint.tensors:
        if wrapped := _WRAPPED.search(name):
            raise InputError(
                f"{checkpoint.origin}: tensor names contain {wrapped[0]!r} ({name}), which wrappers"
                " for training add (torch.compile, DDP, FSDP, PEFT); save the model inside the"
                " wrapper, such as model._orig_mod, model.module or model.merge_and_unload()"
            )
    config = checkpoint.config
    key = next((key for key in QUANTIZATION_KEYS if config.get(key)), None)
    packed = [
        f"tensor {info.name!r} in {info.file}"
        for info in checkpoint.tensors.values()
        if "torch" not in DTYPES[info.dtype]
        or (info.dtype[0] in "IU" and info.name.endswith(_PACKED))
    ]
    if key is None and not packed:
        return
    evidence = f"{key}: {shorten_repr(config[key])}" if key else packed[0]
    advice = DEQUANTIZE
    if FLOAT_DTYPES.issuperset(info.dtype for info in checkpoint.tensors.values()):
        advice += f"; if its floats are dequantized weights already, remove {key} from {CONFIG}"
    raise InputError(f"{checkpoint.origin}: its weights are quantized ({evidence}); {advice}")
