"""Safety check for ``--overwrite``: OUT must be a checkpoint, without other files of the user."""

import os
import re
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
)

# Code that save_pretrained, the hub and layout kvfold put next to weights
_CODE = re.compile(
    r"(modeling|configuration|tokenization|processing|image_processing|video_processing|feature_extraction)_\w+\.py"
)
# Some patterns of files that are passed on (vocab*, tokenizer*, *.model) fit a user's files too: of those only the
# names that transformers' tokenizers write are sure
_WIDE = re.compile(r"(vocab|tokenizer).*|.*\.model")
_TOKENIZER = re.compile(
    r"(vocab|tokenizer)(_config|[-_.](\d+|v\d+|src|tgt|source|target|tekken))?(\.(json|txt|bpe|model|jinja|v\d+))+"
    r"|(sentencepiece|spiece|spm|source|target)(\.bpe)?\.model"
)


def replaceable_problem(folder: Path) -> str | None:
    """The reason why ``--overwrite`` must not delete ``folder``; None if it may: it is empty, or a checkpoint.

    A checkpoint has weights or a ``kvfold.json``, and no file but those that belong to a checkpoint or that kvfold
    writes. Such files are known by name, or config.json lists their classes in ``auto_map``, or ``kvfold.json`` lists
    them.
    """
    names = sorted(os.listdir(folder))
    weights = {name for name in names if Path(name).suffix in WEIGHT_SUFFIXES}
    known = weights | {CONFIG, INDEX, LEGACY_INDEX, RECORD, "README.md", ".gitattributes"}
    extra = set(extra_names(names))
    known |= {name for name in extra if not _WIDE.fullmatch(name) or _TOKENIZER.fullmatch(name)}
    known |= {name for name in names if _CODE.fullmatch(name)}
    doubtful = {name for name in names if name in extra or name.endswith(".py")} - known
    if doubtful:
        known |= doubtful & _listed_files(folder)
    foreign = [name for name in names if name not in known or (folder / name).is_dir()]
    if foreign:
        return f"found {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}, which no checkpoint holds"
    if names and not weights and RECORD not in names:
        return f"found no weights but {', '.join(names[:3])}"
    return None


def _listed_files(folder: Path) -> set[str]:
    """The files that ``kvfold.json`` lists, and the modules of the classes in config.json's ``auto_map``."""

    def table(file: str, key: str) -> dict[str, Any]:
        value = json_beside(folder, file).get(key)
        return value if isinstance(value, dict) else {}

    classes = [
        name for value in table(CONFIG, "auto_map").values() for name in (value if isinstance(value, list) else [value])
    ]
    modules = {f"{name.rpartition('.')[0]}.py" for name in classes if isinstance(name, str)}
    return modules | table(RECORD, "files").keys()
