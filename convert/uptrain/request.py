"""The options of uptraining, validated without opening a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvfold.convert.errors import opt
from kvfold.convert.options import Request, option, run_only
from kvfold.convert.request import Device
from kvfold.convert.sizes import size_expected

Trained = Literal["all", "attention"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, repr=False)
class UptrainRequest(Request):
    """The options of ``kvfold uptrain`` with underscores; its ``--help`` explains them.

    Raises InputError for impossible values; the message has all problems. Paths may be path objects; they become text.

    >>> UptrainRequest(model="OUT", out="TRAINED", text="some.txt", teacher="MODEL").sequences
    64
    """

    model: str = option(argument=True)
    out: str = option(argument=True, runs=True)
    text: str = option(help="Text: .txt, .jsonl, or a datasets name.", panel="Text", metavar="FILE|DATASET")
    eval_text: str | None = option(None, "Held-out text; default: some of --text is held out.", metavar="FILE|DATASET")
    seq_len: int = option(1024, "Tokens per packed sequence.", least=2)
    # The seeds of numpy's generator, which transformers seeds, are below 2**32.
    seed: int = option(0, "Draws the order of the text and the held-out part.", least=0, below=2**32)
    teacher: str | None = option(
        None, "Distill from this checkpoint: the one MODEL was converted from.", panel="Distillation", metavar="MODEL"
    )
    distill_weight: float | None = option(
        None,
        "Weight of the distillation in the loss, 0 to 1; default with --teacher: 1.",
        metavar="W",
        check=lambda value: None if 0 <= value <= 1 else "a number from 0 to 1",
    )
    temperature: float = option(
        1.0,
        "Temperature of both distributions in the distillation.",
        check=lambda value: None if value > 0 else "above 0",
    )
    train: Trained = option("all", "All weights, or those of attention only.", panel="Training")
    steps: int = option(1000, "Optimizer steps.", least=1)
    batch_tokens: int = option(65536, "Tokens per step, over all processes.")
    relative_lr: float | None = option(
        None,
        "Peak learning rate (AdamW) relative to the size of each tensor; default: 0.05 / sqrt(model width).",
        metavar="RATE",
        spellings=("--lr",),
        check=lambda value: None if 0 < value < 1 else "a number between 0 and 1",
    )
    schedule: Schedule = option("cosine", "Learning-rate schedule.")
    warmup: float = option(
        0.05,
        "Warmup, as a fraction of the steps.",
        check=lambda value: None if 0 <= value < 1 else "a fraction of the steps, 0 to below 1",
    )
    weight_decay: float = option(0.0, "Weight decay (not of biases and norms), times the learning rate.", least=0)
    clip: float = option(1.0, "Maximum gradient norm; 0: no clipping.", least=0)
    eval_every: int = option(
        100, "Steps between measurements of the drift; 0: none.", panel="Measurement", metavar="N", least=0
    )
    eval_sequences: int = option(64, "Held-out sequences.", least=1)
    log_every: int = option(10, "Steps between rows of the log.", metavar="N", least=1, runs=True)
    plot: str | None = option(
        None, "Curve to draw (PNG, SVG, PDF); default: OUT.training/curve.png.", metavar="FILE", runs=True
    )
    device: Device = option("auto", "auto: the GPU where there is one.", panel="Running", runs=True)
    precision: Precision = option(
        "auto", "Compute dtype; master weights stay float32. auto: bfloat16 on a GPU, float32 on a CPU."
    )
    micro_batch: int = option(4, "Sequences per device at once, at most.", least=1, runs=True)
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    save_every: int = option(200, "Steps between checkpoints; 0: none.", metavar="N", least=0, runs=True)
    max_shard_size: int | str = option("5GB", "Largest weight file.", metavar="SIZE", check=size_expected, runs=True)
    resume: bool = option(False, "Resume an interrupted run at its last checkpoint.", runs=True)
    overwrite: bool = option(False, "Replace OUT; without --resume also discard an interrupted run.", runs=True)
    quiet: bool = option(False, "No progress, no summary.", runs=True)
    trust_remote_code: bool = option(False, "Allow code in the checkpoint to run.", runs=True)

    def problems(self) -> Iterator[str]:
        if self.distill_weight is not None and self.teacher is None:
            yield f"{opt('distill_weight')} needs {opt('teacher')} to distill from; leave it out"
        whole = isinstance(self.batch_tokens, int) and isinstance(self.seq_len, int) and self.seq_len > 1
        if whole and (self.batch_tokens < 1 or self.batch_tokens % self.seq_len):
            multiple = f"a multiple of {opt('seq_len', self.seq_len)}"
            yield f"{opt('batch_tokens')} must be {multiple}, not {self.batch_tokens}"

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.batch_tokens // self.seq_len

    @property
    def distilled(self) -> float:
        """The weight of the distillation in the loss; the rest is the next token's."""
        if self.teacher is None:
            return 0.0
        return 1.0 if self.distill_weight is None else self.distill_weight

    @property
    def work(self) -> Path:
        """The folder of the run's log, curve, tokens and checkpoints, next to OUT."""
        out = Path(self.out)
        return out.with_name(out.name + ".training")

    def result_options(self) -> dict[str, Any]:
        """The options that decide the result, without those that only decide how it is run."""
        left_out = run_only(UptrainRequest)
        return {name: value for name, value in vars(self).items() if name not in left_out and value is not None}
