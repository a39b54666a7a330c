"""Methods and objectives plug in: one new file each, from the command line and from Python."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import read_json, run_conversion, tensors
from helpers.processes import run_kvfold

from kvfold.convert import ConvertRequest, InputError
from kvfold.convert.methods import registry
from kvfold.convert.methods.registry import list_methods

FEW = {"to": "mqa", "samples": 4, "seq_len": 32, "group": "contiguous"}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The folder of the toys on the path, as PYTHONPATH puts it, and what they register gone after
    a test.
    """
    monkeypatch.syspath_prepend(Path(__file__).parent)
    list_methods()
    for names in ("_methods", "_objectives"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))
    yield
    for module in ("toy_method", "toy_objective"):
        sys.modules.pop(module, None)


def test_a_method_of_a_module_on_the_command_line(shallow_demo, out):
    name = "toy_method:loudest"
    run_kvfold("convert", shallow_demo, out, "--to", "gqa", "--kv-heads", 2, "--method", name)
    assert read_json(out / "kvfold.json")["request"]["method"] == name
    card = (out / "README.md").read_text()
    assert "Each group keeps its loudest head." in card
    assert f"--method {name}" in card
    keys = [
        tensors(folder)["model.layers.0.self_attn.k_proj.weight"].float()
        for folder in (shallow_demo, out)
    ]
    heads = keys[0].view(2, 4, 32, -1)
    loudest = torch.stack([group[group.norm(dim=(1, 2)).argmax()] for group in heads])
    torch.testing.assert_close(keys[1].view(2, 32, -1), loudest)


def test_a_method_from_python_may_start_a_refinement(tiny_reader, out):
    import toy_method  # noqa: F401  # registers its name

    text = {"samples": 4, "seq_len": 32, "refine": 2}
    done = run_conversion(tiny_reader, out, to="mqa", method="loudest", **text)
    assert len(done.record["refinement"]) == 2


def test_an_objective_of_a_module_from_python(tiny_reader, tmp_path, out):
    run_conversion(tiny_reader, usual := tmp_path / "usual", **FEW)
    name = "toy_objective:nearest-keys"
    run_conversion(tiny_reader, out, objective=name, **FEW)
    assert read_json(out / "kvfold.json")["request"]["objective"] == name
    assert "objective" not in read_json(usual / "kvfold.json")["request"]
    before = tensors(usual)
    after = tensors(out)
    keys, values = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv")
    assert not torch.equal(after[keys], before[keys])
    torch.testing.assert_close(after[values], before[values])
    # Once its module is imported, its name is enough.
    request = ConvertRequest(tiny_reader, out, objective="nearest-keys", to="mqa")
    assert request.objective == "nearest-keys"


@pytest.mark.parametrize(("options", "message"), read_cases(__file__))
def test_names_are_checked_with_the_request(options, message):
    with pytest.raises(InputError, match=message):
        ConvertRequest("MODEL", "OUT", **{"to": "mqa", **options})
