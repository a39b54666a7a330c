"""Recipes: TOML files with ``kvfold convert`` options for a model and a target.

Keys are option names with underscores, as in ``ConvertRequest`` and ``kvfold.json``; the table
``[about]`` is for readers and has no effect. The shipped recipes are in ``data/recipes``.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError, did_you_mean, one_line, option_error
from kvfold.convert.formatting import format_table
from kvfold.convert.methods.registry import methods_of
from kvfold.convert.options import specs, value_problems
from kvfold.convert.request import ConvertRequest

_RECIPE_FOLDER = Path(__file__).resolve().parent / "data" / "recipes"
_LARGEST_RECIPE = 1 << 20  # bytes

# Recipe values that an overriding option displaces, because both specify the split of the cache, or
# the training.
_DISPLACES = {
    "budget": ("kv_rank", "rope_dim"),
    "kv_rank": ("budget",),
    "rope_dim": ("budget",),
    "effort": ("refine", "polish", "repeat_text"),
    "refine": ("effort",),
    "polish": ("effort",),
}


@dataclass(frozen=True)
class Recipe:
    """``options`` are keyed by ``ConvertRequest`` field; ``about`` has model, saving, uptraining
    command, etc.
    """

    origin: str
    options: Mapping[str, Any]
    about: Mapping[str, Any]


def recipe_names() -> list[str]:
    """Sorted names of the shipped recipes."""
    return sorted(path.stem for path in _RECIPE_FOLDER.glob("*.toml"))


def recipe_list() -> list[dict[str, Any]]:
    """The shipped recipes as JSON values: each one's name, ``options``, and the entries of its
    ``about``.
    """
    read = {name: read_recipe(name) for name in recipe_names()}
    return [
        {"name": name, "options": dict(recipe.options), **recipe.about}
        for name, recipe in read.items()
    ]


def recipe_table() -> str:
    """A table of the shipped recipes: name, model, and KV-cache elements per token per layer before
    and after.
    """
    keys = ("name", "model", "cached_before", "cached_after")
    rows = [["recipe", "model", "cached before", "after"]]
    rows += [[str(listed.get(key, "")) for key in keys] for listed in recipe_list()]
    told = "kvfold convert MODEL OUT --recipe NAME; cached: KV-cache elements per token per layer"
    return "\n".join([*format_table(rows, left=(0, 1)), "", told])


def recipe_request(recipe: str, **overrides: Any) -> ConvertRequest:
    """The request of ``recipe`` (a name or a FILE.toml), with ``overrides`` in place of its values.

    ``overrides`` are fields of ``ConvertRequest``, including ``model`` and ``out``. An override of
    the target, the split or the training removes the recipe's values that are incompatible with it.
    Raises InputError.

    >>> request = recipe_request("llama-2-7b-mla-512-64", model="MODEL", out="OUT", kv_rank=448)
    >>> request.kv_rank, request.rope_dim
    (448, 64)
    """
    read = read_recipe(recipe)
    overridden = {name for name, value in overrides.items() if value is not None}
    displaced = {other for name in overridden for other in _DISPLACES.get(name, ())} - overridden
    if "to" in overridden and overrides["to"] != read.options.get("to"):
        to = overrides["to"]
        displaced |= {
            name
            for name, spec in specs(ConvertRequest).items()
            if spec.targets and to not in spec.targets
        }
        if read.options.get("method") not in methods_of(to):
            displaced.add("method")
    values = {
        name: value for name, value in read.options.items() if name not in displaced
    } | overrides
    if values.get("to") is None:
        way_out = 'add a line such as to = "mqa" (or "gqa", "mla"), or use --to'
        raise InputError(f"{read.origin} has no target; {way_out}")
    try:
        return ConvertRequest(**values)
    except InputError as error:
        raise error.with_prefix(f"with {read.origin}") from None


def read_recipe(recipe: str) -> Recipe:
    """The shipped recipe called ``recipe``, or the one in the file ``recipe``. Raises InputError if
    it is not valid.
    """
    known = recipe_names()
    path = Path(recipe)
    origin = recipe
    # Names come first, so that a file with the same name in the current folder does not change
    # their meaning.
    if recipe in known:
        path = _RECIPE_FOLDER / f"{recipe}.toml"
        origin = f"recipe {recipe}"
    elif (
        path.suffix != ".toml"
        and len(path.parts) < 2
        and not (recipe.strip() and os.path.exists(path))
    ):
        hint = did_you_mean(recipe, known)
        known_names = f"use a FILE.toml or one of {', '.join(known)}"
        message = f"--recipe {recipe!r} is neither a shipped recipe{hint} nor a file; {known_names}"
        raise InputError(message, field="recipe")
    elif not os.path.exists(path):
        ships = f"use the shipped recipe with --recipe {path.stem}"
        raise option_error(
            "recipe", recipe, f": no such file; {ships if path.stem in known else 'check the path'}"
        )
    content = _parsed(path, origin)
    about = content.pop("about", {})
    if problems := list(_problems(content, about)):
        raise InputError(problems[0], problems[1:]).with_prefix(origin)
    return Recipe(origin, content, about)


def _parsed(path: Path, origin: str) -> dict[str, Any]:
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise InputError(
            f"{origin} must be a TOML file, not {kind}; use a FILE.toml or the name of a shipped"
            " recipe"
        )
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_RECIPE + 1)
        if len(data) > _LARGEST_RECIPE:
            raise InputError(
                f"{origin} must be at most {_LARGEST_RECIPE >> 20} MiB; check that it is a recipe"
            )
        text = data.decode("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise InputError(
            f"{origin}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} must be UTF-8 text, but byte {error.start} is invalid; convert the file to"
            " UTF-8"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # also for numbers with more digits than Python converts
        reason = one_line(error).replace(
            "at end of document", f"at line {len(text.splitlines())}, the last line"
        )
        raise InputError(f"{origin} is not valid TOML: {reason}; correct the file") from error


def _problems(options: Mapping[str, Any], about: Any) -> Iterator[str]:
    """A sentence for each invalid key or value in a recipe."""
    keys = {name: spec for name, spec in specs(ConvertRequest).items() if not spec.runs}
    for key, value in options.items():
        if key in keys:
            normalized = keys[key].normalize(value)
            yield from (message for _, message in value_problems(keys, {key: normalized}))
        elif key in specs(ConvertRequest):
            yield (
                f"{key!r} says where or how to run, which a recipe must not; use it on the command"
                " line instead"
            )
        elif isinstance(value, dict):
            yield f"unknown table [{key}]; [about] is the only table, and options must be above it"
        else:
            yield (
                f"unknown key {key!r}{did_you_mean(key, keys)}; a recipe may contain"
                f" {', '.join(keys)}"
            )
    if not isinstance(about, dict):
        yield f"'about' must be a table, not {about!r}; write its entries below a line [about]"
        return
    # Other entries are for readers, but an option in [about] would be silently ignored.
    for key in about:
        if key in keys:
            yield f"{key!r} is an option, which has no effect in [about]; write it above [about]"
