"""The options of a conversion and the values that they take. No checkpoint is opened, torch is not imported."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kvfold.convert.errors import InputError, did_you_mean
from kvfold.convert.sizes import parse_size, size_expected

Target = Literal["gqa", "mqa", "mla"]
MethodName = Literal["principal", "mean", "first", "random", "svd"]
Grouping = Literal["similar", "contiguous"]
Layout = Literal["free", "engine", "kvfold"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TARGETS: tuple[str, ...] = get_args(Target)
METHODS: tuple[str, ...] = get_args(MethodName)
GROUPINGS: tuple[str, ...] = get_args(Grouping)
LAYOUTS: tuple[str, ...] = get_args(Layout)
DEVICES: tuple[str, ...] = get_args(Device)
DTYPES: tuple[str, ...] = get_args(Dtype)

DEFAULT_LAYOUT: Layout = "free"

SELF = "self"  # --calibration: the source writes the text
WEIGHTS_ONLY = frozenset({"mean", "first", "random", "svd"})
# Options that name the source and OUT, which records name otherwise, or say how to run: no part of a recipe.
RUN_ONLY = frozenset(
    (
        "model",
        "out",
        "device",
        "spill",
        "dry_run",
        "resume",
        "overwrite",
        "quiet",
        "allow_growth",
        "trust_remote_code",
    )
)
# The targets that an option belongs to; all others belong to every target.
GOES_WITH: dict[str, tuple[str, ...]] = {"kv_heads": ("gqa",), "group": ("gqa", "mqa")} | dict.fromkeys(
    ("kv_rank", "rope_dim", "budget", "q_rank", "layout", "rotate_latent"), ("mla",)
)

_CHOICES = {
    "to": TARGETS,
    "method": METHODS,
    "group": GROUPINGS,
    "layout": LAYOUTS,
    "device": DEVICES,
    "dtype": DTYPES,
}
_LEAST = {
    "kv_heads": 1,
    "kv_rank": 1,
    "rope_dim": 0,
    "budget": 4,
    "q_rank": 1,
    "samples": 1,
    "seq_len": 2,
    "seed": 0,
}


def held_out_count(samples: int) -> int:
    """Held-out sequences beside ``samples`` calibration sequences: an eighth, at least 8."""
    return max(8, math.ceil(samples / 8))


@dataclass(frozen=True)
class ConvertRequest:
    """One conversion. Field names are the options of ``kvfold convert`` with underscores.

    ``method`` and ``group`` left at None take the best there is for the target (see ``resolved_method``); ``refine`` is
    a number of steps per layer, ``polish`` one of steps of all layers together, or each ``"auto"``. ``keep_quantized``
    leaves weights that are only copied as a quantized source has them, ``spill`` is the folder of a file for hidden
    states. ``calibration`` may be several texts, which are mixed in equal shares. Paths may be path objects; they
    become text. Raises InputError, with every problem at once.

    >>> ConvertRequest(model="MODEL", out="OUT", to="gqa", kv_heads=8)
    ConvertRequest(model='MODEL', out='OUT', to='gqa', kv_heads=8)
    """

    model: str
    out: str
    to: Target
    kv_heads: int | None = None
    method: MethodName | None = None
    group: Grouping | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    budget: int | None = None
    q_rank: int | None = None
    layout: Layout | None = None
    rotate_latent: bool = False
    calibration: str | tuple[str, ...] | None = None
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    refine: int | Literal["auto"] = 0
    polish: int | Literal["auto"] = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    keep_quantized: bool = False
    max_shard_size: int | str = "5GB"
    spill: str | None = None
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    allow_growth: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "out", "calibration", "spill"):
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        problems = [*_path_problems(self), *_value_problems(self), *_combination_problems(self)]
        if problems:
            raise InputError(problems[0], problems[1:])
        object.__setattr__(self, "max_shard_size", parse_size(self.max_shard_size))

    def __repr__(self) -> str:
        """What is not at its default."""
        plain = {field.name: field.default for field in fields(self)}
        plain["max_shard_size"] = parse_size("5GB")
        given = {name: getattr(self, name) for name, default in plain.items() if getattr(self, name) != default}
        return f"ConvertRequest({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def resolved_method(self) -> MethodName:
        return self.method or "principal"

    @property
    def resolved_layout(self) -> Layout:
        """The layout of an MLA result. Without text there is nothing to calibrate layout ``engine`` on."""
        return self.layout or ("free" if self.method == "svd" else DEFAULT_LAYOUT)

    @property
    def calibrated(self) -> bool:
        """Whether the conversion runs the model over calibration text."""
        return self.resolved_method not in WEIGHTS_ONLY or bool(self.refine) or bool(self.polish)

    @property
    def texts(self) -> tuple[str, ...]:
        """The names in ``calibration``."""
        if self.calibration is None or isinstance(self.calibration, str):
            return () if self.calibration is None else (self.calibration,)
        return self.calibration

    @property
    def shard_bytes(self) -> int:
        return int(self.max_shard_size)

    def result_options(self) -> dict[str, Any]:
        """The options that decide the result, without those that only say where and how to run."""
        left_out = {*RUN_ONLY, "calibration"}
        if not self.calibrated and self.resolved_method != "random":
            left_out.add("seed")
        if not self.calibrated:
            left_out |= {"samples", "seq_len", "refine", "polish"}
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        resolved = {"method": self.resolved_method} | ({"layout": self.resolved_layout} if self.to == "mla" else {})
        return {name: value for name, value in options.items() if _given(value)} | resolved


def expected(name: str, value: Any) -> str | None:
    """The values that option ``name`` takes, in words, when ``value`` is none of them; None when it is one."""
    if name == "layout" and value == "deepseek":
        return "free, the present name of this layout"
    if name in _CHOICES:
        allowed = _CHOICES[name]
        return None if value in allowed else f"one of {', '.join(allowed)}{did_you_mean(value, allowed)}"
    if name in _LEAST:
        if not _is_whole(value, _LEAST[name]):
            return f"a whole number of at least {_LEAST[name]}"
        return "a number below 2**63" if name == "seed" and value >= 2**63 else None
    if name in ("refine", "polish"):
        return None if value == "auto" or _is_whole(value, 0) else "a number of steps or auto"
    if name == "max_shard_size":
        return size_expected(value)
    if name in ("rotate_latent", "keep_quantized"):
        return None if isinstance(value, bool) else "true or false"
    if name == "calibration":
        return _calibration_expected(value if isinstance(value, (list, tuple)) else [value])
    return None


def check_values(**options: Any) -> None:
    """Raises InputError for the first of ``options`` whose value is none that it takes."""
    for name, value in options.items():
        if (description := expected(name, value)) is not None:
            raise InputError(f"{_option(name)}: expected {description}, found {value!r}")


def _calibration_expected(names: Sequence[Any]) -> str | None:
    if not all(isinstance(name, str) and name.strip() for name in names):
        return "the name of a text file or dataset"
    if len(set(names)) < len(names):
        return "different texts"
    return f"either {SELF} or names of texts" if SELF in names and len(names) > 1 else None


def _as_text(value: Any) -> Any:
    """Path objects as text, also in a list, which becomes a tuple; one without elements is None, with one its own."""
    if isinstance(value, (list, tuple)):
        texts = tuple(map(_as_text, value))
        return texts if len(texts) > 1 else next(iter(texts), None)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _given(value: Any) -> bool:
    """Whether an option has a value: neither None nor a flag that is not set."""
    return value is not None and value is not False


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _path_problems(request: ConvertRequest) -> Iterator[str]:
    """An empty name, as an unset shell variable gives, would mean the current folder, which --overwrite replaces."""
    for name, description in (("model", "a folder or a hub id"), ("out", "a folder to write")):
        if not str(getattr(request, name)).strip():
            yield f"{name.upper()}: expected {description}, found an empty name; is a shell variable unset?"


def _value_problems(request: ConvertRequest) -> Iterator[str]:
    for field in fields(request):
        value = getattr(request, field.name)
        description = None if value is None and field.default is None else expected(field.name, value)
        if field.name == "method" and value is not None and value not in methods_of(request.to):
            allowed = methods_of(request.to)
            meant = did_you_mean(value, allowed)
            yield f"--method with --to {request.to}: expected one of {', '.join(allowed)}, found {value!r}{meant}"
        elif description is not None:
            found = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
            yield f"{_option(field.name)}: expected {description}, found {found}"


def methods_of(to: str | None) -> tuple[str, ...]:
    """The methods of a target."""
    return ("principal", "svd") if to == "mla" else ("principal", "mean", "first", "random")


def _combination_problems(request: ConvertRequest) -> Iterator[str]:
    to, method = request.to, request.resolved_method
    if to == "gqa" and request.kv_heads is None:
        yield "--to gqa needs --kv-heads: the number of key/value heads to keep; `kvfold inspect` lists them"
    for name, targets in GOES_WITH.items():
        if to not in targets and _given(value := getattr(request, name)) and value != "kvfold":
            some = " or ".join(targets)
            yield f"{_option(name)} goes with --to {some}, found --to {to}: leave it out, or use --to {some}"
    if to == "mla":
        yield from _mla_problems(request)
    elif request.group == "similar" and method in WEIGHTS_ONLY:
        yield (
            f"--group similar needs --method principal, found --method {method}, which reads no text to judge a "
            "grouping by: leave --group out, or use --method principal"
        )
    if request.keep_quantized and request.dtype not in ("auto", "bfloat16"):
        yield f"--keep-quantized goes with bfloat16, not with --dtype {request.dtype}: leave one of the two out"
    if not request.calibrated and request.calibration is not None:
        yield (
            f"--calibration: --method {method} without --refine or --polish reads no text: leave it out, or use "
            "--method principal"
        )
    if not request.calibrated and request.spill is not None:
        yield (
            f"--spill: --method {method} without --refine or --polish runs no model and has no hidden states to keep: "
            "leave it out"
        )


def _mla_problems(request: ConvertRequest) -> Iterator[str]:
    split = (request.kv_rank is not None, request.rope_dim is not None)
    if request.budget is not None and any(split):
        yield "--budget chooses --kv-rank and --rope-dim itself: give either --budget or the other two"
    if request.budget is None and not all(split):
        yield "--to mla needs --kv-rank and --rope-dim (KV-cache elements per token per layer), or --budget"
    if request.layout == "engine" and request.method == "svd":
        yield "--layout engine calibrates the latent's norm on text: use --method principal, found svd"
    if request.rotate_latent and request.resolved_layout == "engine":
        yield (
            "--rotate-latent: the live norm of layout engine asks for coordinates of its own, in which weak channels "
            "count most: mixed with the others, they lose more in an FP8 cache than as they are; leave it out, or use "
            "--layout free"
        )
    if request.budget is not None and request.method == "svd":
        yield "--budget chooses by measured drift and needs --method principal, found --method svd"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
