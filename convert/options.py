"""Options of commands and functions, declared once as fields of a frozen dataclass.

A request such as ``ConvertRequest`` is a ``Request`` whose fields are made by ``option``: the annotation gives the type
and the words to choose from, the rest stands in the field's metadata. From ``specs`` of a request come the command line
(``console.request_options``), the checks of values, recipes, records and the keywords of public functions.

    samples: int = option(128, "Calibration sequences.", least=1)
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from kvfold.convert.errors import InputError, as_option, did_you_mean, opt

Fields = ParamSpec("Fields")
Made = TypeVar("Made", contravariant=True)
Result = TypeVar("Result", covariant=True)

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Option:
    """One option. A field says the first part by `option`, ``specs`` fills in the rest from its name, default and type.

    ``check`` returns the rule that a value of the right type breaks, ``rule`` is said for a wrong type or range.
    """

    help: str = ""
    panel: str | None = None  # heads this option and those after it in --help
    metavar: str | None = None
    spellings: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    check: Callable[[Any], str | None] | None = None
    rule: str | None = None
    targets: tuple[str, ...] = ()  # values of ``to`` that it goes with
    runs: bool = False  # says where and how to run: no part of a recipe or a record
    argument: bool = False  # without -- on the command line

    name: str = ""
    default: Any = None
    kinds: tuple[type, ...] = ()  # those of bool, int, float and str that it takes
    words: tuple[str, ...] = ()  # of a Literal
    many: bool = False  # takes one text or several
    each: type | None = None  # takes a tuple of this type, or one text with commas

    def plain(self, value: Any) -> Any:
        """``value`` with paths as text; a list becomes a tuple, one of a single text that text, an empty one None."""
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        # The command line has a number of steps as text.
        if self.words and int in self.kinds and re.fullmatch(r"[0-9]{1,18}", str(value)):
            return int(value)
        if self.each is not None and isinstance(value, str):
            value = [value] if self.argument else [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            return value
        parts = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in value]
        if self.each is not None:
            numbers = (int(part) if self.each is int and str(part).isdecimal() else part for part in parts)
            return tuple(dict.fromkeys(numbers))
        if self.many and len(parts) < 2:
            return next(iter(parts), None)
        return tuple(parts) if self.many else value

    def rule_broken(self, value: Any) -> str | None:
        """The rule that ``value`` breaks, in words that follow "must be"; None for a value that the option takes."""
        if (value is None and self.default is None) or (isinstance(value, str) and value in self.words):
            return None
        if self.each is not None:
            taken = isinstance(value, tuple) and all(type(part) is self.each and part for part in value)
            return None if taken else self.rule
        if not self.kinds:
            return f"one of {', '.join(self.words)}{did_you_mean(value, self.words)}"
        rule = self.rule or _TYPES[self.kinds[0]] + ("" if self.least is None else f" of at least {self.least}")
        # True is an int to isinstance.
        kinds = (*self.kinds, int) if float in self.kinds else self.kinds
        if isinstance(value, bool) != (bool in kinds) or not isinstance(value, (*kinds, tuple) if self.many else kinds):
            return rule
        if isinstance(value, (int, float)) and self.least is not None and not value >= self.least:
            return rule
        if isinstance(value, (int, float)) and self.below is not None and value >= self.below:
            return f"below {self.below}"
        # An empty path, as an unset shell variable gives, would mean the current folder, which ``overwrite`` replaces.
        if self.argument and not str(value).strip():
            return f"{rule} (is a shell variable unset?)"
        return None if self.check is None else self.check(value)


def option(default: Any = MISSING, help: str = "", **details: Any) -> Any:
    """A field with the details of ``Option``; without ``default`` the option must be given."""
    return field(default=default, metadata={"option": Option(help, **details)})


def specs(request: type[Any]) -> dict[str, Option]:
    """The options of a request by name, in the order of its fields."""
    hints, found, panel = get_type_hints(request), dict[str, Option](), None
    for each in fields(request):
        if "option" not in each.metadata:
            continue
        said, hint = each.metadata["option"], hints[each.name]
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
            words=tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part)),
            many=inside is not None and str in kinds,
            each=None if str in kinds else inside,
        )
    return found


def run_only(request: type) -> frozenset[str]:
    """The options that say where and how to run, and do not change the result."""
    return frozenset(name for name, spec in specs(request).items() if spec.runs)


class Request:
    """Base of requests: paths become text, and InputError names every problem at once."""

    def __post_init__(self) -> None:
        found = specs(type(self))
        for name, spec in found.items():
            object.__setattr__(self, name, spec.plain(getattr(self, name)))
        if problems := [*value_problems(found, vars(self)), *self.problems()]:
            raise InputError(problems[0], problems[1:])

    def problems(self) -> Iterable[str]:
        """A sentence for each two values that do not go together. Values may be of any type here."""
        return ()

    def given(self) -> dict[str, Any]:
        """The options that are not at their default."""
        return {name: vars(self)[name] for name, spec in specs(type(self)).items() if vars(self)[name] != spec.default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def value_problems(found: Mapping[str, Option], values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that its option does not take."""
    for name, value in values.items():
        spec = found.get(name)
        if spec is not None and (rule := spec.rule_broken(value)) is not None:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
            named = name.upper() if spec.argument else opt(name)
            yield f"{named} must be {rule}, not {shown}"


def command_words(values: Mapping[str, Any]) -> list[str]:
    """Values of options as words of a command line: ``["--to", "gqa", "--kv-heads", "4"]``."""
    words: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [as_option(name)] if each is True else [as_option(name), str(each)]
    return words


class Entry(Protocol[Made, Fields, Result]):
    """A public function that is called with a request, or with the fields of one."""

    @overload
    def __call__(self, request: Made, /, **callbacks: Any) -> Result: ...
    @overload
    def __call__(self, *arguments: Fields.args, **keywords: Fields.kwargs) -> Result: ...


def takes(request: Callable[Fields, Made]) -> Callable[[Callable[..., Result]], Entry[Made, Fields, Result]]:
    """Lets a function of a request be called with the fields of ``request`` too.

    Keywords that are further parameters of the function, such as ``progress``, are passed on.
    """

    def decorate(function: Callable[..., Result]) -> Entry[Made, Fields, Result]:
        further = list(inspect.signature(function).parameters)[1:]

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Result:
            if arguments and isinstance(arguments[0], Request):
                return function(*arguments, **keywords)
            callbacks = {name: keywords.pop(name) for name in further if name in keywords}
            return function(request(*arguments, **keywords), **callbacks)

        return call

    return decorate
