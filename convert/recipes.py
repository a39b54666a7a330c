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
from kvfold.convert.options import specs, value_problems
from kvfold.convert.request import ConvertRequest
from kvfold.convert.sizes import table

_FOLDER = Path(__file__).resolve().parent.parent / "recipes"
_LARGEST = 1 << 20  # bytes

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
    keys = ("name", "model", "cached_before", "cached_after")
    rows = [["recipe", "model", "cached before", "after"]]
    rows += [[str(listed.get(key, "")) for key in keys] for listed in recipe_list()]
    told = "kvfold convert MODEL OUT --recipe NAME; cached: KV-cache elements per token per layer"
    return "\n".join([*table(rows, left=(0, 1)), "", told])


def recipe_request(recipe: str, **overrides: Any) -> ConvertRequest:
    """The request of ``recipe`` (a name or a FILE.toml), with ``overrides`` in place of its values.

    ``overrides`` are fields of ``ConvertRequest``, ``model`` and ``out`` among them. An override of the target or of
    the split displaces the recipe's values that cannot go with it. Raises InputError.

    >>> request = recipe_request("llama-2-7b-mla-512-64", model="MODEL", out="OUT", kv_rank=448)
    >>> request.kv_rank, request.rope_dim
    (448, 64)
    """
    read = read_recipe(recipe)
    overridden = {name for name, value in overrides.items() if value is not None}
    displaced = {other for name in overridden for other in _DISPLACES.get(name, ())} - overridden
    if "to" in overridden and overrides["to"] != read.options.get("to"):
        to = overrides["to"]
        every = specs(ConvertRequest).items()
        displaced |= {name for name, spec in every if spec.targets and to not in spec.targets}
        if read.options.get("method") not in methods_of(to):
            displaced.add("method")
    values = {name: value for name, value in read.options.items() if name not in displaced} | overrides
    if values.get("to") is None:
        raise InputError(
            f'{read.origin}: names no target; write to = "gqa", "mqa" or "mla" into it, or give {opt("to")}'
        )
    try:
        return ConvertRequest(**values)
    except InputError as error:
        raise InputError(f"with {read.origin}: {error.message}", error.details) from None


def read_recipe(recipe: str) -> Recipe:
    """The recipe of that name, or in that file.

    Raises InputError when there is none, it is not TOML, or it holds an unknown key or a wrong value.
    """
    known, path, origin = recipe_names(), Path(recipe), recipe
    # A name comes first: a file of the same name in the current folder must not change what it means.
    if recipe in known:
        path, origin = _FOLDER / f"{recipe}.toml", f"recipe {recipe}"
    elif path.suffix != ".toml" and len(path.parts) < 2 and not (recipe.strip() and os.path.exists(path)):
        hint = did_you_mean(recipe, known)
        raise InputError(
            f"{opt('recipe', repr(recipe))}: no recipe of that name{hint}; those that ship: {', '.join(known)}; or a "
            "FILE.toml"
        )
    elif not os.path.exists(path):
        ships = f"without .toml it is a recipe that ships: {opt('recipe', path.stem)}"
        raise InputError(
            f"{opt('recipe', recipe)}: there is no such file; {ships if path.stem in known else 'check the path'}"
        )
    content = _parsed(path, origin)
    about = content.pop("about", {})
    if problems := list(_problems(content, about)):
        raise InputError(f"{origin}: {problems[0]}", problems[1:])
    return Recipe(origin, content, about)


def _parsed(path: Path, origin: str) -> dict[str, Any]:
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise InputError(f"{origin} must be a TOML file, not {kind}; name a file, or a recipe that ships")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise InputError(f"{origin} must be at most {_LARGEST >> 20} MiB; is it a recipe?")
        text = data.decode("utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{origin}: cannot be read ({error.strerror}); check its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{origin} must be UTF-8 text; its byte at {error.start} is invalid") from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python converts
        reason = one_line(error).replace("at end of document", f"at line {len(text.splitlines())}, the end")
        raise InputError(f"{origin} is no valid TOML: {reason}; correct it there") from error


def _problems(options: Mapping[str, Any], about: Any) -> Iterator[str]:
    """A sentence for each key and value that a recipe must not hold."""
    keys = {name: spec for name, spec in specs(ConvertRequest).items() if not spec.runs}
    for key, value in options.items():
        if key in keys:
            # Keys of a recipe are spelled as keywords, where a command runs too.
            with worded(as_keyword):
                yield from value_problems(keys, {key: keys[key].plain(value)})
        elif key in specs(ConvertRequest):
            yield f"{key} belongs on the command line: a recipe says what to make, not where or how to run"
        elif isinstance(value, dict):
            yield f"unknown table [{key}]: options stand above all tables, and [about] is the only one"
        else:
            yield f"unknown key {key!r}{did_you_mean(key, keys)}; a recipe may hold {', '.join(keys)}"
    if not isinstance(about, dict):
        yield f"about must be a table, not {about!r}"
        return
    # The rest of it is for readers, but an option there would be ignored in silence.
    yield from (f"{key} in [about] is an option: write it above [about]" for key in about if key in keys)
