"""The journal of a calibrated run: its finished layers, so that a killed run can be resumed after the last of them.

It is in the temporary folder beside the shards and is removed when the output is complete. The tensors of a finished
layer are in the shards, in the dtype that the student runs in; the journal holds the layer's number and its notes. A
resumed run takes the calibration text through finished layers as they are, at the cost of two forward passes (for MLA
after a second survey), and fits the remaining ones: its bytes are those of a run that was never killed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert import processes
from kvfold.convert.checkpoint.file_bytes import sync_path, write_file
from kvfold.convert.checkpoint.hashing import file_sha256
from kvfold.convert.checkpoint.shards import Shard, tensor_places
from kvfold.convert.checkpoint.writer import is_laid_out
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import versions
from kvfold.convert.errors import opt

if TYPE_CHECKING:
    from torch import Tensor

_NAME = ".journal.json"
SELF_TEXT = ".text.pt"  # of a run whose source writes the calibration text: its tokens
POLISH_STATE = ".polish.pt"  # of a run that polishes: the masters, moments and best weights of its last round


class Journal:
    """The finished layers of the run in ``folder``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._shards, self._computed = folder, plan.shards, plan.layout.computed
        self._places = tensor_places(plan.shards)
        self._own = {tensor.name for shard in plan.own_shards for tensor in shard.tensors}
        self._path, self._key = folder / _NAME, run_key(plan)
        self._layers: dict[str, Any] = processes.from_first(lambda: self._intact(_layers(self._path, self._key) or {}))

    @property
    def notes(self) -> list[Mapping[str, Any]]:
        """The notes of the finished layers, which are the first ones."""
        return [layer["notes"] for layer in self._layers.values()]

    @property
    def written(self) -> list[str]:
        """The tensors of finished layers in this process's shards."""
        return [name for layer in self._layers for name in self._computed[int(layer)] if name in self._own]

    @property
    def pending(self) -> list[int]:
        """The layers that are not finished and have tensors in this process's shards."""
        left = (layer for layer in range(len(self._computed)) if str(layer) not in self._layers)
        return [layer for layer in left if not self._own.isdisjoint(self._computed[layer])]

    def finished(self, layer: int) -> Mapping[str, "Tensor"] | None:
        """The tensors of ``layer`` as stored, None when it is not finished."""
        if str(layer) not in self._layers:
            return None
        return _read(self._folder, self._shards, self._computed[layer])

    def note(self, layer: int, notes: Mapping[str, Any]) -> None:
        """``layer`` is finished; its tensors must be on disk. The first of several processes keeps the file."""
        self._layers[str(layer)] = {"notes": dict(notes)}
        if not processes.is_first():
            return
        self._layers[str(layer)]["sha256"] = self._hashes(layer)
        new = self._path.with_suffix(".new")
        write_file(new, json.dumps({"run": self._key, "layers": self._layers}))
        sync_path(new)
        os.replace(new, self._path)

    def _hashes(self, layer: int) -> dict[str, str]:
        """The SHA-256 of the tensors of ``layer`` in each file, with the code of ``kvfold verify``."""
        places = sorted((self._places[name] for name in self._computed[layer]), key=lambda place: place.start)
        files = sorted({place.shard for place in places})
        ranges = {file: [(place.start, place.end) for place in places if place.shard == file] for file in files}
        return {file: file_sha256(self._folder / file, ranges[file]) for file in files}

    def _intact(self, layers: dict[str, Any]) -> dict[str, Any]:
        """The layers before the first one whose tensors are no longer those noted; none where a shard is damaged.

        Without any the shards are removed, for they are laid out anew.
        """
        sound: dict[str, Any] = {}
        if all(is_laid_out(self._folder / shard.file, shard) for shard in self._shards):
            for name, layer in layers.items():
                if not isinstance(layer, dict) or layer.get("sha256") != self._hashes(int(name)):
                    break
                sound[name] = layer
        if len(sound) < len(layers):
            print(
                f"{opt('resume', True)}: {len(layers) - len(sound)} layers are damaged; they are made again",
                file=sys.stderr,
            )
        if layers and not sound:
            for shard in self._shards:
                (self._folder / shard.file).unlink(missing_ok=True)
        return sound


def forget(folder: Path) -> None:
    """Remove what only a resumed run needs from ``folder``: the output is complete."""
    for path in (folder / _NAME, folder / SELF_TEXT, folder / POLISH_STATE):
        path.unlink(missing_ok=True)
        path.with_suffix(".new").unlink(missing_ok=True)


def resumable(plan: Plan) -> Callable[[Path], bool]:
    """A test for folders: left by a killed run of the same request on the same source, with a finished layer.

    It prints a line to stderr for the folder of a different run.
    """
    key = run_key(plan)

    def same(folder: Path) -> bool:
        layers = _layers(folder / _NAME, key)
        if layers is None and (folder / _NAME).is_file() and not plan.request.quiet:
            print(
                f"{opt('resume', True)}: the interrupted run here used different options, files, device, threads or "
                "versions; "
                "starting over",
                file=sys.stderr,
            )
        return bool(layers)

    return same


def run_key(plan: Plan) -> str:
    """A digest of everything that decides a run's bytes; files of weights count by their size and time."""
    import torch

    request, folder = plan.request, plan.checkpoint.folder
    files = {info.file for info in plan.checkpoint.tensors.values()} | {"config.json", "tokenizer.json"}
    paths = [*(folder / name for name in sorted(files)), *map(Path, request.texts)]
    settings = {
        "options": request.result_options(),
        "device": [request.device, torch.cuda.is_available(), torch.get_num_threads(), processes.count()],
        "versions": versions(),
        "shard": request.shard_bytes,
        "calibration": request.calibration,
        "files": [_stamp(path) for path in paths],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _stamp(path: Path) -> list[Any]:
    if not path.is_file():
        return [str(path)]
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _layers(path: Path, key: str) -> dict[str, Any] | None:
    """The finished layers of the run ``key``, None when the journal is another run's, damaged or absent."""
    try:
        journal = json.loads(path.read_bytes())
        return dict(journal["layers"]) if journal["run"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path, shards: tuple[Shard, ...], names: tuple[str, ...]) -> dict[str, "Tensor"]:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for shard in shards:
        stored = [tensor.name for tensor in shard.tensors if tensor.name in names]
        if stored:
            with safe_open(folder / shard.file, framework="pt") as file:
                tensors.update((name, file.get_tensor(name)) for name in stored)
    return tensors
