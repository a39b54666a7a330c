"""Recipes: the options of ``kvfold convert`` for a model and a target, as a TOML file.

Keys are the options with underscores, as in ``ConvertRequest`` and ``kvfold.json``; the table ``[about]`` is for
readers and changes nothing. The recipes that ship are in the repository's folder ``recipes``, installed beside this
package.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError, as_keyword, did_you_mean, one_line, opt, worded
from kvfold.convert.methods.registry import methods_of
from kvfold.convert.options import Spec, run_only, specs, value_problems
from kvfold.convert.request import ConvertRequest

_FOLDER = Path(__file__).resolve().parent.parent / "recipes"
_LARGEST = 1 << 20  # bytes
_ABOUT = {"model": str, "cached_before": int, "cached_after": int, "saving": float, "uptrain": str, "measured": str}
_TYPES = {str: "text", int: "a whole number", float: "a number with a decimal point"}

# Values of a recipe that an option beside it displaces: they name the split of the cache in another way.
_DISPLACES = {"budget": ("kv_rank", "rope_dim"), "kv_rank": ("budget",), "rope_dim": ("budget",)}


@dataclass(frozen=True)
class Recipe:
    """``options`` by the names of ``ConvertRequest``; ``about``: the model it is for, its saving, a launch line, ..."""

    origin: str
    options: Mapping[str, Any]
    about: Mapping[str, Any]


def recipe_names() -> list[str]:
    """The recipes that ship, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def recipe_list() -> list[dict[str, Any]]:
    """The recipes that ship, as plain JSON values: name, ``options``, and what is said about each."""
    read = {name: read_recipe(name) for name in recipe_names()}
    return [{"name": name, "options": dict(recipe.options), **recipe.about} for name, recipe in read.items()]


def recipe_table() -> str:
    """The recipes that ship, a line each: name, model, and the KV-cache elements per token per layer of both."""
    rows = [["recipe", "model", "cached before", "after"]]
    for name in recipe_names():
        about = read_recipe(name).about
        rows.append([name, *(str(about.get(key, "")) for key in ("model", "cached_before", "cached_after"))])
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>13}  {row[3]:>6}" for row in rows]
    return "\n".join(
        [*lines, "", "kvfold convert MODEL OUT --recipe NAME; cached: KV-cache elements per token per layer"]
    )


def recipe_request(recipe: str, **overrides: Any) -> ConvertRequest:
    """The request of ``recipe`` (a name or a FILE.toml), with ``overrides`` in place of its values.

    ``overrides`` are fields of ``ConvertRequest``, ``model`` and ``out`` among them. An override of the target or of
    the split displaces the recipe's values that cannot go with it. Raises InputError.

    >>> request = recipe_request("llama-2-7b-mla-512-64", model="MODEL", out="OUT", kv_rank=448)
    >>> request.kv_rank, request.rope_dim
    (448, 64)
    """
    read = read_recipe(recipe)
    values = {**_remaining(read.options, overrides), **overrides}
    if values.get("to") is None:
        raise InputError(
            f'{read.origin}: names no target; write to = "gqa", "mqa" or "mla" into it, or give {opt("to")}'
        )
    try:
        return ConvertRequest(**values)
    except InputError as error:
        raise InputError(f"with {read.origin}: {error.message}", error.details, error.problems) from None


def read_recipe(recipe: str) -> Recipe:
    """The recipe of that name, or in that file.

    Raises InputError when there is none, it is not TOML, or it holds an unknown key or a wrong value.
    """
    path, origin = _find(recipe)
    content = _parsed(path, origin)
    about = content.pop("about", {})
    problems = list(_option_problems(content))
    problems += _about_problems(about) if isinstance(about, dict) else [f"about must be a table, not {about!r}"]
    if problems:
        raise InputError(f"{origin}: {problems[0]}", problems[1:])
    return Recipe(origin, content, about)


def _find(recipe: str) -> tuple[Path, str]:
    """The file, and its name in errors."""
    known, path = recipe_names(), Path(recipe)
    if recipe in known:
        return _FOLDER / f"{recipe}.toml", f"recipe {recipe}"
    if path.suffix != ".toml" and len(path.parts) < 2 and not (recipe.strip() and os.path.exists(path)):
        hint = did_you_mean(recipe, known)
        raise InputError(
            f"{opt('recipe', repr(recipe))}: no recipe of that name{hint}; those that ship: {', '.join(known)}; or a "
            "FILE.toml"
        )
    if os.path.isdir(path):
        raise InputError(f"{opt('recipe', recipe)} must be a TOML file or the name of a recipe, not a folder")
    if not os.path.exists(path):
        hint = f"; without .toml it is a recipe that ships: {opt('recipe', path.stem)}" if path.stem in known else ""
        raise InputError(f"{opt('recipe', recipe)}: there is no such file{hint or '; check the path'}")
    return path, recipe


def _read(path: Path, origin: str) -> bytes:
    """The bytes of a recipe. InputError for what is no file, such as a pipe, and for one that is far too long."""
    if not path.is_file():
        raise InputError(f"{origin}: expected a TOML file, found something else, such as a pipe or a device")
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputError(f"{origin}: expected a recipe of at most {_LARGEST >> 20} MiB, found a longer file")
    return data


def _parsed(path: Path, origin: str) -> dict[str, Any]:
    try:
        text = _read(path, origin).decode("utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{origin}: cannot be read ({error.strerror}): check its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{origin}: expected TOML in UTF-8, found an invalid byte at {error.start}") from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python converts
        end = f"at line {len(text.splitlines())}, the end"
        reason = one_line(error).replace("at end of document", end)
        raise InputError(f"{origin}: expected TOML, found something else: {reason}") from error


def _keys() -> dict[str, Spec]:
    """The options that a recipe may hold: those that say what to make."""
    left_out = run_only(ConvertRequest)
    return {name: spec for name, spec in specs(ConvertRequest).items() if name not in left_out}


def _option_problems(options: Mapping[str, Any]) -> Iterator[str]:
    keys = _keys()
    for key, value in options.items():
        if key not in keys:
            yield _unknown(key, value)
        else:
            with worded(as_keyword):
                yield from (problem.text for problem in value_problems(keys, {key: keys[key].plain(value)}))


def _unknown(key: str, value: Any) -> str:
    if key in specs(ConvertRequest):
        return f"{key}: belongs on the command line: a recipe says what to make, not where or how to run"
    if isinstance(value, dict):
        return f"unknown table [{key}]: options stand above all tables, and [about] is the only one"
    return f"unknown key {key!r}{did_you_mean(key, _keys())}; expected keys: {', '.join(_keys())}"


def _about_problems(about: Mapping[str, Any]) -> Iterator[str]:
    for key, value in about.items():
        if key in _keys():
            yield f"{key} in [about]: is an option: it goes above [about], which changes nothing"
        elif key not in _ABOUT:
            yield f"unknown key {key!r} in [about]{did_you_mean(key, _ABOUT)}; expected keys: {', '.join(_ABOUT)}"
        elif type(value) is not _ABOUT[key]:
            yield f"{key} in [about] must be {_TYPES[_ABOUT[key]]}, not {value!r}"


def _remaining(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The ``options`` of a recipe that ``overrides`` does not displace."""
    overridden = {name for name, value in overrides.items() if value is not None}
    displaced = {other for name in overridden for other in _DISPLACES.get(name, ())} - overridden
    to = overrides.get("to")
    if to is not None and to != options.get("to"):
        displaced |= {name for name, spec in _keys().items() if spec.details.targets and to not in spec.details.targets}
        if options.get("method") not in methods_of(to):
            displaced.add("method")
    return {name: value for name, value in options.items() if name not in displaced}
