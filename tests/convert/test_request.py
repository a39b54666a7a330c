"""Requests: every option is one field, from which come the command line, recipes and checks."""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers.cases import read_cases

from kvfold.convert import (
    BenchRequest,
    ConvertRequest,
    DriftRequest,
    EvalRequest,
)
from kvfold.convert.console import add_request_options
from kvfold.convert.errors import InputError
from kvfold.convert.options import collect_options, option


def refused(request=ConvertRequest, **options):
    """The error of a wrong request."""
    with pytest.raises(InputError) as caught:
        request(**options)
    return caught.value


def test_an_error_names_the_field_at_fault_and_every_further_problem():
    error = refused(model="m", out="o", to="gqa", samples=0, device="tpu", dtype="int8")
    assert (error.field, len(error.details)) == ("dtype", 2)
    assert "--dtype" in error.message
    received = pickle.loads(pickle.dumps(error.with_prefix("recipe")))  # as between processes
    assert (received.message[:8], received.field) == ("recipe: ", "dtype")
    assert received.details == error.details
    assert InputError("damaged").field is None


def test_paths_are_stored_as_text_and_lists_as_tuples():
    request = ConvertRequest(Path("a"), Path("c"), to="mqa", calibration=["d", Path("e")])
    assert (request.model, request.out, request.calibration) == ("a", "c", ("d", "e"))
    request = EvalRequest("m", "o", tasks="piqa, arc_easy", lengths="256,512,256")
    assert (request.tasks, request.lengths) == (("piqa", "arc_easy"), (256, 512))
    assert BenchRequest(Path("a,b")).models == ("a,b",)


@pytest.mark.parametrize(
    ("options", "positions", "samples", "length"),
    [
        ({}, 8192, 128, 512),
        ({}, 300, 219, 300),
        ({"seq_len": 2048}, 300, 128, 2048),
    ],
)
def test_automatic_lengths_keep_the_number_of_tokens(options, positions, samples, length):
    """An explicit length stays, and is refused elsewhere if the model is too short for it."""
    request = ConvertRequest(model="m", out="o", to="mqa", **options).resolve_auto_length(positions)
    assert (request.samples, request.calibration_length) == (samples, length)


CASES = read_cases(__file__)


@pytest.mark.parametrize(("field", "options"), CASES["conversions"])
def test_an_invalid_conversion_is_refused(field, options, told):
    error = refused(**{"model": "m", "out": "o", "to": "mqa", **options})
    assert error.field == field
    told(error)


@pytest.mark.parametrize(
    ("request_type", "field", "options"),
    [
        (DriftRequest, "samples", {"samples": 0}),
        (EvalRequest, "lengths", {"lengths": "8,many"}),
        (EvalRequest, "tasks", {"tasks": [3]}),
        (BenchRequest, "contexts", {"contexts": [0]}),
        (BenchRequest, "models", {}),
        (BenchRequest, "layers", {"models": ["m"], "layers": 2}),
    ],
)
def test_an_invalid_measurement_is_refused(request_type, field, options, told):
    paths = {name: "m" for name in ("model", "out") if name in collect_options(request_type)}
    error = refused(request_type, **paths, **options)
    assert error.field == field
    told(error)


def test_only_options_that_decide_the_result_are_recorded():
    def record(**options):
        paths = {"model": "/home/someone/m", "out": "/tmp/o"}
        return ConvertRequest(**paths, to="mqa", quiet=True, **options).collect_result_options()

    assert (record()["to"], record()["method"]) == ("mqa", "principal")
    assert not {"model", "out", "quiet", "device", "overwrite"} & set(record(device="cpu"))
    for seeded in ({}, {"method": "random"}, {"method": "mean", "refine": 5}):
        assert "seed" in record(**seeded)
    assert "seed" not in record(method="mean")
    latent = ConvertRequest("m", "o", to="mla", kv_rank=8, rope_dim=8)
    assert latent.collect_result_options()["layout"] == "free"


@dataclass(frozen=True)
class Extended(ConvertRequest):
    """A conversion with one more option."""

    sharpness: int = option(3, help="How sharp.", minimum=1)


def test_a_field_is_an_option_and_a_rule():
    requests = []

    @click.command()
    @add_request_options(Extended)
    def command(request):
        requests.append(request)

    shown = CliRunner().invoke(command, ["--help"]).output
    assert re.search(r"--sharpness N +How sharp\. +\[default: 3\]", shown)
    line = ["m", "o", "--to", "mqa", "--sharpness", "5"]
    CliRunner().invoke(command, line, catch_exceptions=False)
    assert requests[0].sharpness == requests[0].collect_result_options()["sharpness"] == 5
    assert refused(Extended, model="m", out="o", to="mqa", sharpness=0).field == "sharpness"
