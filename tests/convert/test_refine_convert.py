"""``--refine`` end to end, on the small trained checkpoint that ships with kvfold."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

QUICK = {"samples": 16, "seq_len": 64, "quiet": True}
LATENT = {"to": "mla", "kv_rank": 24, "rope_dim": 16}


def convert(out, **options):
    convert_checkpoint(ConvertRequest(model=str(demo_folder()), out=str(out), **{**QUICK, **options}))
    return json.loads((out / "kvfold.json").read_text())


def tensors(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    "options",
    [
        {"to": "gqa", "kv_heads": 2, "group": "contiguous"},
        {"to": "mqa", "method": "mean"},
        LATENT,
        {**LATENT, "method": "svd"},
        {**LATENT, "layout": "engine"},
    ],
    ids=["gqa", "mqa-mean", "mla", "mla-svd", "mla-engine"],
)
def test_refinement_brings_the_model_closer(tmp_path, options):
    weights_only = options.get("method") in ("mean", "svd")
    refined = convert(tmp_path / "refined", **options, refine=20)
    assert len(refined["refinement"]) == 4
    for layer in refined["refinement"]:
        assert layer["after"] <= layer["before"]
        assert layer["steps"] == 20
    assert any(layer["kept"] for layer in refined["refinement"])
    if not weights_only:
        plain = convert(tmp_path / "plain", **options)
        assert "refinement" not in plain
        assert refined["drift"]["kl"]["value"] < 0.8 * plain["drift"]["kl"]["value"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_constant_channel_stays_what_it_is(tmp_path, dtype):
    options = {**LATENT, "dtype": dtype, "q_rank": 48}
    convert(tmp_path / "plain", **options)
    convert(tmp_path / "refined", **options, refine=15)
    plain, refined = tensors(tmp_path / "plain"), tensors(tmp_path / "refined")
    for layer in range(4):
        module = f"model.layers.{layer}.self_attn"
        for projection, norm, channel in (("kv_a_proj_with_mqa", "kv_a", 23), ("q_a_proj", "q_a", 47)):
            weight, bias = f"{module}.{projection}.weight", f"{module}.{projection}.bias"
            gain = f"{module}.{norm}_layernorm.weight"
            assert torch.equal(refined[gain], plain[gain])
            assert refined[bias][channel] == plain[bias][channel] >= 64
            assert not refined[weight][channel].any()
            assert not torch.equal(refined[weight], plain[weight])
            latent = torch.nn.functional.linear(torch.randn(64, refined[weight].shape[1]), refined[weight].float())
            latent = latent[:, :channel] + refined[bias][:channel].float()
            # what the norm divides by beside the constant: its relative effect is half of this ratio
            assert float(latent.square().sum(1).max()) / float(refined[bias][channel]) ** 2 < 1e-3


def test_equal_requests_give_equal_bytes(tmp_path):
    for name in ("one", "two"):
        convert(tmp_path / name, to="mqa", group="contiguous", refine=6)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_the_error_of_every_layer_is_told(tmp_path, capsys):
    convert(tmp_path / "out", to="mqa", group="contiguous", refine=3, quiet=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("refined layer")]
    assert len(lines) == 4
    assert lines[0].startswith("refined layer 1/4: error 0.")
    assert " -> 0." in lines[0]
    convert(tmp_path / "quiet", to="mqa", group="contiguous", refine=3)
    assert capsys.readouterr().err == ""
