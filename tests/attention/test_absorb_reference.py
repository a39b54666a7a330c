"""A trained checkpoint, converted: ``absorb`` does not change what it says."""

import pytest
import torch

from kvfold.attention import absorb, unabsorb
from kvfold.convert import ConvertRequest, convert_checkpoint


@pytest.mark.slow
def test_greedy_tokens_of_the_converted_reference_model(reference, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    request = {"to": "mla", "kv_rank": 48, "rope_dim": 16, "method": "principal", "samples": 16, "seq_len": 256}
    calibration = str(reference / "calibration.txt")
    folder = str(tmp_path / "mla")
    convert_checkpoint(
        ConvertRequest(str(reference / "llama-mha"), folder, calibration=calibration, quiet=True, **request)
    )
    text = (reference / "evaluation.txt").read_text(encoding="utf-8")[:60000]
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    starts = range(0, len(tokens) - 48, (len(tokens) - 48) // 15)
    prompts = torch.stack([tokens[start : start + 48] for start in starts][:16])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"attention_mask": torch.ones_like(prompts), "min_new_tokens": 64, "max_new_tokens": 64}
    stock = model.generate(prompts, do_sample=False, **options)
    absorbed = absorb(model).generate(prompts, do_sample=False, **options)
    assert stock.shape == (16, 112)
    assert stock[:, 48:].unique().numel() > 20
    assert absorbed.tolist() == stock.tolist()
    assert unabsorb(model).generate(prompts, do_sample=False, **options).tolist() == stock.tolist()
