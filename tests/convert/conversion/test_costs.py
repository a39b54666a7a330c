"""The costs of a conversion from shapes alone, and ``kvfold plan``."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfold.convert.conversion.costs import Machine, costs_of, layer_flops
from kvfold.convert.conversion.known_shapes import shape_checkpoint
from kvfold.convert.conversion.plan import Plan, make_plan
from kvfold.convert.conversion.plan_command import plan as command
from kvfold.convert.errors import InputError
from kvfold.convert.request import ConvertRequest

RESULTS, SHAPES = Path(__file__).parents[3] / "recipes" / "results", ("llama-2-7b", "llama-2-13b")


def plan(shape: str = "llama-2-7b", **options) -> Plan:
    request = ConvertRequest(model=shape, out="OUT", **{"to": "gqa", "kv_heads": 8, **options})
    return make_plan(request, shape_checkpoint(shape))


def test_a_layer_costs_two_operations_per_parameter_and_its_scores() -> None:
    made = plan()
    layer = [t for t in made.model.tensors.values() if t.name.startswith("model.layers.0.") and len(t.shape) == 2]
    parameters = sum(math.prod(tensor.shape) for tensor in layer)
    assert layer_flops(made, 512) == pytest.approx(2 * parameters + 4 * 4096 * 512, rel=1e-3)


def test_methods_that_read_no_text_only_move_bytes() -> None:
    made = plan(method="mean")
    costs = costs_of(made)
    assert not any(vars(costs.work).values())
    assert costs.written == sum(tensor.nbytes for tensor in made.layout.tensors)
    assert costs.read == sum(info.nbytes for info in made.checkpoint.tensors.values())


def test_the_estimate_of_moving_bytes_is_what_a_run_took() -> None:
    measured = json.loads((RESULTS / "convert_llama2_7b.json").read_text())["processes"]["1"]
    costs = costs_of(plan(method="mean"))
    seconds = costs.seconds(Machine(1, 1e14, 1e11, 1e9))
    assert seconds["copying and hashing"] + seconds["starting"] == pytest.approx(measured["cpu_seconds"], rel=0.05)
    assert measured["peak_bytes"]["all"] < costs.memory < 1.5 * measured["peak_bytes"]["all"]
    assert costs_of(plan()).seconds(Machine(1, 1e14, 1e11, 1e9))["starting"] == 0  # behind it, when it is estimated


def test_factoring_weights_takes_memory_and_time_by_width() -> None:
    made = [plan(shape, to="mla", kv_heads=None, kv_rank=256, rope_dim=64, method="svd") for shape in SHAPES]
    small, large = (costs_of(each) for each in made)
    assert large.work.fits / small.work.fits > (5120 / 4096) ** 2.5 * 40 / 32
    assert large.memory > small.memory > 1.226e9 * 2  # measured at half of that width
    assert costs_of(made[0], 8).work.fits == small.work.fits / 8  # each process factors the layers that it writes


def test_processes_share_the_passes_but_not_the_fits() -> None:
    made = plan(to="mla", kv_heads=None, kv_rank=512, rope_dim=64, refine=100)
    one, many = (costs_of(made, count).seconds(Machine(count, 1e14, 1e11, 1e9)) for count in (1, 16))
    assert many["forward passes"] == pytest.approx(one["forward passes"] / 16)
    assert many["refining"] == pytest.approx(one["refining"] / 8)  # the sequences of a step
    assert many["fitting"] == one["fitting"] > 0
    assert costs_of(made, 16).memory < costs_of(made).memory


def test_text_refinement_and_splits_count() -> None:
    made = plan(to="mla", kv_heads=None, budget=576, refine=50)
    work = costs_of(made).work
    longer = costs_of(replace(made, request=replace(made.request, samples=256, refine=100))).work
    assert longer.walk == pytest.approx(2 * work.walk, rel=0.1)
    assert 1.5 < longer.refinement / work.refinement < 2.1
    assert work.trials > 0
    assert costs_of(plan()).work.trials == 0


def test_a_resumed_run_counts_the_fits_that_are_left() -> None:
    made = plan(refine=100)
    whole, left, none = (costs_of(made, finished=finished).work for finished in (0, 24, 32))
    assert (left.fits, left.refinement) == (whole.fits / 4, whole.refinement / 4)
    assert none.fits == none.refinement == 0
    assert whole.walk > left.walk > none.walk > whole.walk / 2  # the text goes through every layer again


def test_polishing_counts_by_its_steps_in_one_process_and_holds_the_model() -> None:
    made = plan()
    brief, long = (costs_of(replace(made, request=replace(made.request, polish=steps))) for steps in (200, 400))
    assert long.work.polishing == pytest.approx(2 * brief.work.polishing, rel=0.1)
    step = 200 * 1024 * 3 * 32 * layer_flops(made, 512)  # 1024 tokens forward and back through 32 layers
    assert 0.5 * step < brief.work.polishing < 1.5 * step
    one, many = (brief.seconds(Machine(count, 1e14, 1e11, 1e9, 2e14))["polishing"] for count in (1, 8))
    assert one == many == brief.work.polishing / 2e14
    assert brief.memory > costs_of(made).memory
    assert costs_of(made).work.polishing == 0


def test_the_command_prints_numbers(tmp_path) -> None:
    line = ["--shape", "llama-3-405b", "--to", "mla", "--kv-rank", "512", "--rope-dim", "64", "--gpus", "8"]
    done = CliRunner().invoke(command, [*line, "--json", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    assert "llama-3-405b -> MLA 512+64" in done.output
    assert re.search(r"time with 8 processes: \d+ h \(.*fitting \d+ h by the first process alone, ", done.output)
    assert re.search(r"operations: walk [\d.]+ PFLOP, .*fits [\d.]+ PFLOP", done.output)
    assert not re.search(r"\de[+-]?\d", done.output)
    assert "polishing" not in done.output
    assert "polishing" in CliRunner().invoke(command, [*line, "--polish", "auto"]).output
    assert json.loads((tmp_path / "plan.json").read_text())["bytes_written"] > 8e11


def test_a_shape_and_a_model_exclude_each_other() -> None:
    for line in ([], ["model", "--shape", "llama-2-7b"]):
        with pytest.raises(InputError, match="expected MODEL or a --shape, one of both"):
            CliRunner().invoke(command, ["--to", "mqa", *line], catch_exceptions=False)
    with pytest.raises(InputError, match=r"--shape llama-2-8b: expected one of .*did you mean"):
        shape_checkpoint("llama-2-8b")
