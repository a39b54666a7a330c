"""Options of commands and functions, declared once as fields of a frozen dataclass.

A request such as ``ConvertRequest`` is a ``Request`` whose fields are made by ``option``: the annotation gives the type
and the words to choose from, the rest stands in the field's metadata. From ``specs`` of a request come the command line
(``console.request_options``), the checks of values, recipes, records and the keywords of public functions.

    samples: int = option(128, help="Calibration sequences.", panel="Calibration", least=1)
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from kvfold.convert.errors import InputError, OptionProblem, as_option, did_you_mean, opt

Fields = ParamSpec("Fields")
Made = TypeVar("Made", contravariant=True)
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Option:
    """The part of a field that its type and default do not say.

    ``least`` and ``below`` bound a number, ``check`` returns the rule that a value of the right type breaks, ``rule``
    is said for a wrong type or range. ``targets``: values of ``to`` that the option goes with. ``runs``: says where and
    how to run, so it is no part of a recipe or a record. ``argument``: has no ``--`` on the command line.
    """

    help: str = ""
    panel: str | None = None
    metavar: str | None = None
    spellings: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    check: Callable[[Any], str | None] | None = None
    rule: str | None = None
    targets: tuple[str, ...] = ()
    runs: bool = False
    argument: bool = False


def option(default: Any = MISSING, **details: Any) -> Any:
    """A field with the details of ``Option``; without ``default`` the option must be given."""
    return field(default=default, metadata={"option": Option(**details)})


@dataclass(frozen=True)
class Spec:
    """One option: its field's name, default and details, and its annotation taken apart.

    ``kinds`` are those of bool, int, float and str that it takes, ``words`` those that a Literal allows. ``many``: it
    takes one text or several. ``each``: it takes a tuple of this type, or one text with commas.
    """

    name: str
    default: Any
    details: Option
    kinds: tuple[type, ...]
    words: tuple[str, ...]
    many: bool
    each: type | None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def plain(self, value: Any) -> Any:
        """``value`` with paths as text; a list becomes a tuple, one of a single text that text, an empty one None."""
        if self.each is not None:
            return self._tuple(value)
        if self.many and isinstance(value, (list, tuple)):
            texts = tuple(map(self.plain, value))
            return texts if len(texts) > 1 else next(iter(texts), None)
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def _tuple(self, value: Any) -> Any:
        if isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            value = [text] if self.details.argument else [part.strip() for part in text.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            return value
        numbers = self.each is int
        parts = [int(part) if numbers and str(part).isdecimal() else part for part in value]
        return tuple(dict.fromkeys(os.fspath(part) if isinstance(part, os.PathLike) else part for part in parts))

    def rule_broken(self, value: Any) -> str | None:
        """The rule that ``value`` breaks, in words that follow "must be"; None for a value that the option takes."""
        details = self.details
        if (value is None and self.default is None) or (isinstance(value, str) and value in self.words):
            return None
        if self.each is not None:
            sound = isinstance(value, tuple) and all(type(part) is self.each and part for part in value)
            return (
                None if sound else details.rule or f"{'positive numbers' if self.each is int else 'names'} and commas"
            )
        if not self.kinds:
            return f"one of {', '.join(self.words)}{did_you_mean(value, self.words)}"
        if bool in self.kinds or isinstance(value, bool):
            return None if isinstance(value, bool) and bool in self.kinds else details.rule or self._type()
        number = isinstance(value, int) or (isinstance(value, float) and float in self.kinds)
        if number and (int in self.kinds or float in self.kinds):
            if details.least is not None and not value >= details.least:
                return details.rule or self._type()
            if details.below is not None and value >= details.below:
                return f"below {details.below}"
        elif str not in self.kinds or not isinstance(value, (str, tuple) if self.many else str):
            return details.rule or self._type()
        return None if details.check is None else details.check(value)

    def _type(self) -> str:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        bound = "" if self.details.least is None else f" of at least {self.details.least}"
        return names[self.kinds[0]] + bound


_specs: dict[type, dict[str, Spec]] = {}


def specs(request: type[Any]) -> dict[str, Spec]:
    """The options of a request by name, in the order of its fields."""
    if request not in _specs:
        hints = get_type_hints(request)
        named = {each.name: each for each in fields(request) if "option" in each.metadata}
        _specs[request] = {name: _spec(each, hints[name]) for name, each in named.items()}
    return _specs[request]


def _spec(each: Any, hint: Any) -> Spec:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    kinds = tuple(part for part in parts if part in (bool, int, float, str))
    tuples = [get_args(part)[0] for part in parts if get_origin(part) is tuple]
    many = bool(tuples) and str in kinds
    return Spec(
        each.name, each.default, each.metadata["option"], kinds, words, many, tuples[0] if tuples and not many else None
    )


def run_only(request: type) -> frozenset[str]:
    """The options that say where and how to run, and do not change the result."""
    return frozenset(name for name, spec in specs(request).items() if spec.details.runs)


class Request:
    """Base of requests: paths become text, and InputError names every problem at once."""

    def __post_init__(self) -> None:
        found = specs(type(self))
        for name, spec in found.items():
            object.__setattr__(self, name, spec.plain(getattr(self, name)))
        problems = list(value_problems(found, vars(self)))
        problems += [OptionProblem(text, name, getattr(self, name)) for name, text in self.problems()]
        if problems:
            raise InputError.of(problems)

    def problems(self) -> Iterable[tuple[str, str]]:
        """Values that do not go together: an option and a sentence about it. Values may be of any type here."""
        return ()

    def given(self) -> dict[str, Any]:
        """The options that are not at their default."""
        return {name: vars(self)[name] for name, spec in specs(type(self)).items() if vars(self)[name] != spec.default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def value_problems(found: Mapping[str, Spec], values: Mapping[str, Any]) -> Iterator[OptionProblem]:
    """A problem for each value that its option does not take."""
    for name, value in values.items():
        spec = found.get(name)
        if spec is not None and (rule := spec.rule_broken(value)) is not None:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
            named = name.upper() if spec.details.argument else opt(name)
            yield OptionProblem(f"{named} must be {rule}, not {shown}", name, value)


def command_words(values: Mapping[str, Any]) -> list[str]:
    """Values of options as words of a command line: ``["--to", "gqa", "--kv-heads", "4"]``."""
    words: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [as_option(name)] if each is True else [as_option(name), str(each)]
    return words


# Requests in Python


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
