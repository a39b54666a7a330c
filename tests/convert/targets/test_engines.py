"""The table of engines: what each serves, at which cache."""

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import hub_config, read_model
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import make_model
from kvfold.convert.targets.engines import (
    describe_folded_model,
    describe_mla_config,
    describe_mla_model,
    list_engine_support,
)
from kvfold.convert.targets.mla.layout import build_mla_config
from kvfold.convert.targets.mla.spec import MlaSpec

LLAMA = hub_config("meta-llama/Meta-Llama-3-8B") | {"architectures": None}
CASES = read_cases(__file__)


def model(**changes):
    return make_model({**LLAMA, **changes})


def answers(result):
    """The engines that refuse a model, and those that ran one like it."""
    found = list_engine_support(result)
    refused = [support.engine for support in found if not support.serves]
    return refused, [support.engine for support in found if support.ran]


@pytest.mark.parametrize(("changes", "kv_heads", "refused", "ran"), CASES["folds"])
def test_who_refuses_which_fold(changes, kv_heads, refused, ran):
    assert answers(describe_folded_model(model(**changes), kv_heads)) == (refused, ran)


def test_folds_of_layout_kvfold_are_served_by_vllm_where_the_plug_in_has_them(tiny_family):
    for family in ("gpt2", "gpt_neox", "opt", "gptj"):
        source = read_model(tiny_family(family))
        others = ["SGLang", "llama.cpp", "mlx-lm"]
        folded, _ = answers(describe_folded_model(source, 2))
        assert folded == (["vLLM", *others] if family == "gptj" else others)
        latent, _ = answers(describe_mla_model(source, MlaSpec(12, 0, layout="kvfold")))
        assert latent == ["vLLM", *others]


@pytest.mark.parametrize(("changes", "split", "layout", "refused", "ran"), CASES["latents"])
def test_who_refuses_which_split_and_layout(changes, split, layout, refused, ran):
    source = model(**changes)
    spec = MlaSpec(*split, layout=layout)
    result = describe_mla_model(source, spec)
    assert answers(result) == (refused, ran)
    found = list_engine_support(result)
    assert {support.cache for support in found if support.serves} == {sum(split)}
    theta = [1e4 ** (-index / 32) for index in range(spec.rope_dim // 2)]
    if result.scaled_rope:
        theta = [angle / 4 for angle in theta]
    config = build_mla_config(source, spec, theta, dtype="bfloat16")
    assert list_engine_support(describe_mla_config(config)) == found


def test_mlx_lm_needs_the_older_spelling_of_the_rotary_base():
    theta = [500000.0 ** (-i / 32) for i in range(32)]
    config = build_mla_config(model(), MlaSpec(512, 64, layout="engine"), theta, dtype="bfloat16")
    assert answers(describe_mla_config(config))[0] == []
    del config["rope_theta"], config["rope_scaling"]  # as transformers saves it
    assert answers(describe_mla_config(config))[0] == ["mlx-lm"]


@pytest.mark.parametrize("layout", ["free", "engine"])
def test_no_layout_names_a_pad_token_that_its_class_would_zero(layout, tmp_path):
    """The class of layout ``free`` zeroes that row of the embedding, which may be a tied head, as
    it loads.
    """
    source = read_model(demo_folder())
    assert source.config["pad_token_id"] == 2
    spec = MlaSpec(24, 8, layout=layout)
    config = build_mla_config(source, spec, [1.0, 0.1, 0.01, 0.001], dtype="bfloat16")
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        stock.get_input_embeddings().weight.fill_(0.5)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.get_input_embeddings().weight == 0.5).all()
