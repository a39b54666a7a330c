"""The journal of a calibrated run: its finished layers, so that a killed run can be resumed after the last of them.

It is in the temporary folder beside the shards, which hold the tensors of these layers, until the output is complete. A
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
from kvfold.convert.checkpoint.files import sync_path, write_file
from kvfold.convert.checkpoint.hashing import file_sha256
from kvfold.convert.checkpoint.shards import tensor_places
from kvfold.convert.checkpoint.writer import is_laid_out
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import versions
from kvfold.convert.errors import opt

if TYPE_CHECKING:
    from torch import Tensor

_NAME = ".journal.json"
# The tokens of a run whose source writes the calibration text.
SELF_TEXT = ".text.pt"
# The masters, moments and best weights of the last round of a run that polishes.
POLISH_STATE = ".polish.pt"


class Journal:
    """The finished layers of the run in ``folder``: the first ones, with their ``notes`` in order."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._shards, self._computed = folder, plan.shards, plan.layout.computed
        self._places = tensor_places(plan.shards)
        self._key = run_key(plan)
        own = {tensor.name for shard in plan.own_shards for tensor in shard.tensors}
        self._layers: list[dict[str, Any]] = processes.from_first(self._intact)
        self.notes: list[Mapping[str, Any]] = [layer["notes"] for layer in self._layers]
        done = len(self.notes)
        # Of this process's shards: the tensors of finished layers, and the layers that are not finished.
        self.written = [name for names in self._computed[:done] for name in names if name in own]
        self.pending = [layer for layer in range(done, len(self._computed)) if own & {*self._computed[layer]}]

    def finished(self, layer: int) -> dict[str, "Tensor"]:
        """The tensors of a finished ``layer`` as stored."""
        from safetensors import safe_open

        tensors: dict[str, Tensor] = {}
        for shard in self._shards:
            stored = [tensor.name for tensor in shard.tensors if tensor.name in self._computed[layer]]
            if stored:
                with safe_open(self._folder / shard.file, framework="pt") as file:
                    tensors.update((name, file.get_tensor(name)) for name in stored)
        return tensors

    def note(self, notes: Mapping[str, Any]) -> None:
        """The next layer is finished; its tensors must be on disk. The first of several processes keeps the file."""
        self.notes.append(dict(notes))
        if not processes.is_first():
            return
        self._layers.append({"notes": dict(notes), "sha256": self._hashes(len(self._layers))})
        # Renamed, so that a killed run leaves the journal of one layer or of the next, never a part of it.
        path = self._folder / _NAME
        new = path.with_suffix(".new")
        write_file(new, json.dumps({"run": self._key, "layers": self._layers}))
        sync_path(new)
        os.replace(new, path)

    def _hashes(self, layer: int) -> dict[str, str]:
        """The SHA-256 of the tensors of ``layer`` in each file."""
        places = sorted((self._places[name] for name in self._computed[layer]), key=lambda place: place.start)
        files = sorted({place.shard for place in places})
        ranges = {file: [(place.start, place.end) for place in places if place.shard == file] for file in files}
        return {file: file_sha256(self._folder / file, ranges[file]) for file in files}

    def _intact(self) -> list[dict[str, Any]]:
        """The noted layers before the first one whose tensors were changed since; none where a shard is damaged."""
        layers = _layers(self._folder, self._key) or []
        sound = 0
        if all(is_laid_out(self._folder / shard.file, shard) for shard in self._shards):
            for layer in layers:
                if not isinstance(layer, dict) or layer.get("sha256") != self._hashes(sound):
                    break
                sound += 1
        if sound < len(layers):
            print(
                f"{opt('resume', True)}: {len(layers) - sound} layers are damaged; they are made again", file=sys.stderr
            )
        if layers and not sound:
            # Without a finished layer they are laid out anew.
            for shard in self._shards:
                (self._folder / shard.file).unlink(missing_ok=True)
        return layers[:sound]


def forget(folder: Path) -> None:
    """Remove what only a resumed run needs from ``folder``: the output is complete."""
    for path in (folder / _NAME, folder / SELF_TEXT, folder / POLISH_STATE):
        path.unlink(missing_ok=True)
        path.with_suffix(".new").unlink(missing_ok=True)


def resumable(plan: Plan) -> Callable[[Path], bool]:
    """A test for folders: left by a killed run of the same request on the same source, with a finished layer."""
    key = run_key(plan)

    def same(folder: Path) -> bool:
        layers = _layers(folder, key)
        if layers is None and (folder / _NAME).is_file() and not plan.request.quiet:
            print(
                f"{opt('resume', True)}: the interrupted run here used different options, files, device, threads or "
                "versions; starting over",
                file=sys.stderr,
            )
        return bool(layers)

    return same


def run_key(plan: Plan) -> str:
    """A digest of everything that decides a run's bytes; files of weights count by their size and time."""
    import torch

    request, folder = plan.request, plan.checkpoint.folder
    names = {info.file for info in plan.checkpoint.tensors.values()} | {"config.json", "tokenizer.json"}
    files: list[list[Any]] = []
    for path in [*(folder / name for name in sorted(names)), *map(Path, request.texts)]:
        status = path.stat() if path.is_file() else None
        files.append([str(path)] if status is None else [str(path), status.st_size, status.st_mtime_ns])
    settings = {
        "options": request.result_options(),
        # Sums are in another order on another device, or with other threads or processes.
        "device": [request.device, torch.cuda.is_available(), torch.get_num_threads(), processes.count()],
        "versions": versions(),
        "shard": request.shard_bytes,
        "calibration": request.calibration,
        "files": files,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _layers(folder: Path, key: str) -> list[Any] | None:
    """The layers that the run ``key`` noted in ``folder``; None when the journal is another one, damaged or absent."""
    try:
        journal = json.loads((folder / _NAME).read_bytes())
        return list(journal["layers"]) if journal["run"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
