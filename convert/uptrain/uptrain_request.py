"""The options of ``kvfold uptrain``, validated without opening any file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfold.convert.options import (
    Request,
    device_option,
    option,
    seed_option,
    seq_len_option,
    trust_option,
)
from kvfold.convert.request import Device, TrainingDtype
from kvfold.convert.training.budget import BATCH_TOKENS

# Tokens per step from which on the learning rate no longer grows; the default on a GPU.
FULL_BATCH = 65536


@dataclass(frozen=True)
class UptrainRequest(Request):
    """The options of ``kvfold uptrain``, validated.

    Raises InputError, listing all problems, if values are invalid. Path objects are accepted and
    converted to strings.

    >>> files = {"model": "OUT", "out": "TRAINED", "text": "some.txt", "teacher": "MODEL"}
    >>> UptrainRequest(**files, batch_tokens=65536).sequences_per_step
    64
    """

    model: str = option(argument=True)
    out: str = option(argument=True, runs=True)
    text: str = option(
        help="Training text: .txt, .jsonl or a dataset name.", metavar="FILE|DATASET"
    )
    seq_len: int = seq_len_option(default=1024, help="Tokens per packed sequence.")
    # The seeds of numpy's generator, which transformers seeds, are below 2**32.
    seed: int = seed_option(
        help="Random seed for the order of the text and the held-out part.", maximum=2**32 - 1
    )
    teacher: str | None = option(
        None,
        "Checkpoint to distill from: the source of MODEL's conversion. Its predictions are then the"
        " target, instead of the text's next tokens.",
        metavar="MODEL",
    )
    steps: int = option(1000, "Number of optimizer steps.", minimum=1)
    batch_tokens: int | None = option(
        None,
        "Tokens per step, summed over all processes; a multiple of --seq-len. Default: about"
        f" {FULL_BATCH}, on a CPU {BATCH_TOKENS} for each process.",
        minimum=1,
    )
    relative_lr: float | None = option(
        None,
        "Peak learning rate (AdamW, cosine schedule) relative to the size of each tensor; default:"
        " follows the width and the batch.",
        metavar="RATE",
        rule="a number between 0 and 1",
        check=lambda value: 0 < value < 1,
    )
    weight_decay: float = option(
        0.0, "Weight decay (except biases and norms), times the learning rate.", maximum=100
    )
    clip: float = option(1.0, "Maximum gradient norm; 0 disables clipping.")
    eval_every: int = option(
        100,
        "Steps between drift measurements; 0 disables them.",
    )
    eval_sequences: int = option(64, "Number of held-out sequences.", minimum=1)
    log_every: int = option(10, "Steps between log rows.", minimum=1, runs=True)
    device: Device = device_option()
    precision: TrainingDtype = option(
        "auto",
        "Dtype of products; master weights stay float32. auto: bfloat16 for a model stored in 16"
        " bits on a device that multiplies it faster, measured.",
    )
    micro_batch: int | None = option(
        None,
        "Maximum sequences per device at a time; default: 4, on a CPU as many as hold"
        f" {BATCH_TOKENS} tokens.",
        minimum=1,
        runs=True,
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    save_every: int = option(200, "Steps between checkpoints; 0 disables them.", runs=True)
    fresh: bool = option(False, "Discard an interrupted run and start over.", runs=True)
    overwrite: bool = option(False, "Replace OUT.", runs=True)
    quiet: bool = option(False, "Do not print progress or a summary.", runs=True)
    trust_remote_code: bool = trust_option()

    def list_problems(self) -> Iterator[tuple[str, str]]:
        """Yield the field and the message of each problem that involves more than one option."""
        if self.batch_tokens is not None and self.batch_tokens % self.seq_len:
            yield (
                "batch_tokens",
                f"--batch-tokens must be a multiple of --seq-len {self.seq_len}, not"
                f" {self.batch_tokens}",
            )

    @property
    def sequences_per_step(self) -> int:
        """The number of sequences per optimizer step, summed over all processes. ``batch_tokens``
        must be set.
        """
        assert self.batch_tokens is not None
        return self.batch_tokens // self.seq_len

    @property
    def training_folder(self) -> Path:
        """The folder ``OUT.training``, which holds the checkpoints of the run."""
        out = Path(self.out)
        return out.with_name(out.name + ".training")
