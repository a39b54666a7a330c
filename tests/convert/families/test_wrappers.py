"""Multimodal wrappers: the language model inside is folded, everything else keeps its bytes."""

import json
import re
import shutil
from contextlib import closing
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import precision, wrappers
from helpers.cases import mostly_slow
from helpers.checkpoints import convert, read_json, stock_model, tensors
from helpers.walks import run_stream
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvfold.attention import absorb
from kvfold.convert import (
    DriftRequest,
    UptrainRequest,
    drift_checkpoints,
    uptrain_checkpoint,
)
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import DEFAULT_SIZES, WRAPPERS
from kvfold.convert.families.model import make_model
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.text.tokenizer import check_teacher_tokenizer


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    """``wrapper("llava")``: a folder with a tiny random wrapper, made once."""

    @cache
    def folder(name):
        made = tmp_path_factory.mktemp(name)
        wrappers.make_wrapper(name, made)
        return made

    return folder


def same(found, expected, given):
    """Both wrappers have the same logits, with an image too."""
    tolerance = {"rtol": precision.CONVERTED, "atol": precision.CONVERTED}
    torch.testing.assert_close(
        wrappers.logits(found, given), wrappers.logits(expected, given), **tolerance
    )


def configs(*folders):
    return [read_json(folder / "config.json") for folder in folders]


@pytest.mark.parametrize("name", mostly_slow(WRAPPERS, 4))
def test_only_keys_and_values_of_the_language_model_change(name, wrapper, tmp_path):
    source = wrapper(name)
    out = convert(source, tmp_path / "out", 2)
    before = tensors(source)
    after = tensors(out)
    old, new = configs(source, out)
    model = make_model(old, before)
    computed = {
        key for layer in range(2) for key in model.list_attention_tensors(layer, {"k", "v"})
    }
    assert set(before) == set(after)
    for key, tensor in before.items():
        if key not in computed:
            assert torch.equal(tensor, after[key]), key
        elif "norm" not in key:
            assert tensor.shape != after[key].shape, key
    assert new == {**old, "text_config": {**old["text_config"], "num_key_value_heads": 2}}


@pytest.mark.slow  # loads every wrapper four times
@pytest.mark.parametrize("name", WRAPPERS)
def test_images_and_text_give_the_logits_of_the_source(name, wrapper, tmp_path):
    given = wrappers.inputs(name)
    same(convert(wrapper(name), tmp_path / "same", 4), wrapper(name), given)
    out = convert(wrapper(name), tmp_path / "two", 2)
    folded = wrappers.logits(out, given)
    assert folded.isfinite().all()
    assert (folded - wrappers.logits(wrapper(name), given)).abs().max() > 1e-2
    if "pixel_values" in given:
        other = {**given, "pixel_values": given["pixel_values"] + 1}
        assert (wrappers.logits(out, other) - folded).abs().max() > 1e-2, "no image arrives"


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_stream_is_the_wrapper_on_text(name, wrapper):
    tokens = torch.randint(3, 80, (2, 17), generator=torch.Generator().manual_seed(1))
    with closing(open_checkpoint(str(wrapper(name)))) as checkpoint:
        read = Mock(side_effect=checkpoint.read_tensor)
        stream = CheckpointStream(checkpoint.config, read, list(checkpoint.tensors))
        found = run_stream(stream, tokens)
        model = make_model(checkpoint.config, checkpoint.tensors)
    stock = stock_model(
        wrapper(name), AutoModelForImageTextToText, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = stock(tokens).logits
    torch.testing.assert_close(found, expected, rtol=precision.CONVERTED, atol=precision.CONVERTED)
    names = {call.args[0] for call in read.mock_calls}
    assert names <= set(model.tensors), "the tower of images was read"


LATENT = {"to": "mla", "kv_rank": 65, "rope_dim": 32}


@pytest.mark.slow  # two calibrations and generated text
def test_a_wrapper_is_calibrated_on_text_alone(tmp_path):
    source = tmp_path / "source"
    given = wrappers.inputs("llava")
    wrappers.make_wrapper("llava", source, vocab_size=2048)
    text = tmp_path / "text.txt"
    text.write_text(read_text("calibration")[:40_000])  # a phrase repeated: ill-conditioned
    options = {"method": "principal", "calibration": str(text), "samples": 4, "seq_len": 32}
    options["refine"] = 1
    folded = convert(source, tmp_path / "two", 2, **{**options, "calibration": "self"})
    report = drift_checkpoints(
        DriftRequest(str(source), str(folded), text=str(text), samples=4, seq_len=32)
    )
    assert 0 < report.kl < 10
    same(convert(source, tmp_path / "latent", **{**options, **LATENT}), source, given)


@pytest.mark.parametrize("name", ["llava", "internvl", "mistral3", "smolvlm"])
def test_wrappers_that_build_any_language_model_hold_a_latent_one(name, tmp_path):
    """Nothing is lost at full rank, with an image too; what surrounds the language model keeps its
    bytes.
    """
    source = tmp_path / "source"
    given = wrappers.inputs(name)
    wrappers.make_wrapper(name, source, sliding_window=None, use_sliding_window=False)
    out = convert(source, tmp_path / "out", **{**LATENT, "method": "svd"})
    same(out, source, given)
    after = tensors(out)
    inside = re.compile("language_model|text_model")
    around = {key: value for key, value in tensors(source).items() if not inside.search(key)}
    assert around
    assert all(torch.equal(value, after[key]) for key, value in around.items())
    old, new = configs(source, out)
    assert new == {**old, "text_config": new["text_config"]}
    assert new["text_config"]["model_type"] == "youtu"
    options = {**given, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    expected = model.generate(**options)
    assert torch.equal(absorb(model).generate(**options), expected)


def test_the_older_flat_config_of_qwen2_vl(wrapper, tmp_path):
    source = Path(shutil.copytree(wrapper("qwen2_vl"), tmp_path / "flat"))
    (config,) = configs(source)
    inner = config.pop("text_config")
    table = inner.pop("rope_parameters")
    inner |= {
        "rope_theta": table["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    (source / "config.json").write_text(json.dumps({**inner, **config}))
    given = wrappers.inputs("qwen2_vl")
    same(source, wrapper("qwen2_vl"), given)
    out = convert(source, tmp_path / "out", 2)
    assert configs(out) == [{**inner, **config, "num_key_value_heads": 2}]
    same(out, convert(wrapper("qwen2_vl"), tmp_path / "nested", 2), given)


def test_names_of_files_written_by_transformers_5_too(wrapper, tmp_path):
    """transformers reads the language model of LLaVA under the names of its modules as well."""
    source = tmp_path / "modules"
    shutil.copytree(wrapper("llava"), source)
    renamed = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }

    moved = {}
    for key, tensor in tensors(source).items():
        old = next(prefix for prefix in renamed if key.startswith(prefix))
        moved[renamed[old] + key.removeprefix(old)] = tensor
    save_file(moved, source / "model.safetensors")
    out = convert(source, tmp_path / "new", 2)
    same(out, convert(wrapper("llava"), tmp_path / "old", 2), wrappers.inputs("llava"))


def test_uptraining_refuses_a_wrapper_before_it_begins(wrapper, out):
    with pytest.raises(InputError, match="llava"):
        uptrain_checkpoint(UptrainRequest(wrapper("llava"), out, "none.txt"))


def test_sizes_left_out_are_those_of_the_stock_class():
    assert set(wrappers.MODELS) == set(WRAPPERS)
    for name, sizes in DEFAULT_SIZES.items():
        stock = CONFIG_MAPPING[name]()
        assert sizes == {key: getattr(stock, key) for key in sizes}, name
    for name, each in WRAPPERS.items():
        assert CONFIG_MAPPING[name]().get_text_config().model_type == each.text, name


def test_a_wrapper_can_teach_a_plain_model(tmp_path):
    """Its number of tokens is in the config of its language model."""
    wrappers.make_wrapper("llava", tmp_path / "llava", vocab_size=2048)
    models = (open_checkpoint(tmp_path / "llava"), open_checkpoint(demo_folder()))
    check_teacher_tokenizer(*models, trust_remote_code=False)
