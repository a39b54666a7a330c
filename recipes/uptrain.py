"""Uptraining for ``accelerate launch`` and ``torchrun``: the same as ``kvfold uptrain``.

    accelerate launch --config_file convert/data/fsdp.yaml recipes/uptrain.py MODEL OUT \\
        --teacher SOURCE --text FILE
    torchrun --nproc-per-node 8 recipes/uptrain.py MODEL OUT --teacher SOURCE --text FILE
"""

import sys

from kvfold.convert.cli import main

if __name__ == "__main__":
    main(["uptrain", *sys.argv[1:]])
