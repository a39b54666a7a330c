"""The table of engines: what each serves, at which cache."""

import json

import pytest
import torch
from helpers.checkpoints import hub_config
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import make_model
from kvfold.convert.targets.engines import (
    describe_fold,
    describe_latent_config,
    describe_mla,
    list_engine_support,
)
from kvfold.convert.targets.mla.layout import build_mla_config
from kvfold.convert.targets.mla.spec import MlaSpec

LLAMA = hub_config("meta-llama/Meta-Llama-3-8B") | {"architectures": None}
PHI = {"model_type": "phi", "num_key_value_heads": 32, "partial_rotary_factor": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}


def model(**changes):
    return make_model({**LLAMA, **changes})


def refusals(result):
    return {support.engine for support in list_engine_support(result) if not support.serves}


@pytest.mark.parametrize(
    ("changes", "kv_heads", "refused"),
    [
        (PHI, 32, set()),
        (PHI, 8, {"SGLang", "llama.cpp"}),
        ({"model_type": "olmo"}, 4, {"SGLang", "mlx-lm"}),
        # As transformers 5 writes it: a fold says it in the older spelling too.
        ({"rope_theta": None, "rope_parameters": PLAIN}, 4, set()),
        ({"rope_theta": None, "rope_parameters": {"full_attention": PLAIN}}, 4, {"mlx-lm"}),
    ],
)
def test_who_refuses_which_fold(changes, kv_heads, refused):
    assert refusals(describe_fold(model(**changes), kv_heads)) == refused


def test_folds_were_run_with_llama_alone():
    qwen = describe_fold(model(model_type="qwen2"), 4)
    assert not any(support.ran for support in list_engine_support(qwen))
    llama = describe_fold(model(), 4)
    assert {support.engine for support in list_engine_support(llama) if not support.ran} == {
        "SGLang"
    }


def test_folds_of_layout_kvfold_are_served_by_vllm_where_the_plug_in_has_them(tiny_family):
    for family in ("gpt2", "gpt_neox", "opt", "gptj"):
        source = make_model(json.loads((tiny_family(family) / "config.json").read_text()))
        others = {"SGLang", "llama.cpp", "mlx-lm"} | ({"vLLM"} if family == "gptj" else set())
        assert refusals(describe_fold(source, 2)) == others
        latent = describe_mla(source, MlaSpec(12, 0, layout="kvfold"))
        assert refusals(latent) == {"SGLang", "llama.cpp", "mlx-lm", "vLLM"}


@pytest.mark.parametrize(
    ("split", "layout", "refused"),
    [
        ((512, 64), "engine", set()),
        ((448, 64), "engine", set()),
        ((512, 64), "free", {"SGLang", "llama.cpp", "mlx-lm"}),
        ((96, 32), "engine", {"vLLM"}),
        ((448, 128), "engine", {"vLLM"}),  # 576, but not in the sizes of its kernels
        ((96, 32), "free", {"vLLM", "SGLang", "llama.cpp", "mlx-lm"}),
    ],
)
def test_who_refuses_which_split_and_layout(split, layout, refused):
    result = describe_mla(model(), MlaSpec(*split, layout=layout))
    assert refusals(result) == refused
    caches = {support.cache for support in list_engine_support(result) if support.serves}
    assert caches == {sum(split)}


@pytest.mark.parametrize(
    ("changes", "rank", "serves", "ran"),
    [
        ({}, 512, True, True),
        ({}, 448, True, False),  # on GPUs only
        ({"num_attention_heads": 64, "num_key_value_heads": 16}, 512, True, True),  # on CPUs only
        ({"num_attention_heads": 64, "num_key_value_heads": 16}, 448, False, False),
    ],
)
def test_the_heads_of_layout_free_decide_where_vllm_serves_it(changes, rank, serves, ran):
    found = list_engine_support(describe_mla(model(**changes), MlaSpec(rank, 64)))
    (vllm,) = (support for support in found if support.engine == "vLLM")
    assert (vllm.serves, vllm.ran) == (serves, ran)


def test_mlx_lm_needs_the_older_spelling_of_the_rotary_base():
    theta = [500000.0 ** (-i / 32) for i in range(32)]
    config = build_mla_config(model(), MlaSpec(512, 64, layout="engine"), theta, dtype="bfloat16")
    assert refusals(describe_latent_config(config)) == set()
    del config["rope_theta"], config["rope_scaling"]  # as transformers saves it
    assert refusals(describe_latent_config(config)) == {"mlx-lm"}


@pytest.mark.parametrize("layout", ["free", "engine"])
def test_no_layout_names_a_pad_token_that_its_class_would_zero(layout, tmp_path):
    """The class of layout ``free`` zeroes that row of the embedding, which may be a tied head, as
    it loads.
    """
    source = make_model(json.loads((demo_folder() / "config.json").read_text()))
    assert source.config["pad_token_id"] == 2
    spec = MlaSpec(24, 8, layout=layout)
    config = build_mla_config(source, spec, [1.0, 0.1, 0.01, 0.001], dtype="bfloat16")
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        stock.get_input_embeddings().weight.fill_(0.5)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.get_input_embeddings().weight == 0.5).all()
