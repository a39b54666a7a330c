"""``--refine`` end to end, on the small trained checkpoint that ships with kvfold."""

import json

import pytest
import torch
from helpers.checkpoints import tensors

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.conversion import latent
from kvfold.convert.data import demo_folder
from kvfold.convert.targets.mla.tensors import CONSTANT, norm_weight

LITTLE = {"samples": 4, "seq_len": 32, "quiet": True}
GQA = {"to": "gqa", "kv_heads": 2, "group": "contiguous"}
LATENT = {"to": "mla", "kv_rank": 8, "rope_dim": 4}


def convert(out, model, **options):
    convert_checkpoint(ConvertRequest(model=str(model), out=str(out), **{**LITTLE, **options}))
    return json.loads((out / "kvfold.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("options", [GQA, {"to": "mla", "kv_rank": 24, "rope_dim": 16}], ids=["gqa", "mla"])
def test_refinement_brings_a_trained_model_closer(tmp_path, options):
    options |= {"samples": 24, "seq_len": 64}
    plain = convert(tmp_path / "plain", demo_folder(), **options)
    refined = convert(tmp_path / "refined", demo_folder(), **options, refine=20)
    assert "refinement" not in plain
    assert [layer["steps"] for layer in refined["refinement"]] == [20] * 4
    assert all(layer["after"] <= layer["before"] for layer in refined["refinement"])
    assert refined["drift"]["kl"]["value"] < 0.9 * plain["drift"]["kl"]["value"]


@pytest.mark.parametrize(
    "options",
    [{"to": "mqa", "method": "mean"}, {**LATENT, "method": "svd"}, {**LATENT, "layout": "engine"}],
    ids=["mean", "svd", "engine"],
)
def test_any_start_can_be_refined(tiny_reader, tmp_path, options, monkeypatch):
    monkeypatch.setattr(latent, "_TRIAL_STEPS", 1)
    first = convert(tmp_path / "out", tiny_reader, **options, refine=6)["refinement"][0]
    assert first["kept"] == 6
    assert first["after"] < first["before"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_constant_channel_stays_what_it_is(tiny_reader, tmp_path, dtype):
    record = convert(tmp_path / "out", tiny_reader, **LATENT, dtype=dtype, q_rank=16, refine=6)
    assert record["refinement"][0]["kept"]
    found = tensors(tmp_path / "out")
    generator = torch.Generator().manual_seed(0)
    for layer in range(4):
        for projection, norm, rank in (("kv_a_proj_with_mqa", "kv_a", 8), ("q_a_proj", "q_a", 16)):
            module = f"model.layers.{layer}.self_attn"
            weight, bias = (found[f"{module}.{projection}.{kind}"].float() for kind in ("weight", "bias"))
            gain = found[f"{module}.{norm}_layernorm.weight"].float()
            assert bias[rank - 1] == CONSTANT
            assert not weight[rank - 1].any()
            assert gain.tolist() == [norm_weight(rank)] * rank
            inputs = torch.randn(64, weight.shape[1], generator=generator)
            latent = (torch.nn.functional.linear(inputs, weight) + bias)[:, : rank - 1]
            # what the norm sees beside the constant; its relative effect is half of this
            assert float(latent.square().sum(1).mean()) / CONSTANT**2 < 2e-4


def test_equal_requests_give_equal_bytes_and_the_error_of_every_layer_is_printed(tiny_reader, tmp_path, capsys):
    told = []
    for name, quiet in (("one", False), ("two", True)):
        convert(tmp_path / name, tiny_reader, **GQA, refine=1, quiet=quiet)
        told.append(capsys.readouterr().err)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    lines = [line for line in told[0].splitlines() if line.startswith("refined layer")]
    assert [line.split(":")[0] for line in lines] == [f"refined layer {n}/4" for n in (1, 2, 3, 4)]
    assert " error 0." in lines[0]
    assert " -> 0." in lines[0]
    assert told[1] == ""
