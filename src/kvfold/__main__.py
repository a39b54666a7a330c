"""Entry point of ``python -m kvfold``."""

from kvfold.convert.cli import main

if __name__ == "__main__":
    main()
