"""``python -m kvfold.convert`` is the same as ``kvfold``."""

from kvfold.convert.cli import main

if __name__ == "__main__":
    main()
