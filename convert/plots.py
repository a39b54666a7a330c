"""What all plots need before anything is measured: matplotlib, and a file that can be written."""

from importlib.util import find_spec
from pathlib import Path

from kvfold.convert.errors import InputError

_KINDS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raises InputError before a long run rather than after it when its plot could not be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError(f"--plot {path}: matplotlib is not installed; install it with: pip install 'kvfold[report]'")
    if Path(path).suffix not in _KINDS:
        raise InputError(f"--plot {path}: expected a file that ends in {', '.join(_KINDS)}")
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"--plot {path}: cannot be written: name a file in a folder that exists")
