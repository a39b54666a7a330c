"""Files that ship with kvfold: a small trained model, and training, calibration and held-out text.

Made by ``recipes/demo/train_demo.py``; nothing here imports torch or transformers.
"""

import lzma
from functools import lru_cache
from pathlib import Path
from typing import Literal

ShippedText = Literal["train", "calibration", "held_out"]

_FOLDER = Path(__file__).parent
SEPARATOR = "\f"  # between two documents; occurs inside none


def demo_folder() -> Path:
    """The demo checkpoint: a complete model folder as ``save_pretrained`` writes it, plus
    ``training.json``.

    >>> demo_folder().name
    'demo'
    """
    return _FOLDER / "demo"


@lru_cache(maxsize=3)
def read_text(split: ShippedText) -> str:
    """All documents of a split, ``SEPARATOR`` between them. No document or paragraph is in two
    splits.
    """
    return lzma.decompress((_FOLDER / f"{split}.txt.xz").read_bytes()).decode()


def read_documents(split: ShippedText) -> list[str]:
    """The documents of a split: a page of Python's reference, or the docstrings and comments of one
    module, each.
    """
    return read_text(split).split(SEPARATOR)
