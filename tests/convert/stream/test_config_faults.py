"""A config.json with a wrong value ends a calibrated conversion with an error that names it, whoever reads it first."""

import json
import shutil

import pytest
from helpers.checkpoints import add_demo_tokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.measure.drift import drift_checkpoints

TEXT = "def function(argument): return a value of the list. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "few.txt"
    file.write_text(TEXT * 60)
    return file


def with_config(source, folder, **changes):
    """A copy of ``source`` with other values in its config and the demo's tokenizer."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    add_demo_tokenizer(folder)
    return folder


def convert(model, out, text, **options):
    options = {"to": "mqa", "group": "contiguous", **options}
    request = {"model": str(model), "out": str(out), "calibration": str(text), "samples": 1, "seq_len": 8, **options}
    return convert_checkpoint(ConvertRequest(**request, quiet=True))


def rope(**values):
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **values}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "nope"),
        ("hidden_act", 5),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", float("nan")),
        ("architectures", 5),
        ("architectures", ["LlamaForCausalLM", 5]),
        ("rope_theta", "x"),
        ("rope_theta", None),
        ("rope_type", ["x"]),
        ("rope_parameters", {"rope_theta": 10000.0, "rope_type": "x"}),
        ("dtype", "x"),
        ("attention_dropout", "x"),
        ("pad_token_id", 10**6),
    ],
)
def test_a_wrong_value_is_named(tmp_path, text, key, value):
    changes = rope(**{key: value}) if key in ("rope_theta", "rope_type") else {key: value}
    model = with_config(demo_folder(), tmp_path / "model", **changes)
    with pytest.raises(InputError, match=rf"^config.json: {key}\b.* must be "):
        convert(model, tmp_path / "out", text)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "full_attention must be"),
        ("mixtral", {"num_local_experts": 10**9}, "1000000000 experts"),
    ],
)
def test_what_only_some_families_have(tmp_path, text, tiny_family, family, changes, message):
    source = tiny_family(family, vocab_size=2048)
    with pytest.raises(InputError) as caught:
        convert(with_config(source, tmp_path / "model", **changes), tmp_path / "out", text)
    assert message in str(caught.value)


def test_the_auxiliary_loss_of_experts_is_not_requested(tmp_path, text, tiny_family):
    source = tiny_family("mixtral", vocab_size=2048)
    model = with_config(source, tmp_path / "model", output_router_logits=True)
    convert(model, tmp_path / "out", text)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["output_router_logits"] is True


def test_a_method_that_reads_no_text_checks_types_too(tmp_path):
    model = with_config(demo_folder(), tmp_path / "model", rms_norm_eps="x")
    with pytest.raises(InputError, match="rms_norm_eps must be a number"):
        convert(model, tmp_path / "out", None, method="mean", group=None, calibration=None)


def test_drift_says_whose_config_it_is(tmp_path):
    bad = with_config(demo_folder(), tmp_path / "bad", hidden_act="nope")
    with pytest.raises(InputError, match=r"bad: config.json: hidden_act must be an activation that transformers knows"):
        drift_checkpoints(str(demo_folder()), str(bad), samples=1, seq_len=16)
