"""Recipes: TOML files with ``kvfold convert`` options for a model and a target.

Keys are option names with underscores, as in ``ConvertRequest`` and ``kvfold.json``; the table
``[about]`` is for readers and has no effect. The shipped recipes are in ``data/recipes``.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError, shorten, suggest_name, summarize_error
from kvfold.convert.formatting import format_table
from kvfold.convert.methods.registry import methods_of
from kvfold.convert.options import collect_options
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


def list_recipe_names() -> list[str]:
    """Sorted names of the shipped recipes."""
    return sorted(path.stem for path in _RECIPE_FOLDER.glob("*.toml"))


def list_recipes() -> list[dict[str, Any]]:
    """The shipped recipes as JSON values: each one's name, ``options``, and the entries of its
    ``about``.
    """
    listed = []
    for name in list_recipe_names():
        recipe = read_recipe(name)
        listed.append({"name": name, "options": dict(recipe.options), **recipe.about})
    return listed


def format_recipes() -> str:
    """A table of the shipped recipes: name, model, and KV-cache elements per token per layer before
    and after.
    """
    keys = ("name", "model", "cached_before", "cached_after")
    rows = [["recipe", "model", "before", "after"]]
    rows += [[str(recipe.get(key, "")) for key in keys] for recipe in list_recipes()]
    note = "before, after: KV-cache elements per token per layer"
    command = "kvfold convert MODEL OUT --recipe NAME uses one"
    return "\n".join([*format_table(rows), "", note, command])


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
    given = {name for name, value in overrides.items() if value is not None}
    displaced = {name for override in given for name in _DISPLACES.get(override, ())} - given
    to = overrides.get("to")
    if to not in (None, read.options.get("to")):
        for name, spec in collect_options(ConvertRequest).items():
            if spec.targets and to not in spec.targets:
                displaced.add(name)
        if read.options.get("method") not in methods_of(to):
            displaced.add("method")
    values = {name: value for name, value in read.options.items() if name not in displaced}
    values |= overrides
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
    names = list_recipe_names()
    # Names come first, so that a file with the same name in the current folder does not change
    # their meaning.
    if recipe in names:
        path = _RECIPE_FOLDER / f"{recipe}.toml"
        origin = f"recipe {recipe}"
    elif os.path.isfile(recipe):
        path = Path(recipe)
        origin = recipe
    else:
        hint = suggest_name(recipe.removesuffix(".toml"), names)
        unknown = f"--recipe {shorten(recipe)} is neither a shipped recipe{hint} nor a file"
        way_out = f"use a FILE.toml or one of {', '.join(names)}"
        raise InputError(f"{unknown}; {way_out}", field="recipe")
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_RECIPE).decode("utf-8-sig")
        content = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # also of numbers with too many digits
        raise InputError(
            f"{origin} is not valid TOML: {summarize_error(error)}; correct the file"
        ) from error
    about = content.pop("about", {})
    specs = {name: spec for name, spec in collect_options(ConvertRequest).items() if not spec.runs}
    problems = []
    for key in content.keys() - specs.keys():
        similar = suggest_name(key, specs)
        problems.append(f"unknown key {key!r}{similar}; a recipe may contain {', '.join(specs)}")
    # Options in [about] would be silently ignored.
    if not isinstance(about, dict) or about.keys() & specs.keys():
        problems.append("[about] must be a table without options; write options above it")
    if problems:
        raise InputError(f"{origin}: {problems[0]}", problems[1:], field="recipe")
    return Recipe(origin, content, about)
