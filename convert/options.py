"""Options of commands and functions, declared once as fields of a frozen dataclass.

A request such as ``ConvertRequest`` is a ``Request`` whose fields are created by ``option``. A
field's annotation sets its type and its choices, its metadata everything else. From these options
(``collect_options``) come the command line (``console.request_options``), the validation of values,
recipes, records and the keywords of public functions.

    samples: int = option(128, "Calibration sequences.", minimum=1)
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvfold.convert.errors import InputError, format_option, option_error, suggest_name

# Tokens of a sequence with --seq-len auto: measured in convert/README.md, "The loss by position".
AUTO_LENGTH = 512
# Whole numbers that Python reads quickly, in the digits of a keyboard: int() also takes those of
# other scripts.
_DIGITS = "[0-9]{1,18}"
_TYPE_RULES = {
    bool: "true or false",
    int: "a whole number of at least {}",
    float: "a number of at least {}",
    str: "text",
}


@dataclass(frozen=True)
class Option:
    """One option of a request. Its field sets the first attributes by `option`; `collect_options`
    derives the others from the annotation and the default.

    Attributes:
        help: Text for ``--help``.
        panel: Heading in ``--help`` for this option and the following ones.
        metavar: Name of the value in ``--help``.
        aliases: Further spellings on the command line.
        minimum: Smallest number.
        maximum: Largest number. Products of a few defaults fit the 63 bits of torch's sizes.
        check: Whether a value of the right type is valid.
        rule: The valid types and range in words that follow "must be".
        targets: Values of ``to`` that allow this option; empty for all.
        runs: The option only says where and how to run: it is not in recipes and records.
        argument: Positional on the command line.
        multiple: An option with a tuple that is repeated, instead of taking one text with commas.
        name: Name of the field.
        default: Its default, or ``MISSING``.
        types: Accepted types among bool, int, float and str.
        choices: Accepted words, of a ``Literal``.
        item_type: Type of a tuple's items; None if the value is no tuple.
    """

    help: str = ""
    panel: str | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    minimum: float = 0
    maximum: float = 2**31
    check: Callable[[Any], object] | None = None
    rule: str | None = None
    targets: tuple[str, ...] = ()
    runs: bool = False
    argument: bool = False
    multiple: bool = False

    name: str = ""
    default: Any = None
    types: tuple[type, ...] = ()
    choices: tuple[str, ...] = ()
    item_type: type | None = None

    def normalize(self, value: Any) -> Any:
        """``value`` as a request stores it: paths as text, lists as tuples, digits as numbers."""
        if self.item_type is None:
            return self._normalize_item(value)
        if isinstance(value, str) and not (self.argument or self.multiple):
            value = [item.strip() for item in value.split(",") if item.strip()]
        if not isinstance(value, (list, tuple)):
            value = [] if value is None else [value]
        return tuple(dict.fromkeys(map(self._normalize_item, value)))

    def _normalize_item(self, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        # A number of steps may also be a word, so the command line passes it as text.
        counts = self.item_type is int or (self.choices and int in self.types)
        return int(value) if counts and re.fullmatch(_DIGITS, str(value)) else value

    def broken_rule(self, value: Any) -> str | None:
        """The rule that ``value`` breaks, in words that follow "must be"; None if it is valid."""
        if value is None and self.default is None:
            return None
        if self.item_type is not None:
            valid = all(type(item) is self.item_type and str(item).strip() for item in value)
            return None if valid and 0 not in value else self.rule
        if isinstance(value, str) and value in self.choices:
            return None
        if not self.types:
            return f"one of {', '.join(self.choices)}{suggest_name(value, self.choices)}"
        rule = self.rule or _TYPE_RULES[self.types[0]].format(self.minimum)
        # Compared exactly, because isinstance accepts True as an int.
        if type(value) not in self.types and not (type(value) is int and float in self.types):
            return rule
        if type(value) in (int, float) and not self.minimum <= value <= self.maximum:
            return f"at most {self.maximum}" if value > self.maximum else rule
        return None if self.check is None or self.check(value) else rule


def option(default: Any = MISSING, help: str = "", **details: Any) -> Any:
    """A dataclass field with the attributes of ``Option``; without ``default`` the option is
    required.
    """
    return field(default=default, metadata={"option": Option(help, **details)})


# Options of several requests; a request passes keywords for what differs.
seq_len_option = partial(option, default=512, help="Tokens per sequence.", minimum=2)
seed_option = partial(
    option, default=0, help="Seed for drawing sequences.", minimum=0, maximum=2**63 - 1
)
device_option = partial(
    option, default="auto", help="Device to compute on; auto: a GPU if there is one.", runs=True
)
dtype_option = partial(option, default="auto", help="Dtype to compute in.")
trust_option = partial(
    option, default=False, help="Allow code in the checkpoints to run.", runs=True
)
length_option = partial(
    option,
    "auto",
    f"Tokens per sequence; auto: {AUTO_LENGTH}, or MODEL's context, if it is shorter, in as many"
    f" sequences as hold SAMPLES x {AUTO_LENGTH} tokens.",
    metavar="N|auto",
    minimum=2,
    rule="a whole number of at least 2, or auto",
)
steps_option = partial(option, 0, metavar="STEPS|auto", rule="a number of steps or auto")
precision_option = partial(
    option,
    "auto",
    "Dtype of products in calibration passes and training; auto: the faster, measured. Held-out"
    " text: float32.",
)


def collect_options(request: type[Any]) -> dict[str, Option]:
    """The options of a request by name, in field order."""
    hints = get_type_hints(request)
    options: dict[str, Option] = {}
    panel = None
    for declared in fields(request):
        spec: Option = declared.metadata["option"]
        panel = spec.panel or panel
        spec = replace(spec, panel=panel, name=declared.name, default=declared.default)
        for member in get_args(hints[declared.name] | None):
            if get_origin(member) is Literal:
                spec = replace(spec, choices=get_args(member))
            elif get_origin(member) is tuple:
                spec = replace(spec, item_type=get_args(member)[0])
            elif member in _TYPE_RULES:
                spec = replace(spec, types=(*spec.types, member))
        options[declared.name] = spec
    return options


def list_run_options(request: type) -> frozenset[str]:
    """Names of the options that only say where and how to run and do not change the result."""
    return frozenset(name for name, spec in collect_options(request).items() if spec.runs)


class Request:
    """Base class of requests. Raises one InputError with the problem of every invalid value, or, if
    all values are valid, of every invalid combination.
    """

    def __post_init__(self) -> None:
        options = collect_options(type(self))
        for name, spec in options.items():
            object.__setattr__(self, name, spec.normalize(getattr(self, name)))
        problems = list(value_problems(options, vars(self))) or list(self.problems())
        if problems:
            field, message = problems[0]
            raise InputError(message, [further for _, further in problems[1:]], field=field)

    def problems(self) -> Iterable[tuple[str, str]]:
        """A field and a sentence for each combination of valid values that is not allowed."""
        return ()

    def non_defaults(self) -> dict[str, Any]:
        """The options whose values differ from their defaults."""
        return {
            name: vars(self)[name]
            for name, spec in collect_options(type(self)).items()
            if vars(self)[name] != spec.default
        }


def value_problems(
    options: Mapping[str, Option], values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """A field and a sentence for each value that its option does not accept."""
    for name, value in values.items():
        if name in options and (rule := options[name].broken_rule(value)) is not None:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            option_name = name.upper() if options[name].argument else format_option(name)
            yield name, f"{option_name} must be {rule}, not {shown}"


def missing_gpu_error() -> InputError:
    """The error of ``--device cuda`` on a machine without a GPU."""
    rule = ": torch finds no CUDA device on this machine; use --device cpu or auto"
    return option_error("device", "cuda", rule)


def format_argv(values: Mapping[str, Any]) -> list[str]:
    """Option values as words of a command line, such as ``["--to", "gqa", "--kv-heads", "4"]``."""
    argv: list[str] = []
    for name, value in values.items():
        for item in value if isinstance(value, tuple) else (value,):
            argv.append(format_option(name))
            if item is not True:
                argv.append(str(item))
    return argv
