"""``python -m kvfold.convert.uptrain``, for ``torchrun`` and ``accelerate launch``: the command ``kvfold uptrain``."""

import sys
from typing import NoReturn

from kvfold.convert.console import run_command
from kvfold.convert.uptrain.request import INTERRUPTED, uptrain


def main() -> NoReturn:
    """Run the command line; exit status as that of ``kvfold``."""
    run_command(uptrain, "python -m kvfold.convert.uptrain", sys.argv[1:], INTERRUPTED)


if __name__ == "__main__":
    main()
