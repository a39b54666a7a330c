"""Entry point of ``python -m kvfold``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, perhaps a checkpoint with a stranger's Python files
    from kvfold.convert.cli import main

    main()
