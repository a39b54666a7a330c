"""Options of commands and functions, declared once as fields of a frozen dataclass.

A request such as ``ConvertRequest`` is a ``Request`` whose fields are created by ``option``. A
field's annotation sets its type and its choices, its metadata everything else. From these options
(``collect_options``) come the command line (``console.add_request_options``), the validation of
values, recipes, records and the keywords of public functions.

    samples: int = option(128, "Calibration sequences.", minimum=1)
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvfold.convert.errors import InputError, format_option, shorten_repr, suggest_name

_TYPE_RULES = {
    bool: "true or false",
    int: "a whole number from {} to {}",
    float: "a number from {} to {}",
    str: "text",
}


@dataclass(frozen=True)
class Option:
    """The type, limits and help of one option of a request.

    Attributes:
        help: Text for ``--help``.
        metavar: Name of the value in ``--help``.
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
        types: Accepted types among bool, int, float and str, of a tuple's items.
        choices: Accepted words, of a ``Literal``.
        is_tuple: True if the value is a tuple.
    """

    help: str = ""
    metavar: str | None = None
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
    is_tuple: bool = False

    def parse_value(self, value: Any) -> Any:
        """``value`` as a request stores it: paths as text, lists as tuples, digits as numbers.

        Raises ValueError with the rule that it breaks, in words that follow "must be".
        """
        if value is None and self.default is None:
            return None
        if not self.is_tuple:
            return self._parse_single_value(value)
        if value is None:
            value = ()
        if isinstance(value, str) and not (self.argument or self.multiple):
            value = [item.strip() for item in value.split(",") if item.strip()]
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(dict.fromkeys(map(self._parse_single_value, items)))

    def _parse_single_value(self, value: Any) -> Any:
        """One value, not a tuple, with the option's type. Raises ValueError with the rule that it
        breaks, in words that follow "must be".
        """
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value in self.choices:
            return value
        # int() also reads the digits of other scripts.
        if isinstance(value, str) and value.isascii():
            for number in {int, float} & {*self.types}:
                with suppress(ValueError):
                    value = number(value)
        # Compared exactly, because isinstance accepts True as an int.
        kind = float if type(value) is int and float in self.types else type(value)
        within = kind not in (int, float) or self.minimum <= value <= self.maximum
        if kind in self.types and within and (self.check is None or self.check(value)):
            return value
        if not self.types:
            similar = suggest_name(value, self.choices)
            raise ValueError(f"one of {', '.join(self.choices)}{similar}")
        rule = _TYPE_RULES[self.types[0]].format(self.minimum, self.maximum)
        raise ValueError(self.rule or rule)


def option(default: Any = MISSING, help: str = "", **details: Any) -> Any:
    """A dataclass field that is an option of a request, with the attributes of `Option`; it is
    required if it has no ``default``.
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


def collect_options(request: type[Any]) -> dict[str, Option]:
    """The options of a request class, by name: arguments first, then those that the class declares
    itself, then inherited ones, and last those that do not change the result.
    """
    hints = get_type_hints(request)
    options: dict[str, Option] = {}
    for declared in fields(request):
        spec: Option = declared.metadata["option"]
        spec = replace(spec, name=declared.name, default=declared.default)
        for member in get_args(hints[declared.name] | None):
            if get_origin(member) is Literal:
                spec = replace(spec, choices=get_args(member))
            elif get_origin(member) is tuple:
                spec = replace(spec, types=get_args(member)[:1], is_tuple=True)
            elif member in _TYPE_RULES:
                spec = replace(spec, types=(*spec.types, member))
        options[declared.name] = spec
    classes = request.__mro__[:-1]

    def make_sort_key(name: str) -> tuple[bool, bool, int]:
        if options[name].argument:
            return False, False, 0
        declared_in = [name in vars(cls).get("__annotations__", ()) for cls in classes]
        return True, options[name].runs, declared_in.index(True)

    return {name: options[name] for name in sorted(options, key=make_sort_key)}


class Request:
    """Base class of requests, which checks its values. Raises one InputError with every invalid
    value, or else with every combination of values that is not allowed.
    """

    def __post_init__(self) -> None:
        problems = []
        for name, spec in collect_options(type(self)).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, spec.parse_value(value))
            except ValueError as rule:
                option_name = name.upper() if spec.argument else format_option(name)
                problems.append((name, f"{option_name} must be {rule}, not {shorten_repr(value)}"))
        problems = problems or list(self.list_problems())
        if problems:
            names, sentences = zip(*problems, strict=True)
            raise InputError(sentences[0], sentences[1:], field=names[0])

    def list_problems(self) -> Iterable[tuple[str, str]]:
        """The field at fault and a sentence for each combination of values that is not allowed."""
        return ()

    def collect_non_defaults(self) -> dict[str, Any]:
        """The options whose values differ from their defaults, by name."""
        return {
            name: vars(self)[name]
            for name, spec in collect_options(type(self)).items()
            if vars(self)[name] != spec.default
        }

    def collect_result_options(self) -> dict[str, Any]:
        """The options that determine the result, by name: without unset ones, and without those
        that only say where and how to run.
        """
        return {
            name: vars(self)[name]
            for name, spec in collect_options(type(self)).items()
            if not (spec.runs or vars(self)[name] is None or vars(self)[name] is False)
        }


def format_argv(values: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line, such as ``["--to", "gqa", "--kv-heads", "4"]``."""
    argv: list[str] = []
    for name, value in values.items():
        for item in value if isinstance(value, tuple) else (value,):
            argv += format_option(name, item).split(" ", 1)
    return argv
