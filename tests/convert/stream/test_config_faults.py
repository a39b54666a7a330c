"""A config.json with a wrong value ends a calibrated conversion with an error that names it,
whoever reads it first.
"""

import shutil

import pytest
from helpers.checkpoints import add_demo_tokenizer, edit_json, run_conversion

from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("family", "key", "changes"),
    [
        ("", "hidden_act", {"hidden_act": "nope"}),
        ("", "rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("", "architectures", {"architectures": ["LlamaForCausalLM", 5]}),
        ("", "rope_parameters", {"rope_parameters": {**ROPE, "rope_type": ["x"]}}),
        ("", "rope_parameters", {"rope_parameters": {**ROPE, "rope_type": "x"}}),
        ("", "dtype", {"dtype": "x"}),
        ("", "attention_dropout", {"attention_dropout": "x"}),
        ("", "pad_token_id", {"pad_token_id": 10**6}),
        ("gemma2", "", {"sliding_window": None}),
        ("gemma2", "", {"query_pre_attn_scalar": 0}),
        ("gemma3_text", "", {"rope_parameters": {"full_attention": 5}}),
        ("mixtral", "", {"num_local_experts": 10**9}),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(tmp_path, tiny_family, family, key, changes):
    source = tiny_family(family, vocab_size=2048) if family else demo_folder()
    model = shutil.copytree(source, tmp_path / "model")
    add_demo_tokenizer(model)
    edit_json(model / "config.json", **changes)
    options = {"to": "mqa", "group": "contiguous", "samples": 1, "seq_len": 8}
    named = rf"config.json: {key}\b.* must be " if key else r"config\.json"
    with pytest.raises(InputError, match=named):
        run_conversion(model, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
