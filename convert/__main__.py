"""Entry point of ``python -m kvfold.convert``, which does the same as ``kvfold``."""

from kvfold.convert.cli import main

if __name__ == "__main__":
    main()
