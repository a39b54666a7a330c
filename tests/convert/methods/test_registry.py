"""Methods and objectives plug in: one new file each, from the command line and from Python."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers.checkpoints import tensors

from kvfold.convert import ConvertRequest, InputError, cli, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.methods import registry
from kvfold.convert.methods.registry import methods_of, objectives, quick_method


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the toys on the path, as PYTHONPATH puts it, and what they register gone after a test."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    methods_of()
    for names in ("_methods", "_objectives"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))
    yield
    for module in ("toy_method", "toy_objective"):
        sys.modules.pop(module, None)


def test_the_methods_that_ship() -> None:
    assert methods_of("gqa") == methods_of("mqa") == ("principal", "mean", "first", "random")
    assert methods_of("mla") == ("principal", "svd")
    assert [quick_method(to) for to in ("gqa", "mla")] == ["mean", "svd"]
    assert "scores" in objectives()


def test_a_method_from_the_command_line(tmp_path) -> None:
    out, name = tmp_path / "out", "toy_method:loudest"
    call = ["convert", str(demo_folder()), str(out), "--to", "gqa", "--kv-heads", "2", "--method", name]
    done = CliRunner().invoke(cli.kvfold, call, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "method toy_method:loudest" in done.stdout
    assert json.loads((out / "kvfold.json").read_text())["request"]["method"] == name
    card = (out / "README.md").read_text()
    assert "Each group keeps its loudest head." in card
    assert f"--method {name}" in card
    keys = [tensors(folder)["model.layers.0.self_attn.k_proj.weight"].float() for folder in (demo_folder(), out)]
    heads = keys[0].view(2, 4, 32, -1)
    loudest = torch.stack([group[group.norm(dim=(1, 2)).argmax()] for group in heads])
    torch.testing.assert_close(keys[1].view(2, 32, -1), loudest)


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_biases_and_norms_stay_with_their_heads(tiny_family, tmp_path, family) -> None:
    name, options = "toy_method:loudest", {"to": "mqa", "quiet": True}
    convert_checkpoint(ConvertRequest(tiny_family(family), tmp_path / "out", method=name, **options))
    stored, kept = (tensors(folder) for folder in (tiny_family(family), tmp_path / "out"))
    place = "model.layers.0.self_attn.k_proj.weight"
    dims = len(kept[place])
    heads = stored[place].view(-1, dims, stored[place].shape[1])
    loudest = int((heads - kept[place]).abs().amax((1, 2)).argmin())
    beside = {"qwen2": ["k_proj.bias", "v_proj.bias"], "olmo2": ["k_norm.weight"]}[family]
    for name in (f"model.layers.0.self_attn.{end}" for end in beside):
        assert torch.equal(kept[name], stored[name].view(-1, dims)[loudest])


def test_a_method_from_python_may_start_a_refinement(tiny_reader, tmp_path) -> None:
    import toy_method  # noqa: F401  # registers its name

    text = {"samples": 4, "seq_len": 32, "refine": 2, "quiet": True}
    done = convert_checkpoint(ConvertRequest(tiny_reader, tmp_path / "out", to="mqa", method="loudest", **text))
    assert done.record["groups"] == [[list(range(8))]] * 2
    assert len(done.record["refinement"]) == 2


def test_an_objective_of_a_module(tiny_reader, tmp_path) -> None:
    options = {"to": "mqa", "samples": 4, "seq_len": 32, "group": "contiguous", "quiet": True}
    usual, named = (
        convert_checkpoint(ConvertRequest(tiny_reader, tmp_path / name, objective=objective, **options)).record
        for name, objective in (("usual", None), ("named", "toy_objective:nearest-keys"))
    )
    assert named["request"]["objective"] == "toy_objective:nearest-keys"
    assert "objective" not in usual["request"]
    before, after = tensors(tmp_path / "usual"), tensors(tmp_path / "named")
    keys, values = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    assert not torch.equal(after[keys], before[keys])
    torch.testing.assert_close(after[values], before[values])
    # Once its module is imported, its name is enough.
    assert ConvertRequest(tiny_reader, tmp_path, objective="nearest-keys", to="mqa").objective == "nearest-keys"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "no_such_file:toy"}, "--method no_such_file:toy: cannot import module 'no_such_file'"),
        ({"method": "toy_method:loudly"}, r"is not available with --to mqa; use one of .*did you mean loudest"),
        ({"objective": "score"}, r"--objective must be one of scores, or MODULE:NAME .did you mean scores"),
        ({"objective": "scores", "method": "mean"}, "--objective has no effect with --method mean"),
        ({"objective": "scores", "to": "mla", "budget": 48}, "--objective needs --to gqa or --to mqa"),
    ],
)
def test_names_are_checked_with_the_request(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ConvertRequest("MODEL", "OUT", **{"to": "mqa", **options})
