"""``kvfold verify``: check files against the hashes in ``kvfold.json``, and tensors against
config.json.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvfold.convert.checkpoint.digests import (
    find_changed_files,
    find_changed_tensors,
    read_hashes,
)
from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import has_non_finite
from kvfold.convert.errors import InputError


@dataclass(frozen=True)
class Verification:
    """The result of `verify_checkpoint`: what was compared, and every problem.

    origin: the name of the checkpoint.
    files: the number of files compared by hash; 0 without ``kvfold.json``.
    tensors, elements: the numbers of tensors and of their elements.
    problems: everything that differs, one line each.
    """

    origin: str
    files: int
    tensors: int
    elements: int
    problems: list[str]


def verify_checkpoint(out: str | os.PathLike[str]) -> Verification:
    """Compare the checkpoint ``out`` with the hashes in kvfold.json and with its config.json.
    ``problems`` of the result lists all differences.

    Raises InputError if it cannot be opened at all, or its kvfold.json has no hashes of tensors.

    >>> verify_checkpoint(demo_folder()).problems
    []
    """
    try:
        checkpoint = open_checkpoint(out)
    except InputError as error:
        # Of a checkpoint that kvfold wrote, say first which file changed since.
        folder = Path(out)
        files, _ = read_hashes(folder)
        problems = list(find_changed_files(folder, files)) if files else []
        if not problems:
            raise
        problems += [error.message, *error.details]
        return Verification(folder.name, len(files), 0, 0, problems)
    # what cannot be opened is told without the seconds that torch takes
    from kvfold.convert.stream.parameters import WeightMap
    from kvfold.convert.stream.stock import build_empty_model

    files, tensors = read_hashes(checkpoint.folder)
    if files and not tensors:
        raise InputError(
            f"{RECORD} has no hash of any tensor, because an older version of kvfold wrote it, so"
            " the weights cannot be compared with it; convert the model again"
        )
    problems = list(find_changed_files(checkpoint.folder, files)) if files else []
    # The class of config.json takes every tensor as it is.
    weights = WeightMap(build_empty_model(checkpoint.config), checkpoint.tensors)
    problems += weights.list_mismatches(checkpoint.tensors)
    for name, info in checkpoint.tensors.items():
        steps = checkpoint.read_bytes_as(name, info.dtype)
        if sum(has_non_finite(step, info.dtype) for step in steps):  # of all: they are hashed
            problems.append(f"tensor {name!r} in {info.file} has NaN or infinite elements")
    if files:
        problems += find_changed_tensors(checkpoint, tensors)
    checkpoint.check_unchanged()
    return Verification(
        origin=checkpoint.origin,
        files=len(files),
        tensors=len(checkpoint.tensors),
        elements=checkpoint.count_elements(),
        problems=problems,
    )
