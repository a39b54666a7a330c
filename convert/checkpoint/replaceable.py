"""What ``--overwrite`` may throw away: a checkpoint, and no file of the user's own beside it."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.folder import (
    CONFIG,
    INDEX,
    LEGACY_INDEX,
    RECORD,
    WEIGHT_SUFFIXES,
    extra_names,
    json_beside,
    module_names,
)

# Code that save_pretrained, the hub and kvfold's own layouts put beside weights
_CODE = re.compile(
    r"(modeling|configuration|tokenization|processing|image_processing|video_processing|feature_extraction)_\w+\.py"
)
# Files are passed on by wide patterns (vocab*, tokenizer*, *.model), which a user's own files fit too: of those only
# what tokenizers of transformers call theirs
_WIDE = re.compile(r"(vocab|tokenizer).*|.*\.model")
_TOKENIZER = re.compile(
    r"(vocab|tokenizer)(_config|[-_.](\d+|v\d+|src|tgt|source|target|tekken))?(\.(json|txt|bpe|model|jinja|v\d+))+"
    r"|(sentencepiece|spiece|spm|source|target)(\.bpe)?\.model"
)


def replaceable_problem(folder: Path) -> str | None:
    """Why ``folder`` must not be thrown away for a new checkpoint, None when it is one, or empty.

    A checkpoint has weights or a ``kvfold.json``, and nothing that neither a checkpoint holds nor kvfold writes.
    """
    modules = module_names(folder)
    whole = {part for part in {name.rpartition("/")[0] for name in modules} - {""} if _is_whole(folder, part, modules)}
    names = sorted({*os.listdir(folder)} - whole)
    weights = [name for name in names if Path(name).suffix in WEIGHT_SUFFIXES]
    own = {CONFIG, INDEX, LEGACY_INDEX, RECORD, "README.md", ".gitattributes", *weights, *modules}
    own |= _side_files(folder, names)
    foreign = [name for name in names if name not in own or (folder / name).is_dir()]
    if foreign:
        return f"found {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}, which no checkpoint holds"
    if names and not weights and RECORD not in names:
        return f"found no weights but {', '.join(names[:3])}"
    return None


def _is_whole(folder: Path, part: str, modules: Iterable[str]) -> bool:
    """Whether the folder ``part`` holds nothing but files of ``modules``."""
    return {f"{part}/{name}" for name in os.listdir(folder / part)} <= {*modules}


def _side_files(folder: Path, names: Iterable[str]) -> set[str]:
    """The code and the files of tokenizers that belong to the checkpoint, licenses and the like.

    Such names are known, or config.json has the code in ``auto_map``, or ``kvfold.json`` says that kvfold wrote them.
    """
    extra, code = set(extra_names(names)), {name for name in names if name.endswith(".py")}
    sure = {name for name in extra if not _WIDE.fullmatch(name) or _TOKENIZER.fullmatch(name)}
    sure |= {name for name in code if _CODE.fullmatch(name)}
    doubtful = (extra | code) - sure
    return sure | (doubtful & _named(folder)) if doubtful else sure


def _named(folder: Path) -> set[str]:
    """The files that ``kvfold.json`` lists, and those of the classes in config.json's ``auto_map``."""
    written, classes = _table(folder, RECORD, "files"), _table(folder, CONFIG, "auto_map").values()
    each = [name for value in classes for name in (value if isinstance(value, list) else [value])]
    return {*written, *(f"{name.rpartition('.')[0]}.py" for name in each if isinstance(name, str))}


def _table(folder: Path, file: str, key: str) -> dict[str, Any]:
    """The table ``key`` of a JSON file, empty where there is none."""
    found = json_beside(folder, file).get(key)
    return found if isinstance(found, dict) else {}
