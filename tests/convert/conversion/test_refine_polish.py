"""``--refine`` and ``--polish`` end to end."""

import re

import pytest
import torch
from helpers import checkpoints
from helpers.cases import mostly_slow
from helpers.checkpoints import assert_same_tensors, read_json, tensors
from helpers.forked import snapshot

from kvfold.convert import InputError
from kvfold.convert.conversion import memory, polishing
from kvfold.convert.data import demo_folder
from kvfold.convert.targets.mla.encode import CONSTANT, compute_latent_norm_weight
from kvfold.convert.training import budget
from kvfold.convert.training import polish as training

QUICK = {"samples": 4, "seq_len": 32}
MQA = {"to": "mqa", "group": "contiguous"}
LATENT = {"to": "mla", "kv_rank": 24, "rope_dim": 16}
GQA = {"to": "gqa", "kv_heads": 2, "group": "contiguous"}


def convert(out, model, **options):
    checkpoints.run_conversion(model, out, **{**QUICK, **options})
    return read_json(out / "kvfold.json")


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [
            LATENT,
            {"to": "mqa", "method": "mean"},
            {**LATENT, "rope_dim": 4, "layout": "engine", "refine": 1},
            {**LATENT, "method": "svd", "dtype": "float16"},
        ],
        4,
    ),
)
def test_polishing_brings_the_model_closer_and_changes_attention_alone(
    tiny_reader, tmp_path, options
):
    record = convert(tmp_path / "polished", tiny_reader, **options, polish=4)
    polish = record["polish"]
    assert (polish["steps"], polish["kept"]) == (4, 4)
    assert polish["sequences"] == 4 * budget.choose_batch_size(QUICK["seq_len"])
    assert polish["after"] < 0.99 * polish["before"]
    # the drift is of the files, without the last position of each sequence
    assert record["drift"]["kl"]["value"] == pytest.approx(polish["after"], rel=0.1)
    found = tensors(tmp_path / "polished")
    source = tensors(tiny_reader)
    for name, entry in record["tensors"].items():
        if entry["origin"] == "copied":
            assert torch.equal(found[name], source[entry["from"][0]])
    for layer in range(2) if "layout" not in options and options["to"] == "mla" else ():
        module = f"model.layers.{layer}.self_attn"
        assert found[f"{module}.kv_a_proj_with_mqa.bias"][23] == CONSTANT
        assert not found[f"{module}.kv_a_proj_with_mqa.weight"][23].any()
        weights = found[f"{module}.kv_a_layernorm.weight"].tolist()
        assert weights == [compute_latent_norm_weight(24)] * 23 + [0]
    card = (tmp_path / "polished" / "README.md").read_text()
    assert "attention was trained together for 4 steps" in card


def test_a_text_with_fewer_tokens_is_polished_on_again_only_when_asked_for(
    tiny_reader, tmp_path, out
):
    path = tmp_path / "short.txt"
    path.write_text(" ".join(map(str, range(900))))
    options = {**MQA, "calibration": str(path), "polish": "3k"}
    with pytest.raises(
        InputError, match=r"short\.txt: too little text: \d+ tokens .*, or add --repeat-text"
    ):
        convert(out, tiny_reader, **options)
    assert not out.exists()
    polish = convert(out, tiny_reader, **options, repeat_text=True)["polish"]
    assert polish["steps"] == 3
    assert 32 < polish["sequences"] < 3 * budget.choose_batch_size(QUICK["seq_len"])


def test_weights_that_get_no_better_stay_as_they_are(tiny_reader, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "_RATE", 1000.0)
    record = convert(tmp_path / "polished", tiny_reader, **MQA, polish=2, quiet=False)
    assert record["polish"]["kept"] == 0
    shown = capsys.readouterr().err.splitlines()
    estimate = next(line for line in shown if line.startswith("stages"))
    times = r"convert \d+ s, polish \d+ s, measure \d+ s, positions \d+ s: about \d+ s in all"
    assert re.search(times, estimate)
    lines = [line for line in shown if line.startswith("polished")]
    assert [line.split(":")[0] for line in lines] == ["polished 0/2 steps", "polished 2/2 steps"]
    convert(tmp_path / "plain", tiny_reader, **MQA)
    assert_same_tensors(tmp_path / "polished", tmp_path / "plain")
    assert "trained together" not in (tmp_path / "polished" / "README.md").read_text()


POLISHED = {**MQA, "polish": 5, "seq_len": 16}


@pytest.fixture(scope="module")
def unbroken(tiny_reader, tmp_path_factory):
    """The files of an unbroken run in rounds of two steps."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polishing, "POLISH_ROUND", 2)
        convert(out, tiny_reader, **POLISHED)
    return snapshot(out)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_round(tiny_reader, unbroken, out, monkeypatch):
    """Also where the teacher's states are computed for two steps at a time."""
    monkeypatch.setattr(polishing, "POLISH_ROUND", 2)
    monkeypatch.setattr(training, "BLOCK_STEPS", 2)
    backward = training.PolishTask.backward
    steps = []

    def counted(self, batch):
        if len(steps) == 3:
            raise RuntimeError("killed")
        backward(self, batch)
        steps.append(batch)

    with monkeypatch.context() as patch:
        patch.setattr(training.PolishTask, "backward", counted)
        with pytest.raises(RuntimeError, match="killed"):
            convert(out, tiny_reader, **POLISHED)
    assert len(steps) == 3
    steps += [None]
    monkeypatch.setattr(training.PolishTask, "backward", counted)
    convert(out, tiny_reader, **POLISHED)
    assert len(steps[steps.index(None) + 1 :]) == 3  # the third step once more
    assert snapshot(out) == unbroken


def test_polishing_in_less_memory_gives_the_same_weights(tmp_path, tiny_reader, monkeypatch):
    expected = convert(tmp_path / "whole", tiny_reader, **POLISHED)["polish"]
    monkeypatch.setattr(memory, "MOST_ACTIVATIONS", 0)
    run = training.PolishTask._run_layer
    dtypes = set()

    def run_and_note(task, layer, states):
        dtypes.add(layer.dtype)
        return run(task, layer, states)

    monkeypatch.setattr(training.PolishTask, "_run_layer", run_and_note)
    assert convert(tmp_path / "stored", tiny_reader, **POLISHED)["polish"] == expected
    assert dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("options", [GQA, LATENT])
def test_refinement_brings_a_trained_model_closer(tmp_path, options):
    options |= {"samples": 8, "seq_len": 64}
    plain = convert(tmp_path / "plain", demo_folder(), **options)
    refined = convert(tmp_path / "refined", demo_folder(), **options, refine=12)
    assert "refinement" not in plain
    assert [layer["steps"] for layer in refined["refinement"]] == [12] * 4
    assert all(layer["after"] <= layer["before"] for layer in refined["refinement"])
    assert refined["drift"]["kl"]["value"] < 0.9 * plain["drift"]["kl"]["value"]
