"""Recipes: what ``kvfold convert`` is asked for a model and a target, as a TOML file.

Keys are the options with underscores, as in ``ConvertRequest`` and ``kvfold.json``; the table ``[about]`` is for people
and changes nothing. Those that ship lie in the repository's folder ``recipes``, installed beside this package.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvfold.convert import request as rq
from kvfold.convert.errors import InputError, one_line
from kvfold.convert.sizes import parse_size

_FOLDER = Path(__file__).resolve().parent.parent / "recipes"
_CHOICES = {
    "to": rq.TARGETS,
    "method": tuple(dict.fromkeys((*rq.FOLD_METHODS, *rq.MLA_METHODS))),
    "group": rq.GROUPINGS,
    "layout": rq.LAYOUTS,
    "dtype": rq.DTYPES,
}
_OPTIONS = (*_CHOICES, *rq.LEAST, "refine", "calibration", "max_shard_size")
_ABOUT = {"model": str, "cached_before": int, "cached_after": int, "saving": float, "uptrain": str, "measured": str}
_TYPES = {str: "text", int: "a whole number", float: "a number with a decimal point"}

# An option that is given displaces these of a recipe: they name the split of the cache in another way.
_DISPLACES = {"budget": ("kv_rank", "rope_dim"), "kv_rank": ("budget",), "rope_dim": ("budget",)}
# Where an option given changes a recipe's target, what only the old target takes is left behind.
_GOES_WITH = {"kv_heads": ("gqa",), "group": ("gqa", "mqa")} | dict.fromkeys(
    ("kv_rank", "rope_dim", "budget", "q_rank", "layout"), ("mla",)
)


@dataclass(frozen=True)
class Recipe:
    """``options`` by the names of ``ConvertRequest``; ``about`` holds the model it is meant for, what it saves, ..."""

    origin: str
    options: Mapping[str, Any]
    about: Mapping[str, Any]


def recipe_names() -> list[str]:
    """The recipes that ship, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def recipe_request(recipe: str, **overrides: Any) -> rq.ConvertRequest:
    """The conversion that ``recipe`` (a name or a FILE.toml) asks for, with ``overrides`` in place of its values.

    ``overrides`` are fields of ``ConvertRequest``, ``model`` and ``out`` among them. An override that names the target
    or the split in another way displaces what cannot stand beside it. Raises InputError.
    """
    found = read_recipe(recipe)
    values = {**_kept(found.options, overrides), **overrides}
    if values.get("to") is None:
        raise InputError(f'{found.origin}: names no target: write to = "gqa", "mqa" or "mla" into it, or give --to')
    try:
        return rq.ConvertRequest(**values)
    except InputError as error:
        raise InputError(f"with {found.origin}: {error.message}", error.details) from None


def read_recipe(recipe: str) -> Recipe:
    """The recipe called ``recipe``, or that in the file ``recipe``.

    Raises InputError when there is none, it is not TOML, or a key or a value is not one of a recipe.
    """
    path, origin = _find(recipe)
    content = _parsed(path, origin)
    about = content.pop("about", {})
    problems = list(_option_problems(content))
    problems += _about_problems(about) if isinstance(about, dict) else [f"about: expected a table, found {about!r}"]
    if problems:
        raise InputError(f"{origin}: {problems[0]}", problems[1:])
    return Recipe(origin, content, about)


def _find(recipe: str) -> tuple[Path, str]:
    """The file, and how to call it in an error."""
    known, path = recipe_names(), Path(recipe)
    if recipe in known:
        return _FOLDER / f"{recipe}.toml", f"recipe {recipe}"
    if path.suffix != ".toml" and len(path.parts) < 2 and not (recipe.strip() and os.path.exists(path)):
        hint = _meant(recipe, known)
        raise InputError(
            f"--recipe {recipe!r}: no recipe of that name{hint}; those that ship: {', '.join(known)}; or a FILE.toml"
        )
    if os.path.isdir(path):
        raise InputError(f"--recipe {recipe}: expected a TOML file or the name of a recipe, found a folder")
    if not os.path.exists(path):
        hint = f"; without .toml it is a recipe that ships: --recipe {path.stem}" if path.stem in known else ""
        raise InputError(f"--recipe {recipe}: there is no such file{hint or '; check the path'}")
    return path, recipe


def _parsed(path: Path, origin: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{origin}: cannot be read ({error.strerror}): check its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{origin}: expected TOML in UTF-8, found byte {error.start} that is none") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        end = f"at line {len(text.splitlines())}, the end"
        reason = one_line(error).replace("at end of document", end)
        raise InputError(f"{origin}: expected TOML, found something else: {reason}") from error


def _option_problems(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if key not in _OPTIONS:
            yield _unknown(key, value)
        elif problem := _value_problem(key, value):
            yield f"{key}: expected {problem}, found {value!r}"


def _unknown(key: str, value: Any) -> str:
    if key in {field.name for field in fields(rq.ConvertRequest)}:
        return f"{key}: belongs on the command line: a recipe says what to make, not where or how to run"
    if isinstance(value, dict):
        return f"unknown table [{key}]: options stand above all tables, and [about] is the only one"
    return f"unknown key {key!r}{_meant(key, _OPTIONS)}; expected keys: {', '.join(_OPTIONS)}"


def _value_problem(key: str, value: Any) -> str | None:
    """What was expected, None when ``value`` is that."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in _CHOICES:
        expected = f"one of {', '.join(_CHOICES[key])}{_meant(value, _CHOICES[key])}"
        return None if isinstance(value, str) and value in _CHOICES[key] else expected
    if key in rq.LEAST:
        return None if whole and value >= rq.LEAST[key] else f"a whole number of at least {rq.LEAST[key]}"
    if key == "refine":
        return None if value == "auto" or (whole and value >= 0) else 'a whole number of steps or "auto"'
    if key == "max_shard_size":
        return None if isinstance(value, str) and _is_size(value) else 'a size such as "5GB", "500MB" or "2GiB"'
    return None if isinstance(value, str) and value.strip() else "the name of a text file or dataset"


def _is_size(text: str) -> bool:
    try:
        return parse_size(text) > 0
    except InputError:
        return False


def _about_problems(about: Mapping[str, Any]) -> Iterator[str]:
    for key, value in about.items():
        if key in _OPTIONS:
            yield f"{key} in [about]: is an option: it goes above [about], which changes nothing"
        elif key not in _ABOUT:
            yield f"unknown key {key!r} in [about]{_meant(key, _ABOUT)}; expected keys: {', '.join(_ABOUT)}"
        elif type(value) is not _ABOUT[key]:
            yield f"{key} in [about]: expected {_TYPES[_ABOUT[key]]}, found {value!r}"


def _meant(found: Any, known: Iterable[str]) -> str:
    def plain(text: Any) -> str:
        return str(text).strip().lower().replace("-", "_")

    spelt = {plain(name): name for name in known}
    close = get_close_matches(plain(found), spelt, 1)
    return f" (did you mean {spelt[close[0]]}?)" if close else ""


def _kept(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``options`` stands beside ``overrides``."""
    given = {name for name, value in overrides.items() if value is not None}
    gone = {displaced for name in given for displaced in _DISPLACES.get(name, ())} - given
    to = overrides.get("to")
    if to is not None and to != options.get("to"):
        gone |= {name for name, targets in _GOES_WITH.items() if to not in targets}
        if options.get("method") not in (rq.MLA_METHODS if to == "mla" else rq.FOLD_METHODS):
            gone.add("method")
    return {name: value for name, value in options.items() if name not in gone}
