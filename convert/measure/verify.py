"""``kvfold verify``: check files against the hashes in ``kvfold.json``, and tensors against
config.json.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.files import parse_json
from kvfold.convert.checkpoint.folder import RECORD, read_member
from kvfold.convert.checkpoint.hashing import file_problems
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, short

# Elements of a tensor in memory at once.
_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Verification:
    """The numbers of files compared by hash (0 without ``kvfold.json``), tensors and elements; and
    all ``problems``.
    """

    origin: str
    files: int
    tensors: int
    elements: int
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def summary(self) -> str:
        """A one-line result for a checkpoint without problems."""
        hashed = (
            f"{self.files} files match {RECORD}"
            if self.files
            else f"no {RECORD} with hashes to compare files to"
        )
        sound = f"{self.tensors} tensors match config.json, all {self.elements:,} values are finite"
        return f"{self.origin}: {hashed}; {sound}"


def verify_checkpoint(out: str | os.PathLike[str]) -> Verification:
    """Compare a checkpoint with its record and its config; ``problems`` of the result name all that
    differs.

    Raises InputError when it cannot be opened at all.

    >>> verify_checkpoint(demo_folder()).problems
    []
    """
    try:
        opened = open_checkpoint(out)
    except InputError as error:
        # Of a checkpoint that kvfold wrote, say first which file changed since.
        files, problems = recorded_problems(Path(out)) if Path(out).is_dir() else (0, [])
        if not problems:
            raise
        return Verification(Path(out).name, files, 0, 0, [*problems, error.message, *error.details])
    # what cannot be opened is told without the seconds that torch takes
    from kvfold.convert.stream.parameters import WeightMap
    from kvfold.convert.stream.stock import empty_model

    with closing(opened) as checkpoint:
        files, problems = recorded_problems(checkpoint.folder)
        # The class of config.json takes every tensor as it is.
        problems += WeightMap(empty_model(checkpoint.config), checkpoint.tensors).misfits(
            checkpoint.tensors
        )
        problems += non_finite(checkpoint, checkpoint.tensors)
        elements = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        checkpoint.check_unchanged()
    return Verification(checkpoint.origin, files, len(checkpoint.tensors), elements, problems)


def check_verified(done: Verification) -> None:
    """Raises InputError with everything that differs."""
    if done.problems:
        found = f"{len(done.problems)} difference{'s' * (len(done.problems) > 1)}"
        rule = f"is not what {RECORD} and config.json say: {found}; make it again"
        raise InputError(f"{done.origin} {rule}", done.problems)


def non_finite(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[str]:
    """A line for every tensor among ``names`` with NaN or infinity in it; reads in bounded memory."""
    from kvfold.convert.checkpoint.tensors import count_non_finite

    for name in names:
        if bad := sum(map(count_non_finite, checkpoint.chunks(name, _ELEMENTS))):
            yield (
                f"tensor {name!r} in {checkpoint.info(name).file} has {bad} NaN or infinite"
                f" element{'s' * (bad != 1)}"
            )


def recorded_problems(folder: Path) -> tuple[int, list[str]]:
    """The number of files that the record has hashes of, and the differences from them."""
    path = folder / RECORD
    recorded = parse_json(path, read_member(folder, RECORD)) if os.path.lexists(path) else {}
    if (files := recorded.get("files")) is None:
        return 0, []
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        return 0, [f"{RECORD}: files must map names to hashes, not be {short(files)}"]
    return len(files), list(file_problems(folder, files))
