"""Files that ship with kvfold: a small trained model, and training, calibration and held-out text.

Made by ``recipes/demo/train_demo.py``; nothing here imports torch or transformers.
"""

import lzma
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

ShippedText = Literal["train", "calibration", "held_out"]

SEPARATOR = "\f"  # between two documents; occurs inside none


def demo_folder() -> Path:
    """The demo checkpoint: a complete model folder as ``save_pretrained`` writes it, plus ``training.json``.

    >>> demo_folder().name
    'demo'

    Raises:
        NotADirectoryError: kvfold was imported from an archive, where a checkpoint has no path.
    """
    folder = files(__name__) / "demo"
    if not isinstance(folder, Path):
        raise NotADirectoryError(
            f"kvfold must be installed as files for its demo checkpoint, found an archive: {folder}"
        )
    return folder


@lru_cache(maxsize=3)
def read_text(split: ShippedText) -> str:
    """All documents of a split, ``SEPARATOR`` between them. No document or paragraph is in two splits."""
    return lzma.decompress((files(__name__) / f"{split}.txt.xz").read_bytes()).decode()


def read_documents(split: ShippedText) -> list[str]:
    """The documents of a split: a page of Python's reference, or the docstrings and comments of one module, each."""
    return read_text(split).split(SEPARATOR)
