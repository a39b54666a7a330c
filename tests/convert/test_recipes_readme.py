"""``recipes/README.md`` and the launch lines of the recipes, held against the code."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from kvfold.convert import ConvertRequest, recipe_request
from kvfold.convert.options import run_only, specs
from kvfold.convert.recipes import read_recipe, recipe_names
from kvfold.convert.uptrain.command import uptrain
from kvfold.convert.uptrain.request import UptrainRequest

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
README = (FOLDER / "README.md").read_text()
CONFIGS = json.loads(Path(__file__).with_name("recipe_configs.json").read_text())
SCRIPT = ["accelerate", "launch", "--config_file", "recipes/fsdp.yaml", "recipes/uptrain.py"]


def label(options):
    kinds = {"gqa": "GQA-{kv_heads}", "mqa": "MQA", "mla": "MLA {kv_rank} + {rope_dim}"}
    return kinds[options["to"]].format(**options)


@pytest.mark.parametrize("name", recipe_names())
def test_the_table_lists_every_recipe(name):
    recipe = read_recipe(name)
    about = recipe.about
    cached = f"{about['cached_before']} to {about['cached_after']}"
    row = f"| `{name}` | `{about['model']}` | {label(recipe.options)} | {cached} | {100 * about['saving']:.1f} % |"
    assert row in README.splitlines()


def test_the_table_lists_nothing_else():
    assert re.findall(r"^\| `([a-z0-9.-]+)` \|.*%", README, re.MULTILINE) == recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_an_uptraining_line_is_one_that_the_script_takes(name):
    about = read_recipe(name).about
    line = shlex.split(about["uptrain"])
    assert line[: len(SCRIPT)] == SCRIPT
    assert all((FOLDER.parent / file).is_file() for file in SCRIPT[3:])
    taken = uptrain.make_context("uptrain", line[len(SCRIPT) :]).params
    assert (taken["model"], taken["out"], taken["text"]) == ("OUT", "UPTRAINED", "FILE")
    assert taken["teacher"] == about["model"]
    assert taken.pop("json_file") is None
    assert UptrainRequest(**taken).seq_len <= CONFIGS[about["model"]]["max_position_embeddings"]


def test_the_line_of_the_readme_is_that_of_a_recipe():
    shown = next(block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "/uptrain.py" in block)
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(read_recipe("llama-2-7b-gqa-8").about["uptrain"])


def test_the_recipe_that_the_readme_shows_is_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.toml").write_text(shown)
    assert recipe_request(str(tmp_path / "mine.toml"), model="m", out="o").budget == 576
    keys = set(specs(ConvertRequest)) - run_only(ConvertRequest)
    assert keys == set(re.findall(r"`(\w+)`", re.search(r"spells them:(.*?)\. A path", README, re.DOTALL)[1]))


def test_the_curve_is_the_one_measured():
    measured = json.loads((FOLDER / "results" / "curve.json").read_text())
    first, *rows = measured["rows"]
    for row in rows:
        assert row["excess"] == pytest.approx(math.log(row["perplexity"] / first["perplexity"]), abs=1e-9)
        assert f"{row['excess']:+.4f}" in README
    assert measured["date"] in README
    assert measured["machine"]["processor"] in README
    assert all(measured["versions"][package].split("+")[0] in README for package in ("torch", "transformers"))
