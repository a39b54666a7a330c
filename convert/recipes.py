"""Recipes: TOML files with ``kvfold convert`` options for a model and a target.

Keys are option names with underscores, as in ``ConvertRequest`` and ``kvfold.json``; the table
``[about]`` is for readers and has no effect. The shipped recipes are in ``data/recipes``.
"""

import os
import tomllib
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.files import read_bytes
from kvfold.convert.errors import (
    InputError,
    format_option,
    option_error,
    suggest_name,
    summarize_error,
)
from kvfold.convert.formatting import format_table
from kvfold.convert.methods.registry import list_methods
from kvfold.convert.options import collect_options
from kvfold.convert.request import ConvertRequest

_RECIPE_FOLDER = Path(__file__).resolve().parent / "data" / "recipes"

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


def list_recipe_names() -> list[str]:
    """The names of the recipes that ship with kvfold, sorted."""
    return sorted(path.stem for path in _RECIPE_FOLDER.glob("*.toml"))


def list_recipes() -> list[dict[str, Any]]:
    """The recipes that ship with kvfold as JSON values: name, ``options``, and the entries of the
    table ``about``.
    """
    recipes = []
    for name in list_recipe_names():
        options, about = read_recipe(name)
        recipes.append({"name": name, "options": options, **about})
    return recipes


def format_recipes() -> str:
    """A table of the shipped recipes as text: name, model, and KV-cache elements per token per
    layer before and after.
    """
    keys = ("name", "model", "cached_before", "cached_after")
    rows = [["recipe", "model", "before", "after"]]
    rows += [[str(recipe.get(key, "")) for key in keys] for recipe in list_recipes()]
    note = "before, after: KV-cache elements per token per layer"
    command = "kvfold convert MODEL OUT --recipe NAME uses one"
    return "\n".join([*format_table(rows), "", note, command])


def make_recipe_request(recipe: str, **overrides: Any) -> ConvertRequest:
    """The conversion request that a recipe describes (a shipped name or a FILE.toml); ``overrides``
    replace its values.

    ``overrides`` are fields of ``ConvertRequest``, including ``model`` and ``out``. An override of
    the target, the split or the training removes the recipe's values that are incompatible with it.
    Raises InputError.

    >>> options = {"model": "MODEL", "out": "OUT", "kv_rank": 448}
    >>> request = make_recipe_request("llama-2-7b-mla-512-64", **options)
    >>> request.kv_rank, request.rope_dim
    (448, 64)
    """
    options, _ = read_recipe(recipe)
    given = {name for name, value in overrides.items() if value is not None}
    displaced = {name for override in given for name in _DISPLACES.get(override, ())} - given
    to = overrides.get("to")
    if to not in (None, options.get("to")):
        specs = collect_options(ConvertRequest)
        displaced |= {name for name in specs if to not in (specs[name].targets or (to,))}
        if options.get("method") not in list_methods(to):
            displaced.add("method")
    values = {name: value for name, value in options.items() if name not in displaced}
    try:
        return ConvertRequest(**{"to": None, **values, **overrides})
    except InputError as error:
        raise error.with_prefix(f"--recipe {recipe}") from None


def read_recipe(recipe: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options in a shipped recipe or a recipe file, by field of `ConvertRequest`, and its table
    ``about`` (model, saving, uptraining command). Raises InputError if there is no such recipe, or
    if it contains anything else.
    """
    names = list_recipe_names()
    # Names come first, so that a file with the same name in the current folder does not change
    # their meaning.
    path = _RECIPE_FOLDER / f"{recipe}.toml" if recipe in names else Path(recipe)
    if not os.path.isfile(path):
        raise option_error(
            "recipe",
            recipe,
            f"is neither a shipped recipe{suggest_name(recipe, names)} nor a file; use a FILE.toml"
            f" or one of {', '.join(names)}",
        )
    try:
        options = tomllib.loads(read_bytes(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also of numbers with too many digits
        raise option_error(
            "recipe", recipe, f"is not valid TOML: {summarize_error(error)}; correct the file"
        ) from error
    for name in ("method", "objective"):
        if ":" in str(options.get(name)):  # whoever wrote the recipe would choose what is run
            raise option_error(
                "recipe",
                recipe,
                f": {name} = {options[name]!r} would import a module; pass {format_option(name)}"
                " MODULE:NAME on the command line, and remove it from the file",
            )
    about = options.pop("about", {})
    specs = {name: spec for name, spec in collect_options(ConvertRequest).items() if not spec.runs}
    # Options in [about] would be silently ignored.
    if not isinstance(about, dict) or about.keys() & specs.keys():
        raise option_error(
            "recipe", recipe, ": [about] must be a table without options; write options above it"
        )
    for key in options.keys() - specs.keys():
        raise option_error(
            "recipe",
            recipe,
            f": unknown key {key!r}{suggest_name(key, specs)}; a recipe may contain"
            f" {', '.join(specs)}",
        )
    return options, about
