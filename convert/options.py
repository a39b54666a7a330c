"""Options of commands and functions, declared once as fields of a frozen dataclass.

A request such as ``ConvertRequest`` is a ``Request`` whose fields are created by ``option``. A
field's annotation sets its type and allowed words, its metadata everything else. The ``specs`` of a
request define the command line (``console.request_options``), the validation of values, recipes,
records and the keywords of public functions.

    samples: int = option(128, "Calibration sequences.", least=1)
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.convert.errors import InputError, did_you_mean, format_option, option_error

# The whole numbers that Python reads quickly, in the digits of a keyboard: int() also takes those
# of other scripts.
_WHOLE = "[0-9]{1,18}"
# The limit of whole numbers without one of their own: products of a few must fit the 63 bits of
# torch's sizes.
_MOST = 2**31
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Option:
    """One option. A field sets the first attributes through `option`; ``specs`` derives the others
    from the field.

    ``check`` returns the rule that a value of the right type breaks; ``rule`` describes the valid
    types and range.
    """

    help: str = ""
    panel: str | None = None  # heading in --help for this option and the following ones
    metavar: str | None = None
    spellings: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    check: Callable[[Any], str | None] | None = None
    rule: str | None = None
    targets: tuple[str, ...] = ()  # values of ``to`` that allow this option
    runs: bool = False  # only says where and how to run: not in recipes and records
    argument: bool = False  # positional on the command line

    name: str = ""
    default: Any = None
    kinds: tuple[type, ...] = ()  # the accepted types among bool, int, float and str
    words: tuple[str, ...] = ()  # the words of a Literal
    many: bool = False  # accepts one or more strings
    each: type | None = None  # accepts a tuple of this type, or one string with commas

    def plain(self, value: Any) -> Any:
        """``value`` with paths as strings and lists as tuples; with ``many``, one item is unpacked,
        [] is None.
        """
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        # On the command line, numbers of steps are strings.
        if self.words and int in self.kinds and re.fullmatch(_WHOLE, str(value)):
            return int(value)
        if self.each is not None and isinstance(value, str):
            value = (
                [value]
                if self.argument
                else [part.strip() for part in value.split(",") if part.strip()]
            )
        if not isinstance(value, (list, tuple)):
            return value
        parts = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in value]
        if self.each is not None:
            numbers = (
                int(part) if self.each is int and re.fullmatch(_WHOLE, str(part)) else part
                for part in parts
            )
            return tuple(dict.fromkeys(numbers))
        if self.many and len(parts) < 2:
            return next(iter(parts), None)
        return tuple(parts) if self.many else value

    def rule_broken(self, value: Any) -> str | None:
        """The rule that ``value`` breaks, worded to follow "must be"; None if the value is valid."""
        if (value is None and self.default is None) or (
            isinstance(value, str) and value in self.words
        ):
            return None
        if self.each is not None:
            taken = isinstance(value, tuple) and all(
                type(part) is self.each and part for part in value
            )
            return None if taken else self.rule
        if not self.kinds:
            return f"one of {', '.join(self.words)}{did_you_mean(value, self.words)}"
        rule = self.rule or _TYPES[self.kinds[0]] + (
            "" if self.least is None else f" of at least {self.least}"
        )
        # isinstance accepts True as an int.
        kinds = (*self.kinds, int) if float in self.kinds else self.kinds
        if isinstance(value, bool) != (bool in kinds) or not isinstance(
            value, (*kinds, tuple) if self.many else kinds
        ):
            return rule
        if isinstance(value, (int, float)) and self.least is not None and not value >= self.least:
            return rule
        if isinstance(value, (int, float)) and self.below is not None and value >= self.below:
            return f"below {self.below}"
        if type(value) is int and self.below is None and value >= _MOST:
            return f"below {_MOST}"
        # An empty path, as from an unset shell variable, would mean the current folder, which
        # ``overwrite`` replaces.
        if self.argument and not str(value).strip():
            return f"{rule} (is a shell variable unset?)"
        return None if self.check is None else self.check(value)


def option(default: Any = MISSING, help: str = "", **details: Any) -> Any:
    """A dataclass field with the attributes of ``Option``; without ``default`` the option is
    required.
    """
    return field(default=default, metadata={"option": Option(help, **details)})


# Options of several requests; a request passes keywords for what differs.
seq_len_option = functools.partial(option, default=512, help="Tokens per sequence.", least=2)
seed_option = functools.partial(
    option, default=0, help="Seed for drawing sequences.", least=0, below=2**63
)
device_option = functools.partial(
    option, default="auto", help="Device to compute on; auto: a GPU if there is one.", runs=True
)
dtype_option = functools.partial(option, default="auto", help="Dtype to compute in.")
trust_option = functools.partial(
    option, default=False, help="Allow code in the checkpoint to run.", runs=True
)


def specs(request: type[Any]) -> dict[str, Option]:
    """The options of a request by name, in field order."""
    hints = get_type_hints(request)
    found = dict[str, Option]()
    panel = None
    for each in fields(request):
        if "option" not in each.metadata:
            continue
        said = each.metadata["option"]
        hint = hints[each.name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = tuple(part for part in parts if part in _TYPES)
        inside = next((get_args(part)[0] for part in parts if get_origin(part) is tuple), None)
        panel = said.panel or panel
        found[each.name] = replace(
            said,
            panel=panel,
            name=each.name,
            default=each.default,
            kinds=kinds,
            words=tuple(
                word for part in parts if get_origin(part) is Literal for word in get_args(part)
            ),
            many=inside is not None and str in kinds,
            each=None if str in kinds else inside,
        )
    return found


def run_only(request: type) -> frozenset[str]:
    """Names of the options that only say where and how to run and do not change the result."""
    return frozenset(name for name, spec in specs(request).items() if spec.runs)


class Request:
    """Base class of requests. Converts paths to strings; raises one InputError with every problem."""

    def __post_init__(self) -> None:
        found = specs(type(self))
        for name, spec in found.items():
            object.__setattr__(self, name, spec.plain(getattr(self, name)))
        if problems := [*value_problems(found, vars(self)), *self.problems()]:
            field, message = problems[0]
            raise InputError(message, [further for _, further in problems[1:]], field=field)

    def problems(self) -> Iterable[tuple[str, str]]:
        """A field and a sentence for each combination of values that is not allowed. Types may
        still be wrong.
        """
        return ()

    def given(self) -> dict[str, Any]:
        """The options whose values differ from their defaults."""
        return {
            name: vars(self)[name]
            for name, spec in specs(type(self)).items()
            if vars(self)[name] != spec.default
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def value_problems(
    found: Mapping[str, Option], values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """A field and a sentence for each value that its option does not accept."""
    for name, value in values.items():
        spec = found.get(name)
        if spec is not None and (rule := spec.rule_broken(value)) is not None:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            named = name.upper() if spec.argument else format_option(name)
            yield name, f"{named} must be {rule}, not {shown}"


def no_gpu() -> InputError:
    """The error of ``--device cuda`` on a machine without a GPU."""
    way_out = "use --device cpu or auto"
    return option_error(
        "device", "cuda", f": torch finds no CUDA device on this machine; {way_out}"
    )


def command_words(values: Mapping[str, Any]) -> list[str]:
    """Option values as command-line words, such as ``["--to", "gqa", "--kv-heads", "4"]``."""
    words: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [format_option(name)] if each is True else [format_option(name), str(each)]
    return words
