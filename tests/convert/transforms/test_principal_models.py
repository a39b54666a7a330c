"""Cases in which a principal conversion must be exact, in the logits of whole models."""

import shutil

import pytest
import torch
from helpers.checkpoints import tensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-5), ("gpt_oss", 1e-4)])
def test_identical_heads_fold_exactly(tiny_family, tmp_path, family, tolerance):
    """Twins that are no neighbors: query heads change places, each with its attention sink where
    the model has them.
    """
    made = tiny_family(family, vocab_size=2048, num_key_value_heads=4, attention_bias=True)
    source = shutil.copytree(made, tmp_path / "source")
    out = tmp_path / "out"
    stored = tensors(source)
    for name in [name for name in stored if ".k_proj." in name or ".v_proj." in name]:
        stored[name] = stored[name][: len(stored[name]) // 2].repeat(
            2, *[1] * (stored[name].dim() - 1)
        )
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    text = tmp_path / "few.txt"
    text.write_text("def function(argument): return a value of the list. " * 400)
    options = {"kv_heads": 2, "group": "similar", "samples": 8, "seq_len": 32, "quiet": True}
    convert_checkpoint(
        ConvertRequest(str(source), str(out), to="gqa", calibration=str(text), **options)
    )
    tokens = torch.randint(3, 2048, (4, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
            for folder in (source, out)
        )
    assert (expected - found).abs().max() < tolerance * expected.abs().max()
    sinks = "model.layers.0.self_attn.sinks"
    if sinks in stored:
        assert stored[sinks].std() > 0.1
        assert torch.equal(tensors(out)[sinks], stored[sinks][[0, 1, 4, 5, 2, 3, 6, 7]])
