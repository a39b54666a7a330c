"""Requests: every option is one field, from which come the command line, recipes, checks of values
and keywords.
"""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvfold.convert import ConvertRequest, recipes
from kvfold.convert.console import PanelCommand, request_options
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_bytes, parse_size
from kvfold.convert.options import option, specs
from kvfold.convert.request import BenchRequest, DriftRequest, EvalRequest, SweepRequest


def refused(request=ConvertRequest, **options):
    """The error of a wrong request."""
    with pytest.raises(InputError) as caught:
        request(**options)
    return caught.value


def test_an_error_names_the_field_at_fault_and_every_further_problem():
    error = refused(model="m", out="o", to="gqa", samples=0, device="tpu", dtype="int8")
    assert (error.field, len(error.details)) == ("samples", 2)
    assert "--samples" in error.message
    received = pickle.loads(pickle.dumps(error.with_prefix("recipe")))  # as between processes
    assert (received.message[:8], received.field) == ("recipe: ", "samples")
    assert received.details == error.details
    assert InputError("damaged").field is None


@pytest.mark.parametrize("request_type", [DriftRequest, EvalRequest, SweepRequest])
def test_seeds_beyond_the_generator_s_are_refused(request_type):
    out = {} if request_type is SweepRequest else {"out": "o"}
    assert refused(request_type, model="m", seed=2**64, **out).field == "seed"


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("100", 100), ("7 kb", 7000)]
    + [(text, None) for text in ("", "0", "-1GB", "5 apples", "GB", "1e3", "9" * 400)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5_250_000_000, "5.2 GB"), (10**12, "1.0 TB")],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("calibration", "texts"),
    [
        (None, ()),
        ((), ()),
        ("a.txt", ("a.txt",)),
        (["a.txt"], ("a.txt",)),
        ([Path("a.txt"), "b.md"], ("a.txt", "b.md")),
    ],
)
def test_paths_become_text_and_one_text_or_several_are_texts(calibration, texts):
    request = ConvertRequest(Path("a") / "b", Path("c"), to="mqa", calibration=calibration)
    assert (request.model, request.out, request.calibration) == (str(Path("a") / "b"), "c", texts)


def test_defaults():
    request = ConvertRequest(model="m", out="o", to="mqa")
    assert (request.resolved_method, request.shard_bytes, request.calibrated) == (
        "principal",
        5 * 10**9,
        True,
    )
    assert not ConvertRequest(model="m", out="o", to="mqa", method="mean").calibrated
    assert ConvertRequest(model="m", out="o", to="mqa", method="mean", refine=10).calibrated


@pytest.mark.parametrize(
    ("options", "positions", "numbers"),
    [
        ({}, 8192, (128, 512)),
        ({}, 300, (219, 300)),
        ({"samples": 1}, 300, (2, 300)),
        ({"seq_len": 2048}, 300, (128, 2048)),
    ],
)
def test_automatic_lengths_keep_the_number_of_tokens(options, positions, numbers):
    """An explicit length stays, and is refused elsewhere if the model is too short for it."""
    sized = ConvertRequest(model="m", out="o", to="mqa", **options).resolve_length(positions)
    assert (sized.samples, sized.length) == numbers


WRONG = {
    "model": 3,
    "out": " ",
    "samples": 0,
    "seq_len": 1,
    "seed": 2**63,
    "refine": "often",
    "polish": -1,
}
WRONG |= {
    "device": "cude",
    "dtype": "tpu",
    "overwrite": "yes",
    "max_shard_size": "5 apples",
    "kv_heads": True,
}


@pytest.mark.parametrize(
    "options",
    [
        {"to": "gpa", "method": "best", "calibration": " ", "max_shard_size": "5", **WRONG},
        {"to": "gqa"},
        {"to": "gqa", "kv_heads": 2, "kv_rank": 8, "rope_dim": 0, "method": "svd"},
        {
            "to": "mqa",
            "kv_heads": 4,
            "method": "mean",
            "group": "similar",
            "calibration": "a.txt",
        },
        {"to": "mqa", "repeat_text": True},
        {"to": "mla", "kv_rank": 8},
        {
            "to": "mla",
            "budget": 64,
            "kv_rank": 8,
            "method": "svd",
            "group": "similar",
            "layout": "deepseek",
        },
        {"to": "mla", "budget": 64, "layout": "engine", "rotate_latent": True},
        {"to": "mla", "kv_rank": 8, "rope_dim": 8, "layout": "engine", "method": "svd"},
    ],
    ids=lambda options: " ".join(
        f"{name}={value}" for name, value in options.items() if name not in WRONG
    ),
)
def test_what_is_refused(options, told):
    told(refused(**{"model": "m", "out": "o", **options}))


def test_what_decides_the_result_is_recorded():
    def recorded(**options):
        return ConvertRequest(
            model="/home/someone/m", out="/tmp/o", to="mqa", quiet=True, **options
        ).result_options()

    assert (recorded()["to"], recorded()["method"]) == ("mqa", "principal")
    how = {
        "model",
        "out",
        "quiet",
        "device",
        "overwrite",
        "dry_run",
        "allow_growth",
        "trust_remote_code",
    }
    assert not how & set(recorded(device="cpu"))
    drawn = (
        {},
        {"method": "random"},
        {"method": "mean", "refine": 5},
        {"method": "mean", "polish": 5},
    )
    assert all("seed" in recorded(**options) for options in drawn)
    assert "seed" not in recorded(method="mean")
    latent = ConvertRequest(model="m", out="o", to="mla", kv_rank=8, rope_dim=8)
    assert latent.result_options()["layout"] == latent.resolved_layout == "free"


@pytest.mark.parametrize(
    ("request_type", "options"),
    [
        (DriftRequest, {"samples": 0, "seq_len": 1, "device": "gpu"}),
        (SweepRequest, {"refine": -1, "layout": "deepseek", "calibration": ["a.txt", "a.txt"]}),
        (EvalRequest, {"lengths": "8,many", "samples": 1, "retrieval": "no", "tasks": [3]}),
        (BenchRequest, {"contexts": [0], "batches": "x", "cache": "large"}),
        (BenchRequest, {"models": ["m"], "layers": 2}),
    ],
    ids=["drift", "sweep", "eval", "bench", "bench layers"],
)
def test_what_the_requests_of_measuring_commands_refuse(request_type, options, told):
    paths = {name: "m" for name in ("model", "out") if name in specs(request_type)}
    told(refused(request_type, **paths, **options))


def test_names_and_numbers_may_be_one_text_with_commas():
    request = EvalRequest("m", "o", tasks="piqa, arc_easy", lengths="256,512,256")
    assert (request.tasks, request.lengths) == (("piqa", "arc_easy"), (256, 512))
    assert EvalRequest("m", "o", lengths=[256]).lengths == (256,)
    assert BenchRequest(Path("a,b")).models == ("a,b",)


@dataclass(frozen=True, repr=False)
class Extended(ConvertRequest):
    """A conversion with one more option."""

    sharpness: int = option(3, help="How sharp.", panel="Target", minimum=1)


def test_a_field_is_an_option_a_key_of_recipes_and_a_rule(monkeypatch, tmp_path):
    requests = []

    @click.command(cls=PanelCommand)
    @request_options(Extended)
    def command(request):
        requests.append(request)

    shown = CliRunner().invoke(command, ["--help"]).output
    assert re.search(r"--sharpness INTEGER +How sharp\. +\[default: 3\]", shown)
    to = next(parameter for parameter in command.params if parameter.name == "to")
    assert [each.value for each in to.shell_complete(click.Context(command), "m")] == ["mqa", "mla"]
    CliRunner().invoke(
        command, ["m", "o", "--to", "mqa", "--sharpness", "5"], catch_exceptions=False
    )
    assert requests[0].sharpness == requests[0].result_options()["sharpness"] == 5
    assert refused(Extended, model="m", out="o", to="mqa", sharpness=0).field == "sharpness"
    monkeypatch.setattr(recipes, "ConvertRequest", Extended)
    (tmp_path / "sharp.toml").write_text('to = "mqa"\nsharpness = 7')
    assert recipes.recipe_request(str(tmp_path / "sharp.toml"), model="m", out="o").sharpness == 7
