"""The options of uptraining, validated without opening a file."""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvfold.convert.errors import InputError
from kvfold.convert.request import DEVICES, Device
from kvfold.convert.sizes import size_expected

Trained = Literal["all", "attention"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]

TRAINED: tuple[str, ...] = get_args(Trained)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
PRECISIONS: tuple[str, ...] = get_args(Precision)

_CHOICES = {"train": TRAINED, "schedule": SCHEDULES, "precision": PRECISIONS, "device": DEVICES}
# Options that do not change the result: a run may be resumed with other values of them.
_RUN_ONLY = {
    *("out", "micro_batch", "log_every", "save_every", "plot", "device", "max_shard_size"),
    *("resume", "overwrite", "quiet", "trust_remote_code"),
}


@dataclass(frozen=True)
class UptrainRequest:
    """The options of ``kvfold uptrain`` with underscores; its ``--help`` explains them.

    Raises InputError for impossible values; the message has all problems. Paths may be path objects; they become text.

    >>> UptrainRequest(model="OUT", out="TRAINED", text="some.txt", teacher="MODEL").sequences
    64
    """

    model: str
    out: str
    text: str
    eval_text: str | None = None
    teacher: str | None = None
    distill_weight: float | None = None
    temperature: float = 1.0
    train: Trained = "all"
    steps: int = 1000
    batch_tokens: int = 65536
    seq_len: int = 1024
    micro_batch: int = 4
    relative_lr: float | None = None
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    device: Device = "auto"
    eval_every: int = 100
    eval_sequences: int = 64
    log_every: int = 10
    save_every: int = 200
    plot: str | None = None
    max_shard_size: str = "5GB"
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "out", "text", "eval_text", "teacher", "plot"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        problems = [*_choice_problems(self), *_least_problems(self), *_other_problems(self)]
        if problems:
            raise InputError(problems[0], problems[1:])

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
        """The folder of the run's log, curve, tokens and checkpoints, beside OUT."""
        out = Path(self.out)
        return out.with_name(out.name + ".training")

    def result_options(self) -> dict[str, Any]:
        """The options that decide the result, without those that only decide how it is run."""
        return {name: value for name, value in asdict(self).items() if name not in _RUN_ONLY and value is not None}


def _choice_problems(request: UptrainRequest) -> list[str]:
    values = {name: getattr(request, name) for name in _CHOICES}
    return [
        f"{option(name)}: expected {', '.join(_CHOICES[name])}, found {value}"
        for name, value in values.items()
        if value not in _CHOICES[name]
    ]


def _least_problems(request: UptrainRequest) -> list[str]:
    """Numbers that are too small."""
    least = {"steps": 1, "seq_len": 2, "micro_batch": 1, "log_every": 1, "eval_every": 0, "eval_sequences": 1}
    least |= {"save_every": 0, "seed": 0, "weight_decay": 0, "clip": 0}
    values = {name: getattr(request, name) for name in least}
    return [
        f"{option(name)}: expected {least[name]} or more, found {value}"
        for name, value in values.items()
        if not value >= least[name]
    ]


def _other_problems(request: UptrainRequest) -> list[str]:
    problems = []
    if request.seed >= 2**32:  # what numpy's generator takes, which transformers seeds
        problems.append(f"--seed: expected a number below 2**32, found {request.seed}")
    if (wanted := size_expected(request.max_shard_size)) is not None:
        problems.append(f"--max-shard-size: expected {wanted}, found {request.max_shard_size!r}")
    if request.relative_lr is not None and not 0 < request.relative_lr < 1:
        problems.append(f"--relative-lr: expected a number between 0 and 1, found {request.relative_lr}")
    if not 0 <= request.warmup < 1:
        problems.append(f"--warmup: expected a fraction of the steps, 0 to below 1, found {request.warmup}")
    if not request.temperature > 0:
        problems.append(f"--temperature: expected more than 0, found {request.temperature}")
    if not 0 <= request.distilled <= 1:
        problems.append(f"--distill-weight: expected 0 to 1, found {request.distilled}")
    if request.distill_weight is not None and request.teacher is None:
        problems.append("--distill-weight: expected a --teacher to distill from, found none")
    if request.seq_len > 1 and (request.batch_tokens < 1 or request.batch_tokens % request.seq_len):
        problems.append(
            f"--batch-tokens: expected a multiple of --seq-len {request.seq_len}, found {request.batch_tokens}"
        )
    return problems


def option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def changed(before: dict[str, Any], request: UptrainRequest) -> str | None:
    """The first option that differs from those of the run being resumed, as a sentence, or None."""
    now = request.result_options()
    for name in (field.name for field in fields(request)):
        old, new = (options.get(name, "absent") for options in (before, now))
        if old != new:
            return f"{option(name)} is {new}, but the run being resumed was started with {old}"
    return None
