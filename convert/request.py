"""What a person asks of a conversion, validated on its own: no checkpoint is opened and torch is not imported here."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from kvfold.convert.errors import InputError
from kvfold.convert.sizes import parse_size

Target = Literal["gqa", "mqa", "mla"]

TARGETS = ("gqa", "mqa", "mla")
FOLD_METHODS = ("principal", "mean", "first", "random")
MLA_METHODS = ("principal", "svd")
WEIGHTS_ONLY = frozenset({"mean", "first", "random", "svd"})
GROUPINGS = ("similar", "contiguous")
LAYOUTS = ("deepseek", "engine", "kvfold")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")

# the smallest value of each option that is a whole number
LEAST = {
    "kv_heads": 1,
    "kv_rank": 1,
    "rope_dim": 0,
    "budget": 4,
    "q_rank": 1,
    "samples": 1,
    "seq_len": 2,
    "seed": 0,
}


@dataclass(frozen=True)
class ConvertRequest:
    """One conversion. Field names are the options of ``kvfold convert`` with underscores.

    ``method`` and ``group`` left at None take the best there is for the target (see ``resolved_method``); ``refine``
    is a number of steps per layer or ``"auto"``. Raises InputError when the values cannot go together.
    """

    model: str
    out: str
    to: Target
    kv_heads: int | None = None
    method: str | None = None
    group: str | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    budget: int | None = None
    q_rank: int | None = None
    layout: str | None = None
    calibration: str | None = None
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    refine: int | str = 0
    device: str = "auto"
    dtype: str = "auto"
    max_shard_size: int | str = "5GB"
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    allow_growth: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = [
            *_path_problems(self),
            *_choice_problems(self),
            *_number_problems(self),
            *_combination_problems(self),
        ]
        if problems:
            raise InputError(problems[0], problems[1:])
        object.__setattr__(self, "max_shard_size", parse_size(self.max_shard_size))

    @property
    def resolved_method(self) -> str:
        return self.method or "principal"

    @property
    def calibrated(self) -> bool:
        """Whether the conversion reads text: it walks the model over calibration tokens."""
        return self.resolved_method not in WEIGHTS_ONLY or bool(self.refine)

    @property
    def shard_bytes(self) -> int:
        return int(self.max_shard_size)

    def result_options(self) -> dict[str, Any]:
        """The options that decide the result, without those that only say where and how to run."""
        left_out = {"model", "out", "device", "dry_run", "resume", "overwrite", "quiet", "calibration"}
        left_out |= {"allow_growth", "trust_remote_code"}  # they permit a result and do not change it
        if not self.calibrated and self.resolved_method != "random":
            left_out.add("seed")
        if not self.calibrated:
            left_out |= {"samples", "seq_len", "refine"}
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {name: value for name, value in options.items() if value is not None} | {"method": self.resolved_method}


def _path_problems(request: ConvertRequest) -> list[str]:
    """An empty name, as an unset shell variable gives, would mean the current folder, which --overwrite replaces."""
    return [
        f"{name.upper()}: expected {expected}, found an empty name; is a shell variable unset?"
        for name, expected in (("model", "a folder or a hub id"), ("out", "a folder to write"))
        if not str(getattr(request, name)).strip()
    ]


def _choice_problems(request: ConvertRequest) -> list[str]:
    methods = MLA_METHODS if request.to == "mla" else FOLD_METHODS
    choices = {
        "to": (request.to, TARGETS),
        "method": (request.method, methods),
        "group": (request.group, GROUPINGS),
        "layout": (request.layout, LAYOUTS),
        "device": (request.device, DEVICES),
        "dtype": (request.dtype, DTYPES),
    }
    where = {"method": f" with --to {request.to}"}
    return [
        f"--{name}{where.get(name, '')}: expected one of {', '.join(allowed)}, found {value!r}"
        for name, (value, allowed) in choices.items()
        if value is not None and value not in allowed
    ]


def _number_problems(request: ConvertRequest) -> list[str]:
    problems = []
    for name, low in LEAST.items():
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            problems.append(f"{_option(name)}: expected a whole number of at least {low}, found {value!r}")
    if isinstance(request.seed, int) and request.seed >= 2**63:
        problems.append(f"--seed: expected a number below 2**63, found {request.seed}")
    refine = request.refine
    if refine != "auto" and (isinstance(refine, bool) or not isinstance(refine, int) or refine < 0):
        problems.append(f"--refine: expected a number of steps or auto, found {refine!r}")
    return problems


def _combination_problems(request: ConvertRequest) -> list[str]:
    problems = []
    if request.to == "gqa" and request.kv_heads is None:
        problems.append("--to gqa needs --kv-heads: the number of key/value heads to keep; `kvfold inspect` lists them")
    if request.to != "gqa" and request.kv_heads is not None:
        problems.append(f"--kv-heads goes with --to gqa, found --to {request.to}: leave it out, or use --to gqa")
    if request.to == "mla":
        problems += _mla_problems(request)
    else:
        problems += [
            f"{_option(name)} goes with --to mla, found --to {request.to}: leave it out, or use --to mla"
            for name in ("kv_rank", "rope_dim", "budget", "q_rank", "layout")
            if getattr(request, name) is not None
        ]
        if request.group == "similar" and request.resolved_method in WEIGHTS_ONLY:
            problems.append(
                f"--group similar needs --method principal, found --method {request.resolved_method}, which reads no "
                "text to judge a grouping by: leave --group out, or use --method principal"
            )
    if not request.calibrated and request.calibration is not None:
        problems.append(
            f"--calibration: --method {request.resolved_method} without --refine reads no text: "
            "leave it out, or use --method principal"
        )
    return problems


def _mla_problems(request: ConvertRequest) -> list[str]:
    problems = []
    split = (request.kv_rank is not None, request.rope_dim is not None)
    if request.budget is not None and any(split):
        problems.append("--budget chooses --kv-rank and --rope-dim itself: give either --budget or the other two")
    if request.budget is None and not all(split):
        problems.append("--to mla needs --kv-rank and --rope-dim (numbers cached per token and layer), or --budget")
    if request.group is not None:
        problems.append("--group goes with --to gqa or mqa, found --to mla: leave it out")
    if request.layout == "kvfold":
        problems.append("--layout kvfold does not exist yet: use --layout deepseek or --layout engine")
    if request.layout == "engine" and request.method == "svd":
        problems.append("--layout engine calibrates the latent's norm on text: use --method principal, found svd")
    if request.budget is not None and request.method == "svd":
        problems.append("--budget chooses by measured drift and needs --method principal, found --method svd")
    return problems


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
