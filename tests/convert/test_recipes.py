"""Recipes: those that ship, held against the shapes of their models and the README; merging with
options; refusals.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.cases import read_cases
from helpers.checkpoints import hub_config

from kvfold.convert import ConvertRequest, cli, convert_checkpoint, make_recipe_request
from kvfold.convert.commands.uptrain_command import uptrain
from kvfold.convert.conversion import convert
from kvfold.convert.recipes import list_recipe_names, read_recipe
from kvfold.convert.uptrain.uptrain_request import UptrainRequest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "convert" / "data" / "recipes"
README = (REPOSITORY / "recipes" / "README.md").read_text()
SCRIPT = ["accelerate", "launch", "--config_file", "convert/data/fsdp.yaml", "recipes/uptrain.py"]


@pytest.fixture(scope="module")
def shapes_of(tmp_path_factory):
    """A folder with a hub model's config: a dry run needs no more."""

    def folder(hub):
        made = tmp_path_factory.mktemp(hub.replace("/", "-"))
        (made / "config.json").write_text(json.dumps(hub_config(hub)))
        return made

    return folder


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def request_of(recipe, **overrides):
    return make_recipe_request(recipe, model="m", out="o", **overrides)


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_shipped_recipe_plans_and_saves_what_it_says(name, shapes_of, out):
    text = (FOLDER / f"{name}.toml").read_text()
    _, about = read_recipe(name)
    hub = about["model"]
    before = about["cached_before"]
    after = about["cached_after"]
    request = make_recipe_request(name, model=str(shapes_of(hub)), out=str(out), dry_run=True)
    plan = convert_checkpoint(request).plan
    assert (plan.cache_elements, plan.result.count_cache_elements()) == (before, after)
    assert about["saving"] == 1 - after / before
    assert f"# kvfold convert {hub} OUT --recipe {name} " in text
    assert f"--teacher {hub} " in about["uptrain"]


@pytest.mark.parametrize(("name", "overrides", "expected"), read_cases(__file__)["overrides"])
def test_an_override_displaces_what_cannot_stand_beside_it(name, overrides, expected):
    text = {"samples": 128, "seq_len": 512, "refine": "auto"}
    assert request_of(name, **overrides) == ConvertRequest(
        model="m", out="o", **{**text, **expected}
    )


def test_a_budget_gives_way_to_a_split_and_a_method_to_a_target(tmp_path):
    budget = write(tmp_path, 'to = "mla"\nbudget = 64\nmethod = "principal"')
    split = request_of(budget, kv_rank=32, rope_dim=32)
    assert (split.budget, split.kv_rank, split.method) == (None, 32, "principal")
    pooled = write(tmp_path, 'to = "mqa"\nmethod = "mean"\ngroup = "contiguous"')
    assert request_of(pooled, to="gqa", kv_heads=2).method == "mean"
    latent = request_of(pooled, to="mla", budget=64)
    assert (latent.method, latent.group) == (None, None)
    effort = write(tmp_path, 'to = "mqa"\neffort = "normal"')
    assert (request_of(effort).polish, request_of(effort, refine=10).polish) == ("100k", 0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('to = "MLA"\nkv_heads = "8"', "--to"),
        ('to = "mqa"\nseq_len = 8.0', "--seq-len"),
        ('to = "mqa"\nkv-heads = 8', "did you mean kv_heads"),
        ('to = "mqa"\nquiet = true', "quiet"),
        ('to = "mqa"\n[about]\nsamples = 3', "[about]"),
        ("samples = 3", "--to"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("kv_heads = " + "9" * 5000, "not valid TOML"),
        (f"to = 0x{'f' * 9000}", "to must be"),
        (f'to = "mqa"\nkv_rank = 0x{"f" * 9000}', "kv-rank must be"),
        ('to = "mqa"\nmethod = "antigravity:x"', "would import a module"),
        ('to = "mqa"\nobjective = "this:x"', "would import a module"),
    ],
)
def test_a_recipe_with_a_fault_is_refused(tmp_path, refused, text, named):
    with refused(named):
        request_of(write(tmp_path, text))
    assert not {"antigravity", "this"} & sys.modules.keys()


def test_only_a_file_or_the_name_of_a_recipe_is_accepted(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    for name in ("folder.toml", "llama-2-7b-gqa8", "  ", "a" * 5000, "nul\0"):
        meant = ["(did you mean llama-2-7b-gqa-8?)"] if name == "llama-2-7b-gqa8" else []
        with refused(*list_recipe_names(), *meant):
            request_of(name)
    (tmp_path / "binary.toml").write_bytes(b'to = "\xff"')
    with refused("binary.toml is not valid TOML"):
        request_of("binary.toml")


def test_a_file_needs_no_suffix_and_does_not_hide_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "llama-2-7b-mqa"):
        (tmp_path / name).write_text('to = "gqa"\nkv_heads = 2')
    assert request_of("mine").kv_heads == request_of("./llama-2-7b-mqa").kv_heads == 2
    assert request_of("llama-2-7b-mqa").to == "mqa"


def test_options_that_are_given_override_a_recipe_at_their_defaults_too(tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(convert, "convert_checkpoint", lambda request: requests.append(request))
    path = write(tmp_path, 'to = "gqa"\nkv_heads = 2\nseed = 3\nsamples = 2')
    with pytest.raises(SystemExit):
        cli.main(["convert", "m", "o", "--recipe", path, "--kv-heads", "4", "--seed", "0"])
    assert requests == [ConvertRequest("m", "o", to="gqa", kv_heads=4, samples=2)]


# recipes/README.md


def test_the_table_of_the_readme_lists_every_recipe():
    assert re.findall(r"^\| `([a-z0-9.-]+)` \|.*% \|$", README, re.MULTILINE) == list_recipe_names()


@pytest.mark.parametrize("name", list_recipe_names())
def test_an_uptraining_line_is_one_that_the_script_takes(name):
    _, about = read_recipe(name)
    line = shlex.split(about["uptrain"])
    assert line[: len(SCRIPT)] == SCRIPT
    assert all((REPOSITORY / file).is_file() for file in SCRIPT[3:])
    taken = uptrain.make_context("uptrain", line[len(SCRIPT) :]).params
    assert (taken["model"], taken["out"], taken["text"]) == ("OUT", "UPTRAINED", "FILE")
    assert taken["teacher"] == about["model"]
    assert taken.pop("json_file") is None
    assert UptrainRequest(**taken).seq_len <= hub_config(about["model"])["max_position_embeddings"]


def test_the_recipe_that_the_readme_shows_is_one(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.toml").write_text(shown)
    assert make_recipe_request(str(tmp_path / "mine.toml"), model="m", out="o").budget == 576
