"""A config.json with a wrong value ends a calibrated conversion with an error that names it,
whoever reads it first.
"""

import json
import shutil

import pytest
from helpers.checkpoints import add_demo_tokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError


def with_config(source, folder, **changes):
    """A copy of ``source`` with other values in its config and the demo's tokenizer."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    add_demo_tokenizer(folder)
    return folder


def convert(model, out):
    options = {"to": "mqa", "group": "contiguous", "samples": 1, "seq_len": 8, "quiet": True}
    return convert_checkpoint(ConvertRequest(str(model), str(out), **options))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "nope"),
        ("rms_norm_eps", float("nan")),
        ("architectures", ["LlamaForCausalLM", 5]),
        ("rope_type", ["x"]),
        ("rope_parameters", {"rope_theta": 10000.0, "rope_type": "x"}),
        ("dtype", "x"),
        ("attention_dropout", "x"),
        ("pad_token_id", 10**6),
    ],
)
def test_a_wrong_value_is_named(tmp_path, key, value):
    changes = {key: value}
    if key == "rope_type":
        changes = {"rope_parameters": {"rope_theta": 10000.0, **changes}}
    model = with_config(demo_folder(), tmp_path / "model", **changes)
    with pytest.raises(InputError, match=rf"^config.json: {key}\b.* must be "):
        convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"sliding_window": None}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma3_text", {"rope_parameters": {"full_attention": 5}}),
        ("mixtral", {"num_local_experts": 10**9}),
    ],
    ids=["window", "scalar", "rope", "experts"],
)
def test_what_only_some_families_have(tmp_path, tiny_family, family, changes):
    model = with_config(tiny_family(family, vocab_size=2048), tmp_path / "model", **changes)
    with pytest.raises(InputError, match=r"config\.json"):
        convert(model, tmp_path / "out")
