"""Finite weights at the ends of what numbers hold: the result is finite, and exact where the source is."""

import pytest
import torch
from helpers.checkpoints import add_demo_tokenizer, stock_model
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.measure.verify import verify_checkpoint

ATTENTION, TEXT = "qkvo", {"samples": 4, "seq_len": 24}
WHOLE = {"to": "mla", "kv_rank": 17, "rope_dim": 16, "allow_growth": True}
HALF = {"to": "mla", "kv_rank": 8, "rope_dim": 8}
CASES = {  # what is multiplied by what, and conversions that lose nothing then
    "no attention": (ATTENTION, 0.0, [HALF, HALF | {"layout": "engine"}]),
    "no embedding": ("embed", 0.0, [HALF | {"layout": "engine"}]),
    "no norms": ("layernorm", 0.0, [HALF, HALF | {"layout": "engine"}]),
    "loud attention": (ATTENTION, 1e15, [WHOLE]),
    "loud embedding": ("embed", 1e15, [WHOLE]),
    "loud": ("layernorm", 1e15, [WHOLE]),
    "whispers": ("", 1e-15, [HALF]),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=2, initializer_range=0.2, **sizes)
    return LlamaForCausalLM(config).state_dict(), config


@torch.no_grad()
def logits(folder):
    tokens = torch.randint(0, 2048, (2, 24), generator=torch.Generator().manual_seed(0))
    return stock_model(folder)(tokens).logits


@pytest.mark.parametrize(("part", "factor", "conversions"), CASES.values(), ids=CASES)
def test_results_are_finite_and_exact_where_the_source_is(model, tmp_path, part, factor, conversions):
    tensors, config = model
    names = [f"{each}_proj" for each in part] if part == ATTENTION else [part]
    changed = LlamaForCausalLM(config)
    scaled = {name: tensor * factor for name, tensor in tensors.items() if any(each in name for each in names)}
    changed.load_state_dict({**tensors, **scaled})
    changed.save_pretrained(tmp_path / "model")
    add_demo_tokenizer(tmp_path / "model")
    expected = logits(tmp_path / "model")
    assert expected.isfinite().all()
    for number, options in enumerate(conversions):
        out = tmp_path / str(number)
        convert_checkpoint(ConvertRequest(model=str(tmp_path / "model"), out=str(out), quiet=True, **options, **TEXT))
        assert verify_checkpoint(out).problems == []
        torch.testing.assert_close(logits(out), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
